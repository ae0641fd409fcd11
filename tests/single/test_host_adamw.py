"""C53: the host's AdamW gives the bits of torch's fused Adam and AdamW, whatever the sizes, dtypes, scale and threads.

Reference: torch's own step on the same numbers, after the same casts: fp32 gradients divided by 1 / scale in the
kernel (`grad_scale`), 16-bit ones widened, then multiplied. Bit-equal: weights, moments, counters, outputs. Close:
the unfused AdamW, which rounds elsewhere.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from zero3d.offload.adamw import CHUNK, TASK, HostAdamW, Workers

SIZES = (1, 7, 8, 1023, 10**6, CHUNK, TASK + 65, 3)
STEPS = 5
Factory = Callable[[Any], torch.optim.Optimizer]


def adamw(groups: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def adam(groups: Any) -> torch.optim.Adam:
    return torch.optim.Adam(groups, lr=1e-2, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, fused=True)


def weights(sizes: Sequence[int] = SIZES) -> list[Tensor]:
    """Slices of one buffer, at starts that are not aligned to anything."""
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(sum(sizes) + len(sizes), generator=generator)
    made, start = [], 1
    for size in sizes:
        made.append(buffer[start : start + size])
        start += size + 1
    return made


def gradients(step: int, dtype: torch.dtype, sizes: Sequence[int] = SIZES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(size + 1, generator=generator).to(dtype)[1:] for size in sizes]


def groups(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Every other tensor without decay, and with a learning rate of its own."""
    return [{"params": tensors[::2]}, {"params": tensors[1::2], "weight_decay": 0.0, "lr": 3e-3}]


def reference(make: Factory, steps: Iterator[Sequence[Tensor | None]], scale: float) -> tuple[list[Tensor], Any]:
    tensors = weights()
    optimizer = make(groups(tensors))
    for number, given in enumerate(steps):
        for tensor, gradient in zip(tensors, given):
            if gradient is None:
                tensor.grad = None
            elif gradient.dtype == torch.float32:
                tensor.grad = gradient.clone()
            else:
                tensor.grad = torch.empty_like(tensor).copy_(gradient).mul_(scale)
        if all(gradient is None or gradient.dtype == torch.float32 for gradient in given):
            optimizer.grad_scale = torch.tensor(1.0 / scale)
        set_rate(optimizer, number)
        optimizer.step()
    return tensors, optimizer


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 1.0 - 0.1 * step


def ours(
    make: Factory,
    steps: Iterator[Sequence[Tensor | None]],
    scale: float,
    out: torch.dtype | None = None,
    threads: int = 1,
) -> tuple[list[Tensor], Any, list[Tensor | None]]:
    tensors = weights()
    optimizer = make(groups(tensors))
    host = HostAdamW(optimizer, Workers(threads), tensors)
    outs = [None if out is None else torch.zeros(len(tensor) + 1, dtype=out)[1:] for tensor in tensors]
    for number, given in enumerate(steps):
        before = [gradient if gradient is None else gradient.clone() for gradient in given]
        set_rate(optimizer, number)
        host.step(given, scale, outs)
        assert all(is_same(one, other) for one, other in zip(given, before)), "a gradient was written to"
    return tensors, optimizer, outs


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def assert_same(one: Sequence[Tensor], one_of: Any, other: Sequence[Tensor], other_of: Any) -> None:
    for left, right in zip(one, other, strict=True):
        assert is_same(left, right)
        assert list(one_of.state[left]) == list(other_of.state[right])
        for key, value in one_of.state[left].items():
            assert is_same(value, other_of.state[right][key]), key


