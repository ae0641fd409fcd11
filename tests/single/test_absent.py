"""Tensors of another stage: what is known of them, what is computed at once, and when their values are asked for."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zero3d.errors import UsageError
from zero3d.pipeline.absent import Absent, Source, is_absent, present

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


class Asked:
    """A tensor of another stage that counts how often its values were asked for."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.times = 0
        meta = torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
        self.tensor = Absent.of(meta, Source("block.0#0", self._give).value, CPU)

    def _give(self, source: Source) -> Tensor:
        assert source.name == "block.0#0"
        self.times += 1
        return self.value


def asked(*shape: int, needs_gradient: bool = False) -> Asked:
    torch.manual_seed(1)
    return Asked(torch.randn(shape or (2, 3, 4)).requires_grad_(needs_gradient))


def test_shape_dtype_and_device_are_known() -> None:
    one = asked(needs_gradient=True)
    absent = one.tensor
    assert isinstance(absent, Tensor)
    assert tuple(absent.shape) == tuple(absent.size()) == (2, 3, 4)
    assert (absent.dtype, absent.ndim, absent.numel(), len(absent)) == (torch.float32, 3, 24, 2)
    assert absent.device == CPU and not absent.is_meta and not absent.is_cuda
    assert absent.requires_grad and absent.is_floating_point() and absent.is_contiguous()
    batch, length, width = absent.shape
    assert (batch, length, width) == (2, 3, 4) and absent.stride() == (12, 4, 1)
    assert one.times == 0


MADE_OF_THE_SHAPE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "ones_like, another dtype": lambda x: torch.ones_like(x, dtype=torch.bool),
    "full_like": lambda x: torch.full_like(x, 3),
    "new_zeros": lambda x: x.new_zeros(5),
    "new_full": lambda x: x.new_full((2, 2), -1.0),
    "arange": lambda x: torch.arange(x.shape[1], device=x.device),
    "mask": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril(),
}


@pytest.mark.parametrize("name", MADE_OF_THE_SHAPE)
def test_what_depends_on_the_shape_alone_is_computed_at_once(name: str) -> None:
    one, make = asked(), MADE_OF_THE_SHAPE[name]
    found = make(one.tensor)
    assert not is_absent(found) and one.times == 0
    expected = make(one.value)
    assert found.device == CPU and found.dtype == expected.dtype
    assert torch.equal(found, expected)


WRITTEN_DOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x + 1,
    "from the right": lambda x: 2 - x,
    "with a tensor that is here": lambda x: torch.linspace(0, 1, 4) * x,
    "product": lambda x: x @ x.transpose(1, 2),
    "view": lambda x: x.view(6, 4).t(),
    "part": lambda x: x[:, 1:, 0],
    "part by a tensor": lambda x: x[:, torch.tensor([2, 0])],
    "function": lambda x: F.softmax(F.gelu(x), dim=-1),
    "one of several": lambda x: x.chunk(2, dim=-1)[1],
    "named tuple": lambda x: x.max(dim=1).values,
    "list of tensors": lambda x: torch.cat([x, x.flip(0)], dim=1),
    "another dtype": lambda x: x.double().mean((0, 1)),
    "with itself": lambda x: x * x.sigmoid() + x,
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "mask": lambda x: x.masked_fill(torch.ones(3, 4, dtype=torch.bool).tril(), 0.0),
}


@pytest.mark.parametrize("name", WRITTEN_DOWN)
def test_operations_are_done_when_their_values_are_needed(name: str) -> None:
    one, make = asked(), WRITTEN_DOWN[name]
    found, expected = make(one.tensor), make(one.value)
    assert isinstance(found, Absent) and one.times == 0
    assert found.shape == expected.shape and found.dtype == expected.dtype and found.device == CPU
    assert torch.equal(present(found), expected)
    assert one.times > 0


def test_what_nobody_needs_is_never_asked_for() -> None:
    one, other = asked(), asked()
    unused = one.tensor * 2
    assert torch.equal(present(other.tensor + 1), other.value + 1)
    assert (one.times, other.times) == (0, 1)
    assert is_absent(unused)


def test_an_operation_is_done_once() -> None:
    one = asked()
    middle = one.tensor.exp()
    left, right = middle + 1, middle * 2
    assert torch.equal(present(left) + present(right), (one.value.exp() + 1) + one.value.exp() * 2)
    assert present(middle) is present(middle)
    assert one.times == 1


