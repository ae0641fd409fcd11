"""Models that tensor parallelism and pipeline stages cannot take as they are."""

from torch import nn

from zero3d.errors import ConfigError, UsageError

SWITCHES = ("output_hidden_states", "output_attentions", "output_router_logits")


def refuse_captures(model: nn.Module, setting: str, reason: str) -> None:
    """Raises `ConfigError` for a model that is set to collect outputs of its blocks as they run, as those of
    Transformers can be. With `setting` on it cannot: for this `reason`."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        for switch in SWITCHES:
            if getattr(config, switch, None) is True:
                raise ConfigError(
                    f"{name or 'the model'} collects outputs of its blocks (config.{switch} = True), and {reason} "
                    f"with {setting}",
                    hint=f"Set config.{switch} = False, or leave {setting} out.",
                )


def refuse_compiled(model: nn.Module, setting: str) -> None:
    """Raises `UsageError` for a model of which a module is compiled."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise UsageError(
                f"module {name or '(the model)'} is compiled, and {setting} changes what modules compute",
                hint=f"Leave torch.compile out where {setting}.",
            )
