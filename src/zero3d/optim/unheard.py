"""Settings of `[optimizer]` that an optimizer of the user's own would not hear of."""

from collections.abc import Mapping

from zero3d.config import Config
from zero3d.errors import ConfigError, UsageError


def refuse_unheard(config: Config, optimizer: object) -> None:
    """Raises `ConfigError` where one is set, `UsageError` for what is no optimizer function."""
    choices = list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
    for one in choices:
        if one is not None and not isinstance(one, str) and not callable(one):
            raise UsageError(
                f"the optimizer is an object of class {type(one).__name__}",
                hint="Give a function of parameters, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1).",
            )
    if any(one is None or isinstance(one, str) for one in choices):
        return
    set_here = config.model_fields_set & {"optimizer"} and config.optimizer.model_fields_set
    unheard = sorted(set_here & {"name", "lr", "betas", "eps", "weight_decay", "no_decay"}) if set_here else []
    if unheard:
        raise ConfigError(
            f"optimizer.{unheard[0]} is set, and the optimizer is a function that makes its own settings",
            hint="Set it in one place: in the function, or in the configuration with optimizer = None.",
        )