@pytest.mark.parametrize("make", [adamw, adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_has_the_bits_of_the_fused_step(make: Factory, dtype: torch.dtype, scale: float) -> None:
    def steps() -> Iterator[list[Tensor]]:
        return (gradients(step, dtype) for step in range(STEPS))

    tensors, optimizer, outs = ours(make, steps(), scale, dtype)
    assert_same(tensors, optimizer, *reference(make, steps(), scale))
    assert all(is_same(out, tensor.to(dtype)) for out, tensor in zip(outs, tensors))


def test_without_a_scale_it_is_the_plain_fused_step_and_close_to_the_unfused_one() -> None:
    tensors, optimizer, _ = ours(adamw, (gradients(step, torch.float32) for step in range(STEPS)), 1.0)
    for fused in (True, False):
        plain = weights()
        other = torch.optim.AdamW(groups(plain), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
        for step in range(STEPS):
            for tensor, gradient in zip(plain, gradients(step, torch.float32)):
                tensor.grad = gradient
            set_rate(other, step)
            other.step()
        if fused:
            assert_same(tensors, optimizer, plain, other)
        else:
            # Each element to 1e-7 of its own size, or of the largest where the update all but cancels it.
            for one, two in zip(tensors, plain):
                torch.testing.assert_close(one, two, rtol=1e-7 * STEPS, atol=1e-7 * float(two.abs().max()))


def test_one_and_more_threads_give_the_same_bits() -> None:
    def steps() -> Iterator[list[Tensor]]:
        return (gradients(step, torch.bfloat16) for step in range(STEPS))

    one, one_of, one_out = ours(adamw, steps(), 0.25, torch.bfloat16)
    for threads in (2, 3):
        more, more_of, more_out = ours(adamw, steps(), 0.25, torch.bfloat16, threads)
        assert_same(one, one_of, more, more_of)
        assert all(is_same(left, right) for left, right in zip(one_out, more_out))


def test_a_tensor_without_a_gradient_stays_with_its_state_and_out() -> None:
    def steps() -> Iterator[list[Tensor | None]]:
        for step in range(STEPS):
            yield [
                None if (step + number) % 3 == 0 or number == 2 else gradient
                for number, gradient in enumerate(gradients(step, torch.float32))
            ]

    tensors, optimizer, outs = ours(adamw, steps(), 0.5, torch.float16)
    assert_same(tensors, optimizer, *reference(adamw, steps(), 0.5))
    assert torch.equal(tensors[2], weights()[2])
    assert outs[2] is not None and not outs[2].any()
    assert not optimizer.state[tensors[2]]


def test_gradients_of_several_dtypes_at_once() -> None:
    """Each is read as one of its own dtype alone would be."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    alone = {dtype: ours(adamw, iter([gradients(0, dtype)]), 0.3)[0] for dtype in dtypes}
    mixed = [gradients(0, dtypes[number % 3])[number] for number in range(len(SIZES))]
    tensors, _, _ = ours(adamw, iter([mixed]), 0.3)
    for number, tensor in enumerate(tensors):
        assert is_same(tensor, alone[dtypes[number % 3]][number])


def test_state_is_the_optimizers_own() -> None:
    """After some steps torch's own step goes on from it, from a state_dict as well, and the other way round."""
    tensors, optimizer, _ = ours(adamw, (gradients(step, torch.float32) for step in range(2)), 1.0)
    copies = [tensor.clone() for tensor in tensors]
    other = adamw(groups(copies))
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    for tensor, gradient in zip(copies, gradients(2, torch.float32)):
        tensor.grad = gradient
    other.step()
    host = HostAdamW(optimizer, Workers(2), tensors)
    host.step(gradients(2, torch.float32), 1.0, [None] * len(tensors))
    assert_same(tensors, optimizer, copies, other)
    optimizer.load_state_dict(deepcopy(other.state_dict()))
    host.step(gradients(3, torch.float32), 1.0, [None] * len(tensors))
    assert all(float(state["step"]) == 4 for state in optimizer.state.values())


def test_gradients_come_in_the_order_of_the_groups_unless_another_is_named() -> None:
    tensors = weights((5, 6, 7))
    other = weights((5, 6, 7))
    given = gradients(0, torch.float32, (5, 6, 7))
    by_groups = HostAdamW(adamw(groups(tensors)), Workers(1))
    by_groups.step([given[0], given[2], given[1]], 1.0, [None] * 3)
    by_order = HostAdamW(adamw(groups(other)), Workers(1), other)
    by_order.step(given, 1.0, [None] * 3)
    assert all(torch.equal(one, two) for one, two in zip(tensors, other))


def test_parameters_of_modules_are_updated_in_place() -> None:
    """They want gradients themselves, and have more dims than one."""
    torch.manual_seed(0)
    layer, twin = torch.nn.Linear(3, 5), torch.nn.Linear(3, 5)
    twin.load_state_dict(layer.state_dict())
    optimizer, plain = adamw(layer.parameters()), adamw(twin.parameters())
    host = HostAdamW(optimizer, Workers(2))
    for _ in range(2):
        given = [torch.randn(parameter.numel()) for parameter in layer.parameters()]
        for parameter, gradient in zip(twin.parameters(), given):
            parameter.grad = gradient.view_as(parameter)
        plain.step()
        host.step(given, 1.0, [None, None])
    assert_same(list(layer.parameters()), optimizer, list(twin.parameters()), plain)


def test_what_fails_in_a_thread_is_raised_and_the_next_step_works() -> None:
    tensors = [torch.ones(2 * TASK) for _ in range(4)]
    given = [torch.ones(2 * TASK, dtype=torch.bfloat16) for _ in tensors]
    host = HostAdamW(adamw(tensors), Workers(2))
    overlapping = torch.zeros(1).expand(2 * TASK)
    with pytest.raises(RuntimeError, match="single memory location"):
        host.step(given, 1.0, [None, *[overlapping] * 3])
    host.step(given, 1.0, [torch.zeros(2 * TASK) for _ in tensors])


@pytest.mark.parametrize(
    "options",
    [{"fused": False}, {"foreach": True}, {"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(0.1)}],
    ids=lambda options: next(iter(options)),
)
def test_does_not_take_what_it_would_do_otherwise(options: dict[str, Any]) -> None:
    given = {"fused": True, **options} if "foreach" not in options else options
    assert not HostAdamW.takes(torch.optim.AdamW([torch.ones(2)], **given))


def test_takes_adam_and_adamw_of_torch_alone() -> None:
    class Other(torch.optim.AdamW):
        pass

    assert HostAdamW.takes(adamw([torch.ones(2)]))
    assert HostAdamW.takes(adam([torch.ones(2)]))
    assert not HostAdamW.takes(Other([torch.ones(2)], fused=True))
    assert not HostAdamW.takes(torch.optim.SGD([torch.ones(2)], lr=0.1, fused=True))
    assert not HostAdamW.takes(adamw([torch.ones(2, dtype=torch.float64)]))
    hooked = adamw([torch.ones(2)])
    hooked.register_step_post_hook(lambda *_: None)
    assert not HostAdamW.takes(hooked)
