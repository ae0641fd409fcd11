"""A model's `Workload`, counted by running it on tensors without data: one block of each kind, at one and two samples.

Blocks are one kind where they have one class and parameters of the same names and shapes. The model runs with one block
of each kind in its list; where it cannot, all of them run. What cuts models over tp cuts this one too, over an axis on
paper.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zero3d import params
from zero3d.blueprint import Blueprint
from zero3d.comm.paper_axis import PaperAxis
from zero3d.comm.paper_wire import PaperWire
from zero3d.comm.process_axis import ProcessAxis
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.config import Parallel
from zero3d.contracts import Batch, Loss
from zero3d.dryrun.course import Change, courses
from zero3d.dryrun.course import run as run_levels
from zero3d.dryrun.fakes import Fakes
from zero3d.dryrun.first_chunk import first_chunk_loss
from zero3d.dryrun.held import Courses, Held, OfPart
from zero3d.dryrun.operations import Dims, Listener, Operations, PartTally, PassTally
from zero3d.dryrun.refusing import explained
from zero3d.dryrun.whole_loss import whole_loss
from zero3d.errors import UsageError
from zero3d.linears import Linears
from zero3d.models.plans import tensor_plan
from zero3d.pipeline.calling import caller
from zero3d.planner.workload import Amount, Call, Course, Parameter, Part, Pass, Product, Workload
from zero3d.randomness import Randomness
from zero3d.recompute import recompute
from zero3d.tensor.split import split
from zero3d.trees import tensors_in
from zero3d.zero.units import find_blocks

WITHOUT_PLAN = Parallel()
MODES = ("none", "block")
"""Of recomputing."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is counted. build: makes the module, on the device that is torch's default; batch: number of samples -> a
    batch of them; tokens: of one sample; loss: one that works in many small chunks takes as long to count."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    tokens: int
    loss: Loss = whole_loss
    blocks: str | None = None
    name: str = "model"
    call: Callable[[nn.Module, Batch], Any] | None = None


def count(
    subject: Subject,
    *,
    dtype: str = "bf16",
    tp: int = 1,
    sequence_parallel: bool = False,
    parallel: Parallel = WITHOUT_PLAN,
    memory: bool = True,
) -> Workload:
    """The workload of one of `tp` ranks; `parallel`: its plan counts, its numbers do not. memory: with what is live
    when, which is counted when it is asked for, and takes twice as long as all else.

    Raises `UsageError` for a model that cannot run on tensors without data, and what the cut raises.
    """
    parallel = parallel.model_copy(update={"tp": tp, "sequence_parallel": sequence_parallel})
    what = f"{subject.name} cannot be run on tensors without data"
    with explained(what):
        model = _on_meta(subject.build)
        order, firsts = _kinds(model, subject.blocks)
        cuts = tp > 1 and sequence_parallel  # Then the first and the last block are where whole and cut sequences meet.
        typical = _inner(order, firsts) if cuts else firsts
        few = sorted({*typical, 0, len(order) - 1}) if cuts and order else firsts
        attempts = [few, list(range(len(order)))] if len(few) < len(order) else [few]
        for at, chosen in enumerate(attempts):
            try:
                run = _Run(subject, model if at == 0 else _on_meta(subject.build), parallel, dtype, chosen)
                tallies = [run.tally(samples) for samples in (1, 2)]
                break
            except UsageError:
                raise
            except Exception:
                if at + 1 == len(attempts):
                    raise
    # Of one sample, parts of the sequence are side by side without a copy.
    counts = [(2, 3), (1, 1)] if cuts else [(1, 2)]

    def find(mode: str) -> Courses:
        with explained(what):
            return [run.courses(mode, *samples) for samples in counts]

    held = Held([mode for mode in MODES if memory and (mode == "none" or order)], find)
    parts = [
        replace(
            part,
            courses=OfPart(held, 0, at),
            of_one=OfPart(held, 1, at) if counts[1:] else {},
            buffers=run.buffers[at],
        )
        for at, part in enumerate(run.parts(*tallies))
    ]
    kinds = [parts[1 + chosen.index(one)] for one in typical]
    return Workload(
        name=subject.name,
        tp=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        tokens=subject.tokens,
        dtype=dtype,
        before=parts[0],
        kinds=kinds,
        order=order,
        after=parts[-1],
        tp_buffers=run.axis_holds,
        path=run.path,
        ends=(parts[1], parts[-2]) if cuts and order else (),
    )


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"), _Still():  # type: ignore[no-untyped-call]
        return build()


