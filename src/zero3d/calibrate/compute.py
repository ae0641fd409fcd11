"""How fast a rank computes, and reads and writes its memory."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from zero3d.calibrate.bench import Bench
from zero3d.calibrate.measured import Effort, Product
from zero3d.planner.workload import FUSED_BACKWARD, FUSED_FORWARD

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD = 64
"""Width of an attention head."""
CHAIN = 50
"""Operations between whose ends one clock is read."""
NORMED = 1024
"""Elements that a norm is over."""


def products(bench: Bench, effort: Effort, dtype: str) -> Iterator[Product]:
    """Of square matrices from small to large, then of few rows with the largest; as long as one takes no more than
    `effort.longest`."""
    flops = 0.0
    largest = 0
    for dim in effort.dims:
        if flops and 2 * dim**3 / flops > effort.longest:
            break
        flops = _rate(bench, dtype, dim, dim, dim)
        largest = dim
        yield Product(dtype=dtype, m=dim, n=dim, k=dim, flops=flops)
    for rows in (rows for rows in effort.skinny if rows < largest):
        yield Product(dtype=dtype, m=rows, n=largest, k=largest, flops=_rate(bench, dtype, rows, largest, largest))


def _rate(bench: Bench, dtype: str, m: int, n: int, k: int) -> float:
    """FLOP/s of a layer's products, forward and both of backward: m tokens, k features in, n out. With new results, and
    each with operands transposed as it has them: what is laid out anew for 16-bit instructions takes its time."""
    x, weight = (_filled((rows, k), DTYPES[dtype], bench.device) for rows in (m, n))
    gradient = _filled((m, n), DTYPES[dtype], bench.device)

    def layer() -> None:
        torch.mm(x, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)

    return 3 * 2 * m * n * k / bench.seconds(layer)


def attention(bench: Bench, dtype: str, tokens: int) -> float:
    """FLOP/s of torch's fused causal attention over sequences of `tokens`, forward and backward, where both count what
    the mask leaves: half of the scores."""
    heads = 4
    query = _filled((1, heads, tokens, HEAD), DTYPES[dtype], bench.device).requires_grad_()
    done = bench.seconds(lambda: _both_ways(F.scaled_dot_product_attention(query, query, query, is_causal=True), query))
    return (FUSED_FORWARD + FUSED_BACKWARD) * heads * tokens**2 * HEAD / 2 / done


def _both_ways(y: Tensor, x: Tensor) -> None:
    """A backward, beside the forward that gave `y`."""
    torch.autograd.grad(y, [x], torch.ones_like(y))


def stream(bench: Bench, elements: int) -> float:
    """Bytes/s: two arrays of fp32 `elements` are read, their sum is written."""
    left, right, out = (_filled((elements,), torch.float32, bench.device) for _ in range(3))
    return 12 * elements / bench.seconds(lambda: torch.add(left, right, out=out))


def moving(bench: Bench, dtype: str, elements: int, held: int) -> float:
    """Bytes/s of what a block does beside its products: norms and activation functions read `elements` and write as
    many, and in backward read twice as many and write as many. What they give is kept for it, until about `held`
    elements are there, and then dropped: a CPU's allocator has to ask the system for most of it again."""
    rows = max(elements // NORMED, 1)
    x = _filled((rows, NORMED), DTYPES[dtype], bench.device).requires_grad_()
    pairs = max(held // (2 * x.numel()), 1)

    def chain() -> None:
        y = x
        for _ in range(pairs):
            y = F.gelu(F.layer_norm(y, (NORMED,)))
        _both_ways(y, x)

    return 2 * pairs * 5 * x.numel() * x.element_size() / bench.seconds(chain)


def launch(bench: Bench) -> float:
    """Seconds that an operation takes at the least, in a forward that autograd records and its backward."""
    start = torch.ones(1, device=bench.device, requires_grad=True)

    def chain() -> None:
        x = start
        for _ in range(CHAIN):
            x = x * 1.0
        x.backward(inputs=[start])

    return bench.seconds(chain) / (2 * CHAIN)


def skew(bench: Bench, effort: Effort) -> float:
    """Of the time of products: what ranks wait for the slowest of them, where each is followed by a call."""
    x = _filled((effort.dims[-1], effort.dims[-1]), torch.float32, bench.device)
    out = torch.empty_like(x)
    return bench.waits(lambda: torch.mm(x, x, out=out))


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers near 1: zeros and denormals are no typical work, and pages are there before they are timed."""
    return torch.linspace(0.5, 1.5, shape[-1], device=device).expand(shape).to(dtype).contiguous()
