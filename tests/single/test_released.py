"""A released parameter says which one it is, however it is touched, though those of a bucket share what guards them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests import tiny

WAYS: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "a method": lambda released, _: released.sum(),
    "an operand on the right": lambda released, plain: plain + released,
    "in a list": lambda released, plain: torch.stack([plain, released]),
    "by its keyword": lambda released, plain: torch.add(plain, other=released),
    "as an index": lambda released, plain: plain[..., released],
    "its data": lambda released, _: released.data,
    "a copy": lambda released, _: copy.deepcopy(released),
    "a shallow copy": lambda released, _: copy.copy(released),
}


@pytest.fixture(scope="module")
def engine() -> zero3d.Engine:
    return zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, {"zero": {"level": 3}})


@pytest.mark.parametrize("name", ["blocks.0.norm1.weight", "blocks.2.up.weight", "tokens.weight"])
@pytest.mark.parametrize("way", WAYS)
def test_the_parameter_that_is_touched_is_named(engine: zero3d.Engine, way: str, name: str) -> None:
    released = engine.model.get_parameter(name)
    with pytest.raises(zero3d.ReleasedParameterError, match=f"parameter {name} is released"):
        WAYS[way](released, torch.ones(released.shape))


def test_of_two_of_a_bucket_the_first_is_named(engine: zero3d.Engine) -> None:
    first, second = (engine.model.get_parameter(f"blocks.1.{name}.weight") for name in ("norm2", "norm1"))
    with pytest.raises(zero3d.ReleasedParameterError, match=r"parameter blocks\.1\.norm2\.weight is released"):
        torch.cat([torch.ones(2), first, second])


def test_what_a_parameter_is_can_be_asked(engine: zero3d.Engine) -> None:
    name = "blocks.1.up.weight"
    released, plain = engine.model.get_parameter(name), tiny.tiny().get_parameter(name)
    asked = [(one.shape, one.dtype, one.requires_grad, one.is_leaf, one.numel()) for one in (released, plain)]
    assert asked[0] == asked[1] and isinstance(released, nn.Parameter)
    assert repr(released).endswith(f"Parameter {name} [128, 32], released")
    with engine.gathered():
        assert type(released) is nn.Parameter
        assert torch.equal(copy.deepcopy(released), engine.weight_of(name))
