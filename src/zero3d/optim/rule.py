"""Which torch optimizer makes the update, and for which parameters with which settings."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from zero3d import config
from zero3d.contracts import OptimizerFactory
from zero3d.errors import ConfigError, UsageError
from zero3d.params import ParamInfo

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """`build` makes an optimizer; `settings_of` gives a parameter's own settings by its name."""

    name: str
    build: OptimizerFactory
    settings_of: Callable[[str], Settings]


def rule_for(optimizer: str | OptimizerFactory, options: config.Optimizer, infos: Sequence[ParamInfo]) -> Rule:
    """The user's function as it is, or the class in torch.optim that is named.

    Raises `ConfigError` for an unknown name and `UsageError` for an optimizer that does not treat each element by
    itself: on shards it would compute something else.
    """
    if callable(optimizer):
        name = getattr(optimizer, "__qualname__", repr(optimizer))
        rule = Rule(name, optimizer, lambda _: {})
    else:
        rule = _named(optimizer, options, infos)
    _refuse_unless_elementwise(rule)
    return rule


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
    given = {key: value for key, value in wanted.items() if key in accepted}
    if chosen in (torch.optim.AdamW, torch.optim.Adam):
        given["fused"] = True
    plain = {info.name for info in infos if _matches(info, options.no_decay)}

    def settings_of(parameter: str) -> Settings:
        return {"weight_decay": 0.0} if "weight_decay" in accepted and parameter in plain else {}

    def build(parameters: Sequence[Any]) -> Any:
        return chosen(parameters, **given)

    return Rule(chosen.__name__, build, settings_of)


def _matches(info: ParamInfo, patterns: Sequence[str]) -> bool:
    return any(len(info.shape) < 2 if pattern == "1d" else fnmatchcase(info.name, pattern) for pattern in patterns)


def _refuse_unless_elementwise(rule: Rule) -> None:
    """Three steps on a matrix, and on the same elements in flat parts with an optimizer each, must give the same."""
    start = torch.linspace(-1.0, 1.0, 64).view(8, 8)
    try:
        as_matrix = _three_steps(rule.build, start.clone(), 0)
        flat = start.view(-1)
        as_parts = torch.cat([_three_steps(rule.build, flat[at : at + 24].clone(), at) for at in (0, 24, 48)])
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"optimizer {rule.name} could not be run on a flat part of a parameter: {error}",
            hint="ZeRO needs an optimizer that treats each element by itself, such as AdamW, SGD or Lion.",
        ) from error
    if not torch.allclose(as_matrix, as_parts, rtol=1e-5, atol=1e-7):
        raise UsageError(
            f"optimizer {rule.name} does not treat each element by itself: on shards it would compute something else",
            hint="Optimizers that look at whole matrices do not work at any level in this version; "
            "AdamW, Adam, SGD, Lion and other elementwise ones do.",
        )


def _three_steps(build: OptimizerFactory, part: Tensor, offset: int) -> Tensor:
    """`part`, flat, after three updates; `offset`: where in the whole it begins."""
    parameter = torch.nn.Parameter(part)
    optimizer = build([parameter])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer function returned {type(optimizer).__name__}, not a torch.optim.Optimizer",
            hint="Pass a function such as lambda parameters: torch.optim.SGD(parameters, lr=0.1).",
        )
    index = torch.arange(offset, offset + part.numel(), dtype=torch.float32)
    for step in range(3):
        parameter.grad = torch.sin(index * 0.7 + step).view_as(parameter)
        optimizer.step()
    return parameter.detach().reshape(-1)
