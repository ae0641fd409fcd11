"""Outputs that a model collects from inside its blocks as they run, as Transformers' models do when they are asked."""

from torch import nn

from zero3d.errors import ConfigError

SWITCHES = ("output_hidden_states", "output_attentions", "output_router_logits")


def refuse_captures(model: nn.Module, setting: str, reason: str) -> None:
    """Raises `ConfigError` for a model that is set to collect them. With `setting` on it cannot: for this `reason`."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        for switch in SWITCHES:
            if getattr(config, switch, None) is True:
                raise ConfigError(
                    f"{name or 'the model'} collects outputs of its blocks (config.{switch} = True), and {reason} "
                    f"with {setting}",
                    hint=f"Set config.{switch} = False, or leave {setting} out.",
                )
