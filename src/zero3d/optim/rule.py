"""A rule: which torch optimizer updates a parameter, and with which settings."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from zero3d import config
from zero3d.contracts import OptimizerFactory
from zero3d.errors import ConfigError
from zero3d.params import ParamInfo

Settings = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Rule:
    """`build` makes an optimizer; `settings_of` gives a parameter's own settings by its name."""

    name: str
    build: OptimizerFactory
    settings_of: Callable[[str], Settings]


def rule_for(optimizer: str | OptimizerFactory, options: config.Optimizer, infos: Sequence[ParamInfo]) -> Rule:
    """The user's function as it is, or the class in torch.optim that is named, with the configuration's settings.

    Raises `ConfigError` for an unknown name.
    """
    if callable(optimizer):
        name = getattr(optimizer, "__qualname__", repr(optimizer))
        return Rule(name, optimizer, lambda _: {})
    return _named(optimizer, options, infos)


def matches(info: ParamInfo, pattern: str) -> bool:
    """Whether `pattern` matches one of the parameter's names, ties too."""
    return any(fnmatchcase(name, pattern) for name in (info.name, *info.ties))


def _named(name: str, options: config.Optimizer, infos: Sequence[ParamInfo]) -> Rule:
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    chosen = classes.get(name.lower())
    if chosen is None:
        raise ConfigError(
            f'optimizer.name = "{name}" is not in torch.optim', hint="There are: " + ", ".join(sorted(classes))
        )
    accepted = inspect.signature(chosen).parameters
    wanted: dict[str, Any] = {
        "lr": options.lr,
        "betas": options.betas,
        "eps": options.eps,
        "weight_decay": options.weight_decay,
    }
    given = {key: value for key, value in wanted.items() if key in accepted and _fits(value, accepted[key].default)}
    if chosen in (torch.optim.AdamW, torch.optim.Adam):
        given["fused"] = True
    plain = {info.name for info in infos if _without_decay(info, options.no_decay)}

    def settings_of(parameter: str) -> Settings:
        return {"weight_decay": 0.0} if "weight_decay" in accepted and parameter in plain else {}

    def build(parameters: Sequence[Any]) -> Any:
        return chosen(parameters, **given)

    return Rule(chosen.__name__, build, settings_of)


def _fits(value: object, default: object) -> bool:
    """One word may mean several things: Adafactor's eps is a pair, and keeps its default."""
    return isinstance(default, tuple) == isinstance(value, tuple)


def _without_decay(info: ParamInfo, patterns: Sequence[str]) -> bool:
    return any(len(info.shape) < 2 if pattern == "1d" else fnmatchcase(info.name, pattern) for pattern in patterns)
