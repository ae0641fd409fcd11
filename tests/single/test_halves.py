"""A backward in two halves: what the first leaves for the second is inputs and gradients, and no graph."""

import weakref

import torch
from torch import Tensor, nn

from zero3d.linears import Half, Linears


def test_what_came_into_a_stage_is_free_after_the_half_of_its_inputs() -> None:
    """Its gradient has gone then; gradients of weights need neither, only what the layer itself was given."""
    layer = nn.Sequential(nn.Tanh(), nn.Linear(4, 3))
    linears = Linears()
    linears.watch(layer, lambda weight, dtype: None, [layer])
    came = torch.randn(2, 4, requires_grad=True)
    value = came.detach().clone()
    out: Tensor = layer(came)
    halves: list[Half] = []
    with linears.deferring(halves):
        linears.backward([out], [torch.ones_like(out)])
    assert came.grad is not None and len(halves) == 1
    gone = [weakref.ref(one.untyped_storage()) for one in (came, came.grad)]
    del came, out
    assert [one() for one in gone] == [None, None]
    linears.finish(halves)
    weight = layer[1].weight
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.ones(3, 2) @ torch.tanh(value))
