"""What an optimizer looks at besides an element: tried on small matrices before anything is trained.

elementwise  an element's update depends on that element alone: any cut of a parameter gives the same
by itself    a parameter's update depends on that parameter alone: each may have an optimizer of its own
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zero3d.computed import computed
from zero3d.contracts import OptimizerFactory
from zero3d.errors import UsageError

SHAPE = (132, 136)
"""Above 128 rows and columns, from which on some optimizers factor their state."""
CUTS = (0, 4_992, 9_024, SHAPE[0] * SHAPE[1])
STEPS = 3


@computed
def is_elementwise(name: str, build: OptimizerFactory) -> bool:
    """Whether three updates of a matrix, and of the same elements in flat parts with an optimizer each, are the same.

    False as well where the optimizer takes no flat parts. Raises `UsageError` where it cannot be run at all.
    """
    start = _matrix()
    whole = _run(name, build, [start])[0]
    try:
        flat = start.view(-1)
        spans = [slice(*ends) for ends in pairwise(CUTS)]
        parts = torch.cat([_updated(build, [flat[span]], [span.start])[0] for span in spans])
    except UsageError:
        raise
    except Exception:  # whatever the user's optimizer thinks of a flat tensor
        return False
    return torch.allclose(whole.view(-1), parts, rtol=1e-5, atol=1e-7, equal_nan=True)


@computed
def keeps_apart(name: str, build: OptimizerFactory) -> bool:
    """Whether two matrices that share an optimizer are updated as with an optimizer each."""
    starts = [_matrix(), _matrix().flip(0).contiguous()]
    together = _run(name, build, starts)
    apart = [_updated(build, [start], [offset])[0] for start, offset in zip(starts, _offsets(starts))]
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True) for one, other in zip(together, apart))


@computed
def refusal_of(build: OptimizerFactory, shape: Sequence[int]) -> str:
    """Why the optimizer cannot update a parameter of `shape` (of a few elements a dim at most); empty if it can."""
    small = [min(extent, 8) for extent in shape]
    try:
        _updated(build, [torch.ones(small)], [0])
    except UsageError:
        raise
    except Exception as error:  # whatever the user's optimizer thinks of it
        return str(error) or type(error).__name__
    return ""


@computed
def learning_rate(build: OptimizerFactory) -> float:
    """The peak learning rate of the first parameter group; 0 where groups have none."""
    return float(_built(build, [torch.nn.Parameter(_matrix())]).param_groups[0].get("lr", 0.0))


@computed
def state_per_element(build: OptimizerFactory) -> int:
    """How many elements of state the optimizer keeps for one of a parameter, rounded up."""
    kept = sum(value.numel() for value in _state(build).values() if isinstance(value, Tensor) and value.dim())
    return -(-kept // (SHAPE[0] * SHAPE[1]))


@computed
def state_keys(build: OptimizerFactory) -> frozenset[str]:
    """What the state is called that the optimizer keeps of a flat parameter."""
    return frozenset(key for key, value in _state(build).items() if value is not None)


def _state(build: OptimizerFactory) -> Mapping[str, Any]:
    """Of a flat parameter, after an update."""
    parameter = torch.nn.Parameter(torch.ones(SHAPE[0] * SHAPE[1]))
    optimizer = _built(build, [parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return state


def _matrix() -> Tensor:
    return torch.linspace(-1.0, 1.0, SHAPE[0] * SHAPE[1]).view(SHAPE)


def _run(name: str, build: OptimizerFactory, starts: Sequence[Tensor]) -> list[Tensor]:
    """Matrices after three updates by one optimizer."""
    try:
        return _updated(build, starts, _offsets(starts))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"optimizer {name} could not be run on a small matrix: {error}",
            hint="zero3d calls step() without a closure, with dense gradients, as AdamW, SGD or Muon can be called.",
        ) from error


def _offsets(starts: Sequence[Tensor]) -> list[int]:
    return [start.numel() * index for index, start in enumerate(starts)]


def _updated(build: OptimizerFactory, starts: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    """Copies of `starts` after three updates; `offsets`: where each begins among all elements that have a gradient.

    Gradients grow tenfold each time: one that is clipped at some norm shows it.
    """
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = _built(build, parameters)
    for step in range(STEPS):
        for parameter, offset in zip(parameters, offsets):
            index = torch.arange(offset, offset + parameter.numel(), dtype=torch.float32)
            parameter.grad = (torch.sin(index * 0.7 + step) * 10.0**step).view_as(parameter)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _built(build: OptimizerFactory, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = build(list(parameters))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer function returned {type(optimizer).__name__}, not a torch.optim.Optimizer",
            hint="Pass a function such as lambda parameters: torch.optim.SGD(parameters, lr=0.1).",
        )
    return optimizer