class _Still(TorchDispatchMode):
    """First values, which nobody reads, are not made: what writes into a tensor on meta does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = func._schema.name.endswith("_") and isinstance(args[0], Tensor) and args[0].is_meta
        return args[0] if written else func(*args, **(kwargs or {}))


def _kinds(model: nn.Module, path: str | None) -> tuple[list[int], list[int]]:
    """(the kind of each block, the first block of each kind)."""
    _, blocks = find_blocks(model, path)
    known: dict[Any, int] = {}
    order, firsts = [], []
    for at, block in enumerate(blocks):
        key = (
            type(block),
            tuple((name, tuple(one.shape), one.requires_grad) for name, one in block.named_parameters()),
        )
        if key not in known:
            known[key] = len(known)
            firsts.append(at)
        order.append(known[key])
    return order, firsts


def _inner(order: Sequence[int], firsts: Sequence[int]) -> list[int]:
    """A block of each kind, neither the first nor the last of all if there is another."""
    inner = range(1, len(order) - 1)
    return [next((at for at in inner if order[at] == kind), first) for kind, first in enumerate(firsts)]


class _Run:
    """A model of the `chosen` blocks, cut, ready to be run on batches of any size."""

    def __init__(
        self, subject: Subject, model: nn.Module, parallel: Parallel, dtype: str, chosen: Sequence[int]
    ) -> None:
        self._subject = subject
        self._mode = Fakes()
        self._listener = Listener()
        path, blocks = find_blocks(model, subject.blocks)
        uses = Counter(id(one) for block in blocks for one in block.buffers())
        blocks = [blocks[at] for at in chosen]
        own = [[name for name, one in block.named_buffers() if uses[id(one)] == 1] for block in blocks]
        _leave_out(model, path, set(map(id, blocks)))
        axis = self._axis = RecordedAxis(PaperAxis(parallel.tp), name="tp")
        axis.watcher = self._listener
        streams = Randomness(0, 0, torch.device("cpu"))
        _, tensor = split(Blueprint(model, {}, frozenset()), axis, streams, tensor_plan(model), parallel)
        with self._mode:
            _give_memory(model, DTYPES[dtype])
        tensor.watch(model, blocks, Linears())
        self._tensor = tensor
        self.paths = {id(module): name for name, module in model.named_modules()}
        self._model, self._blocks = model, blocks
        self.path = path
        # Those that several blocks share, such as tables of positions, count before the blocks.
        inside = [sum(block.get_buffer(name).nbytes for name in names) for block, names in zip(blocks, own)]
        self.buffers = [sum(one.nbytes for one in model.buffers()) - sum(inside), *inside, 0]
        self._axis_holds = Amount()
        self._call = subject.call or caller(model, DTYPES[dtype])

    def tally(self, samples: int) -> list[PartTally]:
        """Before the blocks, of each block, after them."""
        model = self._model
        operations = Operations(dict(model.named_parameters()), model.buffers())
        hooks = [
            hook
            for at, block in enumerate(self._blocks)
            for hook in (
                block.register_forward_pre_hook(partial(self._enter, operations, at + 1), with_kwargs=True),
                block.register_forward_hook(partial(self._leave, operations, at + 1)),
            )
        ]
        self._listener.operations = operations
        try:
            with self._mode:
                batch = self._subject.batch(samples)
                with operations, torch.autograd.graph.saved_tensors_hooks(operations.keep, lambda tensor: tensor):
                    loss = self._subject.loss(self._call(model, batch), batch)
                    total = loss[0] if isinstance(loss, tuple) else loss
                    operations.enter_backward()
                    total.backward()
        finally:
            self._listener.operations = None
            for hook in hooks:
                hook.remove()
            for parameter in model.parameters():
                parameter.grad = None
        operations.enter(len(self._blocks) + 1)
        return operations.parts

    def courses(self, mode: str, few: int, more: int) -> list[tuple[Course, Course]]:
        """(forward, backward) of each part, with `recompute.mode`, from runs of `few` and `more` samples."""
        found = {samples: self._levels(mode, samples) for samples in {few, more}}
        if more > few:
            each = (found[more][1] - found[few][1]) / (more - few)
            self._axis_holds = Amount(each, found[few][1] - few * each)
        return courses(found[few][0], found[more][0], len(self._blocks) + 2, few)

    def axis_holds(self) -> Amount:
        """Bytes of the tp axis' own, once courses are known."""
        return self._axis_holds

    def _levels(self, mode: str, samples: int) -> tuple[list[Change], int]:
        """(what changes, bytes of the tp axis' own)."""
        subject, before = self._subject, self._axis.inner
        loss = first_chunk_loss if subject.loss is whole_loss else subject.loss
        with self._mode:
            batch = subject.batch(samples)
            if before.size > 1:  # Calls over real ranks take memory of their own.
                self._axis.inner = ProcessAxis(PaperWire(before.size, 0, "tp"), torch.device("cpu"))
            recomputed = recompute(self._model, self._blocks, mode)
            if recomputed:  # As in a run, what cuts inputs over tp comes after what keeps them.
                self._tensor.close()
                self._tensor.activate(active=before.size > 1)
                self._tensor.watch(self._model, self._blocks, Linears())

            def compute() -> Tensor:
                result = loss(self._call(self._model, batch), batch)
                return result[0] if isinstance(result, tuple) else result

            try:
                changes = run_levels(self._model, self._blocks, compute, _wants_gradient, self._axis.held)
                held = sum(one.nbytes for one in self._axis.held())
            finally:
                self._axis.inner = before
                for one in recomputed:
                    one.close()
                for parameter in self._model.parameters():
                    parameter.grad = None
        return changes, held

    def _enter(self, operations: Operations, part: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        operations.enter_with(part, _floats((args, kwargs)))
        return _wants_gradient(block, args, kwargs)

    def _leave(self, operations: Operations, part: int, block: nn.Module, args: Any, output: Any) -> None:
        operations.parts[part].leaving += sum(one.nbytes for one in _floats(output))
        if part == len(self._blocks):
            operations.enter(part + 1)

    def parts(self, one: Sequence[PartTally], two: Sequence[PartTally]) -> list[Part]:
        """From the tallies of one and of two samples."""
        first_use = {name: at for at, tally in reversed(list(enumerate(one))) for name in tally.uses}
        return [self._part(at, *both, first_use) for at, both in enumerate(zip(one, two))]

    def _part(self, at: int, one: PartTally, two: PartTally, first_use: dict[str, int]) -> Part:
        inside = 0 < at <= len(self._blocks)
        path = self.paths[id(self._blocks[at - 1])] if inside else ""
        own, borrowed = self._parameters(at, one, path, first_use)
        return Part(
            name=path or ("before" if at == 0 else "after"),
            forward=_pass(one.forward, two.forward),
            backward=_pass(one.backward, two.backward),
            weights=_products(one.weights, two.weights),
            for_weights=_amount(one.for_weights, two.for_weights),
            parameters=own,
            borrowed=borrowed,
            saved=_amount(one.saved, two.saved),
            attention_saved=_amount(one.attention_saved, two.attention_saved),
            entering=_amount(one.entering, two.entering),
            entering_saved=_amount(one.entering_saved, two.entering_saved),
            leaving=_amount(one.leaving, two.leaving),
        )

    def _parameters(
        self, at: int, tally: PartTally, path: str, first_use: dict[str, int]
    ) -> tuple[list[Parameter], list[Parameter]]:
        """(those that no part before uses, others that it uses)."""
        own: list[Parameter] = []
        borrowed: list[Parameter] = []
        for info in params.collect(self._model):
            mine = first_use.get(info.name, 0) == at
            if mine or info.name in tally.uses:
                one = Parameter(
                    info.name.removeprefix(f"{path}."),
                    info.shape,
                    str(info.dtype).removeprefix("torch."),
                    info.trainable,
                    tally.uses.get(info.name, True),
                )
                (own if mine else borrowed).append(one)
        return own, borrowed


def _wants_gradient(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """Before a block. All but the very first compute the gradient of what enters; so do those that are counted."""
    if args and _floats(args[0]) and not args[0].requires_grad:
        return (args[0].detach().requires_grad_(), *args[1:]), kwargs
    return None


def _floats(value: Any) -> list[Tensor]:
    return [one for one in tensors_in(value) if one.is_floating_point() and one.dim() > 1]


def _leave_out(model: nn.Module, path: str, chosen: set[int]) -> None:
    for one in path.split(", ") if path or chosen else []:
        container: Any = model.get_submodule(one)
        for at in reversed([at for at, block in enumerate(container.children()) if id(block) not in chosen]):
            del container[at]


def _give_memory(model: nn.Module, dtype: torch.dtype) -> None:
    """Tensors that are taken to be on a CPU: without data too, but for small ones of integers, such as positions, which
    models look up by: zeros."""
    for info in params.collect(model):
        chosen = dtype if info.dtype.is_floating_point else info.dtype
        value = torch.zeros(info.shape, dtype=chosen, device="cpu")
        params.replace(model, info, nn.Parameter(value, requires_grad=info.trainable))
    for module in model.modules():
        for name, value in [*module.named_buffers(recurse=False), *vars(module).items()]:
            if isinstance(value, Tensor) and value.is_meta:
                setattr(module, name, torch.zeros(value.shape, dtype=value.dtype, device="cpu"))


def _amount(one: float, two: float) -> Amount:
    each = two - one
    return Amount(each, one - each) if each > 0 else Amount(0.0, one)


def _pass(one: PassTally, two: PassTally) -> Pass:
    calls = zip(one.calls, two.calls) if len(one.calls) == len(two.calls) else zip(one.calls, one.calls)
    return Pass(
        products=_products(one.products, two.products),
        attention=_products(one.attention, two.attention),
        fused=two.fused - one.fused,
        fused_done=two.fused_done - one.fused_done,
        attention_moved=_amount(one.attention_moved, two.attention_moved),
        moved=_amount(one.moved, two.moved),
        launches=one.launches,
        calls=[Call(a.verb, _amount(a.num_bytes, b.num_bytes), max(b.behind - a.behind, 0)) for a, b in calls],
    )


def _products(one: Sequence[Dims], two: Sequence[Dims]) -> list[Product]:
    """The dim that differs is the one that grows; where none does, it is taken to be m."""
    found: dict[tuple[float, ...], list[Product]] = {}
    for a, b in zip(one, two if len(one) == len(two) else one):
        product = _product(a, b)
        found.setdefault((product.m, product.n, product.k, product.batched), []).append(product)
    return [
        Product(same[0].m, same[0].n, same[0].k, sum(product.times for product in same), same[0].batched)
        for same in found.values()
    ]


def _product(a: Dims, b: Dims) -> Product:
    if b.times > a.times:
        return Product(a.m, a.n, a.k, b.times - a.times, batched=True)
    if b.k > a.k:
        return Product(b.k - a.k, a.n, a.m, a.times)
    if b.n > a.n:
        return Product(b.n - a.n, a.m, a.k, a.times)
    return Product(b.m - a.m if b.m > a.m else a.m, a.n, a.k, a.times)