def test_gradients_go_through_what_was_written_down() -> None:
    one = asked(needs_gradient=True)
    scale = torch.tensor(3.0, requires_grad=True)
    middle = one.tensor * scale
    present(middle.square().sum()).backward()
    assert one.value.grad is not None and scale.grad is not None
    torch.testing.assert_close(one.value.grad, 18 * one.value.detach())
    torch.testing.assert_close(scale.grad, 6 * one.value.detach().square().sum())


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "iadd": lambda x: x.__iadd__(torch.ones(4)),
    "relu_": lambda x: F.relu(x, inplace=True),
    "a part is set": lambda x: x.__setitem__((slice(None), 1), 7.0),
    "mul_ twice": lambda x: x.mul_(2).add_(1),
    "masked_fill_": lambda x: x.masked_fill_(torch.eye(3, 4, dtype=torch.bool), -1.0),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operations_change_what_is_named_and_not_what_it_came_from(name: str) -> None:
    one, change = asked(), IN_PLACE[name]
    before = one.value.clone()
    mine, plain = one.tensor + 0, before + 0
    also = mine
    earlier = mine * 5
    change(mine)
    expected_earlier = plain * 5
    change(plain)
    assert one.times == 0
    assert torch.equal(present(mine), plain) and torch.equal(present(also), plain)
    assert torch.equal(present(earlier), expected_earlier)
    assert torch.equal(one.value, before)


def test_a_view_sees_what_becomes_of_its_tensor() -> None:
    one = asked()
    mine, plain = one.tensor + 0, one.value + 0
    view, plain_view = mine[:, 1:], plain[:, 1:]
    mine.mul_(2)
    plain.mul_(2)
    assert torch.equal(present(view), plain_view)


@pytest.mark.parametrize(
    "change", [lambda x: x[:, 0].add_(1), lambda x: x.view(-1).mul_(2), lambda x: torch.zeros(2, 3, 4).add_(x)]
)
def test_in_place_operations_that_nobody_would_see_are_refused(change: Callable[[Tensor], Any]) -> None:
    """They would reach a tensor that was there before, through another name."""
    with pytest.raises(UsageError, match="in place"):
        change(asked().tensor)


def test_values_are_given_where_python_needs_them() -> None:
    one = asked()
    assert float(one.tensor.sum()) == float(one.value.sum())
    assert one.tensor[0, 0].tolist() == one.value[0, 0].tolist()
    assert bool((one.tensor == one.tensor).all())
    assert torch.equal(one.tensor[one.tensor > 0], one.value[one.value > 0])
    assert one.times > 0


@pytest.mark.parametrize(
    "draw",
    [lambda x: F.dropout(x, 0.5), lambda x: torch.bernoulli(x.sigmoid()), lambda x: torch.multinomial(x[0].exp(), 1)],
)
def test_random_functions_are_refused_if_their_values_are_needed(draw: Callable[[Tensor], Tensor]) -> None:
    """Another stage has drawn other numbers."""
    one = asked()
    found = draw(one.tensor)
    assert is_absent(found)
    with pytest.raises(UsageError) as error:
        present(found)
    assert "on a stage before it" in str(error.value) and "nn.Dropout" in str(error.value.hint)


def test_structures_keep_their_kind() -> None:
    one = asked()
    here = torch.ones(2)
    value = {"a": [one.tensor, here, None], "b": (1, "text", Pair(one.tensor + 1, 2.5)), "c": {"d": here}}
    assert is_absent(value) and not is_absent({"c": {"d": here}, "e": (None, 1)})
    found = present(value)
    assert not is_absent(found)
    assert torch.equal(found["a"][0], one.value) and found["a"][1] is here and found["a"][2] is None
    number, text, pair = found["b"]
    assert (number, text, type(pair)) == (1, "text", Pair)
    assert torch.equal(pair.left, one.value + 1) and pair.right == 2.5
    assert found["c"]["d"] is here


def test_a_source_without_values_raises_when_it_is_needed_and_not_before() -> None:
    def none(source: Source) -> Tensor:
        raise UsageError(f"nobody gives {source.name}")

    absent = Absent.of(torch.empty(2, device="meta"), Source("late#0", none).value, CPU)
    later = (absent * 2).view(1, 2)
    assert later.shape == (1, 2)
    with pytest.raises(UsageError, match="nobody gives late#0"):
        present(later)


def test_modules_need_values_and_take_present_ones() -> None:
    one, layer = asked(), torch.nn.Linear(4, 2)
    with torch.no_grad():
        assert torch.equal(layer(present(one.tensor)), layer(one.value))
        later = layer(one.tensor)  # No gate: what runs between modules is written down too.
        assert is_absent(later)
        assert torch.equal(present(later), layer(one.value))
