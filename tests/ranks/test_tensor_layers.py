"""Cut layers beside the plain modules they were made of, forward and backward.

Random modules, sizes, dtypes and inputs, the same in every run; `--hypothesis-profile=long` tries new ones. Bit-equal:
outputs and whole gradients on all ranks, and what the module computes while its weights are whole. Close (1e-5 of the
largest value in fp32, a few roundings in 16 bits): the plain module, which adds all features at once.
"""

import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.world import run_ranks
from zero3d.comm.mesh import open_mesh
from zero3d.config import Parallel
from zero3d.initial import draw
from zero3d.layout import Layout
from zero3d.linears import Linears
from zero3d.params import ParamInfo
from zero3d.tensor.split import TensorParallel, split

pytestmark = pytest.mark.ranks

EACH = 12
"""Cases in one example of hypothesis: forking ranks costs more than computing them."""
KINDS = ("mlp", "gather_output", "split_input", "tied", "embedding", "gate_up", "attention", "fused attention")


@dataclass(frozen=True, kw_only=True)
class Case:
    """width, inner: multiples of the ranks where a style needs that; odd: any size; frozen: those parameters."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    width: int
    inner: int
    odd: int
    kv_heads: int
    group: int
    bias: bool
    down_bias: bool
    transposed: bool
    padding_idx: int | None
    twice: bool
    fresh: bool
    frozen: frozenset[int]
    input_gradient: bool


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    odd = draw(st.integers(1, 13))
    return Case(
        kind=draw(st.sampled_from(KINDS)),
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16))),
        shape=tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))),
        width=draw(st.integers(1, 3)) * ranks,
        inner=draw(st.integers(1, 3)) * ranks,
        odd=odd,
        kv_heads=draw(st.sampled_from((1, ranks, 2 * ranks))),
        group=draw(st.integers(1, 2)) * ranks,
        bias=draw(st.booleans()),
        down_bias=draw(st.booleans()),
        transposed=draw(st.booleans()),
        padding_idx=draw(st.none() | st.integers(0, odd - 1)),
        twice=draw(st.booleans()),
        fresh=draw(st.booleans()),
        frozen=draw(st.just(frozenset[int]()) | st.frozensets(st.integers(0, 5))),
        input_gradient=draw(st.booleans()),
    )


class Net(nn.Module):
    """What `case.kind` says; `plan` is its own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.plan: dict[str, str] = {}
        kind, width, inner = case.kind, case.width, case.inner
        if kind == "mlp":
            self._add("up", "colwise", case.odd, inner, case.bias)
            self._add("down", "rowwise", inner, case.odd, case.down_bias)
        elif kind == "gather_output":
            self._add("up", "colwise_gather_output", width, case.odd, case.bias)
        elif kind == "split_input":
            self._add("down", "rowwise_split_input", width, case.odd, case.down_bias)
        elif kind in ("tied", "embedding"):
            self.words = nn.Embedding(case.odd, width, padding_idx=case.padding_idx)
            self.plan["words"] = "vocab"
            if kind == "tied":
                self._add("head", "vocab", width, case.odd, case.bias, plain=True)
                self.head.weight = self.words.weight
        elif kind == "gate_up":
            self._add("gate_up", "gate_up", width, 2 * inner, case.bias)
            self._add("down", "rowwise", inner, width, case.down_bias)
        else:
            heads, of_kv, self.head_dim = case.kv_heads * case.group, case.kv_heads, case.width
            if kind == "attention":
                for name, style, number in (("q", "colwise", heads), ("k", "kv", of_kv), ("v", "kv", of_kv)):
                    self._add(name, style, case.odd, number * self.head_dim, case.bias)
            else:
                of_kv = self.of_kv = case.kv_heads if case.kv_heads > 1 else heads
                rows = (heads + 2 * of_kv) * self.head_dim
                self._add("qkv", f"qkv({heads}, {of_kv})", case.odd, rows, case.bias)
                self.split_size = [heads * self.head_dim, of_kv * self.head_dim]
            self._add("out", "rowwise", heads * self.head_dim, case.odd, case.down_bias)

    def _add(self, name: str, style: str, into: int, out: int, bias: bool, *, plain: bool = False) -> None:
        if self.case.transposed and not plain:
            module: nn.Module = Conv1D(out, into)
            if not bias:
                module = nn.Linear(into, out, bias=False)
        else:
            module = nn.Linear(into, out, bias=bias)
        self.add_module(name, module)
        self.plan[name] = style

    def forward(self, x: Tensor) -> Any:
        once = self._once(x)
        # A second call of the same module with the same tensor, or with an equal one.
        return once + self._once(x.clone() if self.case.fresh else x) if self.case.twice else once

    def _once(self, x: Tensor) -> Any:
        kind = self.case.kind
        if kind == "mlp":
            return self.down(F.gelu(self.up(x)))
        if kind == "gather_output":
            return self.up(x)
        if kind == "split_input":
            return self.down(x)
        if kind == "embedding":
            return self.words(x)
        if kind == "tied":
            logits = self.head(self.words(x))
            return logits if isinstance(logits, Tensor) else logits.whole()
        if kind == "gate_up":
            gate, up = self.gate_up(x).chunk(2, -1)
            return self.down(F.silu(gate) * up)
        if kind == "attention":
            again = x.clone() if self.case.fresh else x
            return self._attend(self.q(x), self.k(again), self.v(x))
        fused = self.qkv(x)
        part = fused.size(-1) * self.split_size[0] // (self.split_size[0] + 2 * self.split_size[1])
        q, k, v = fused.split([part, (fused.size(-1) - part) // 2, (fused.size(-1) - part) // 2], -1)
        return self._attend(q, k, v)

    def _attend(self, *projected: Tensor) -> Any:
        """Over dim -2, heads that share keys and values in groups."""
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3) for one in map(_with_length, projected))
        group = q.size(-3) // k.size(-3)
        k, v = (one.repeat_interleave(group, -3) for one in (k, v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        mixed = (scores @ v).transpose(-2, -3).flatten(-2)
        return self.out(mixed)


def _with_length(x: Tensor) -> Tensor:
    return x if x.dim() > 1 else x.unsqueeze(0)


def made(case: Case) -> Net:
    torch.manual_seed(0)
    model = Net(case).to(case.dtype)
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, std=0.5)
        parameter.requires_grad_(number not in case.frozen)
    return model


def inputs(case: Case, model: Net) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if case.kind in ("tied", "embedding"):
        return torch.randint(case.odd, case.shape, generator=generator)
    first = next(module for module in model.children())
    into = first.nx if isinstance(first, Conv1D) else first.in_features  # type: ignore[union-attr]
    x = torch.randn(*case.shape, into, generator=generator).to(case.dtype)  # type: ignore[arg-type]
    return x.requires_grad_(case.input_gradient)


@dataclass
class Found:
    output: Tensor
    input_gradient: Tensor | None
    gradients: dict[str, Tensor]
    whole_output: Tensor | None = None


def computed(model: Net, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    if output.requires_grad:
        outer = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        output.backward(outer.to(output))
    return output.detach()


def expected(case: Case, dtype: torch.dtype) -> Found:
    """Of the plain module, in `dtype`."""
    model = made(case)
    x = inputs(case, model).detach()
    model.to(dtype)
    if x.is_floating_point():
        x = x.to(dtype).requires_grad_(case.input_gradient)
    output = computed(model, x)
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return Found(output, x.grad, gradients)


class NoDropout:
    def enter_cut(self) -> None: ...
    def leave_cut(self) -> None: ...


def cut(case: Case, axis: Any) -> tuple[Net, TensorParallel]:
    blueprint, tensor = split(draw(made(case), 0), axis, NoDropout(), {}, Parallel(plan=made(case).plan))
    model: Any = blueprint.model
    for name, parameter in model.named_parameters():
        blueprint.fill(name, parameter.data)
    tensor.watch(model, [], Linears())
    return model, tensor


def of_all_holders(tensor: TensorParallel, info: ParamInfo, gradient: Tensor) -> Tensor:
    """What a step adds up once, of parameters that several ranks hold alike."""
    if info.slicing is None or info.slicing.copies == 1:
        return gradient
    every = gradient.new_empty(tensor.axis.size, gradient.numel())
    tensor.axis.all_gather(every.view(-1), gradient, "gradient").wait()
    holders = info.slicing.holders(tensor.axis.index)
    return every[holders.start : holders.stop].sum(dim=0, dtype=torch.float32).to(gradient)


def found_on_rank(some: list[Case]) -> list[Found]:
    axis, found = open_mesh(Layout(tp=torch.distributed.get_world_size()), timedelta(seconds=20)).axes["tp"], []
    for case in some:
        model, tensor = cut(case, axis)
        x = inputs(case, made(case))
        with torch.no_grad():
            without_graph = model(x)
        output = computed(model, x)
        assert torch.equal(output, without_graph), case
        infos = tensor.infos(model)
        gradients = {}
        for info in infos:
            gradient = model.get_parameter(info.name).grad
            if gradient is not None:
                summed = of_all_holders(tensor, info, gradient.contiguous().view(-1))
                gradients[info.name] = tensor.join(info, summed).view(info.shape)
        with tensor.whole(model, infos), torch.no_grad():
            whole_output = copy.deepcopy(model(x))
        found.append(Found(output, x.grad, gradients, whole_output))
    return found


def largest(*tensors: Tensor) -> float:
    return max([1.0, *(float(one.abs().max()) for one in tensors)])


def assert_near(mine: Tensor, expected: Tensor, dtype: torch.dtype, scale: float, what: object) -> None:
    assert mine.shape == expected.shape, what
    tolerance = 1e-5 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps
    error = float((mine.double() - expected.double()).abs().max()) / scale
    assert error <= tolerance, (error, what)


def hold(some: list[Case], ranks: int) -> None:
    by_rank = run_ranks(ranks, found_on_rank, some)
    for number, case in enumerate(some):
        plain, exact = expected(case, case.dtype), expected(case, torch.float64)
        first: Found = by_rank[0][number]
        assert torch.equal(first.whole_output, plain.output), case
        assert first.output.dtype == case.dtype and first.gradients.keys() == plain.gradients.keys(), case
        assert_near(first.output, exact.output, case.dtype, largest(exact.output), case)
        # Of all: a key's bias has no gradient but rounding.
        scale = largest(*exact.gradients.values())
        for name, gradient in first.gradients.items():
            assert_near(gradient, exact.gradients[name], case.dtype, scale, (name, case))
        assert (first.input_gradient is None) == (plain.input_gradient is None), case
        if first.input_gradient is not None:
            scale = largest(exact.input_gradient)
            assert_near(first.input_gradient, exact.input_gradient, case.dtype, scale, case)
        for of_rank in by_rank:
            one = of_rank[number]
            assert torch.equal(one.output, first.output), case
            assert all(torch.equal(value, first.gradients[name]) for name, value in one.gradients.items()), case
            assert one.input_gradient is None or torch.equal(one.input_gradient, first.input_gradient), case


@pytest.mark.parametrize("ranks", [2, 3])
@settings(deadline=None, max_examples=12, phases=[Phase.generate])  # a message names its case: none need be shrunk
@given(data=st.data())
def test_cut_layers_equal_plain_ones(ranks: int, data: st.DataObject) -> None:
    hold(data.draw(st.lists(cases(ranks), min_size=EACH, max_size=EACH)), ranks)
