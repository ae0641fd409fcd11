"""A forward of one stage: the user's own, from the start to the end of the stage's last block.

    stage 0    embedding  block 0  block 1 | stop
    stage 1    (absent)   (absent) (absent)  block 2  block 3  norm  head

Every block, and every module outside the blocks, becomes a gate. In a stage's run a gate of this stage computes, one of
an earlier stage gives an absent tensor, and the first block of a later stage ends the run. What runs between the
modules, such as masks and positions, runs on every stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import UsageError
from zero3d.pipeline.absent import Absent, Source, is_absent, present
from zero3d.pipeline.specs import Spec, describe, rebuild
from zero3d.stand_in import StandIns


class StageEndError(BaseException):
    """The stage has computed all of its blocks. Never leaves `Gates.run`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Gate:
    """block: its number, None outside the blocks; stages: that have it, None: all (it has no parameters)."""

    path: str
    block: int | None
    stages: frozenset[int] | None
    random: bool


@dataclass(kw_only=True)
class Run:
    """One forward of stage `stage`.

    blocks: its own; received: tensors from earlier stages, by name; specs: what earlier stages' modules gave
    is_sent: a later stage gets what it makes; skipped: is told the number of each block of an earlier stage
    has_passed: one of its blocks has run; made: what its modules gave; given: the tensors in that; used: names of
    received tensors that were needed
    """

    stage: int
    blocks: range
    received: Mapping[str, Tensor]
    specs: Mapping[str, Spec]
    device: torch.device
    is_sent: bool
    skipped: Callable[[int], None]
    has_passed: bool = False
    made: dict[str, Spec] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    calls: dict[str, int] = field(default_factory=dict)
    entered: dict[str, Tensor] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.versions.update((name, _version(tensor)) for name, tensor in self.received.items())

    def call(self, gate: Gate, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = self.calls[gate.path] = self.calls.get(gate.path, -1) + 1
        label = f"{gate.path}#{number}"
        if self._is_elsewhere(gate, args, kwargs):
            if gate.block is not None:
                self.skipped(gate.block)
            return self._absent(gate, label)
        keeps = gate.stages is not None or gate.random
        if keeps:
            args, kwargs = present(args), present(kwargs)
        self.has_passed |= gate.block is not None
        output = forward(*args, **kwargs)
        if keeps and self.is_sent:
            fresh: dict[str, Tensor] = {}
            self.made[label] = describe(output, label, fresh)
            self.given.update(fresh)
            self.versions.update((name, _version(tensor)) for name, tensor in fresh.items())
        return output

    def value(self, source: Source) -> Tensor:
        """What another stage sent."""
        if source.name not in self.received:
            path = source.name.partition("#")[0]
            raise UsageError(
                f"pipeline stage {self.stage} needs what {path} gives, which no stage before it computes or sends",
                hint="If that module runs after the blocks and is defined before them, or the other way round, name it "
                "in parallel.last_stage or parallel.first_stage.",
            )
        self.used.add(source.name)
        if source.name not in self.entered:
            leaf = self.received[source.name]
            with torch.enable_grad():  # It may first be looked at without.
                entered: Tensor = _Entered.apply(leaf) if leaf.requires_grad else leaf  # type: ignore[no-untyped-call]
            self.entered[source.name] = entered
        return self.entered[source.name]

    def refuse_changed(self, names: Sequence[str]) -> None:
        """Raises `UsageError` where one of these, which later stages need, is not there, or no longer what its module
        gave."""
        for name in names:
            tensor = self.given.get(name, self.received.get(name))
            if tensor is None:
                raise UsageError(
                    f"{name.partition('#')[0]} gave a tensor in the first micro-batch that later pipeline stages need, "
                    f"and none in this one, on stage {self.stage}",
                    hint="Which blocks run, and where they give tensors, may not depend on values: run the block and "
                    "choose with torch.where, give zeros in the place of None, or use parallel.pp = 1.",
                )
            if _version(tensor) != self.versions[name]:
                raise UsageError(
                    f"what {name.partition('#')[0]} gives is changed in place on pipeline stage {self.stage}, and a "
                    "later stage needs it as it was",
                    hint="Write it as an operation that gives a new tensor, such as x = x + y.",
                )

    def _is_elsewhere(self, gate: Gate, args: Any, kwargs: Any) -> bool:
        if gate.block is not None:
            if gate.block >= self.blocks.stop:
                raise StageEndError
            return gate.block < self.blocks.start
        if gate.stages is None:
            return gate.random and is_absent((args, kwargs))
        return self.stage not in gate.stages

    def _absent(self, gate: Gate, label: str) -> Any:
        if label not in self.specs:
            path, key = gate.path, "last_stage" if self.has_passed else "first_stage"
            if gate.block is not None:
                raise UsageError(
                    f"pipeline stage {self.stage} calls {path} again, out of its order, or where it did not run before",
                    hint="Stages need blocks that run once each, one after the other, the same ones every time. Use "
                    "parallel.tp and zero.level = 3 for other models.",
                )
            side = "after" if self.has_passed else "before"
            raise UsageError(
                f"pipeline stage {self.stage} calls {path} {side} its blocks; it is defined on the other side of them, "
                "and no stage has it here",
                hint=f'Set parallel.{key} = ["{path}"], and name there all other modules that run on that side.',
            )

        def absent(name: str, shape: tuple[int, ...], dtype: torch.dtype, needs_gradient: bool) -> Absent:
            meta = torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs_gradient)
            absent = Absent.of(meta, Source(name, self.value).value, self.device)
            absent.is_source = True
            return absent

        return rebuild(self.specs[label], absent)


def _version(tensor: Tensor) -> int:
    """How often it was changed in place. Inference mode does not count, and needs no backward."""
    return 0 if tensor.is_inference() else tensor._version


class _Entered(torch.autograd.Function):
    """What came over a boundary, as a tensor that modules may change in place: a leaf may not be changed."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        return outer[0]


class Gated(nn.Module):
    """The class of a gate, and its module's."""

    _gate: Gate
    _gates: "Gates"

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, Tensor) and not name.startswith("_"):
            run, gate = self._gates.running, self._gate
            if run is not None and gate.stages is not None and run.stage not in gate.stages:
                raise UsageError(
                    f"pipeline stage {run.stage} reads {gate.path}.{name}, which that module's forward leaves on "
                    "another stage",
                    hint="Give it as an output of the block, or use parallel.pp = 1.",
                )
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, call = self._gates.running, super().__call__
        return call(*args, **kwargs) if run is None else run.call(self._gate, call, args, kwargs)


class Gates:
    """The gates of one model."""

    def __init__(self, model: nn.Module, gates: Sequence[Gate]) -> None:
        self.running: Run | None = None
        self._model = model
        self._chosen = gates
        self._stand_ins = StandIns(model)

    def open(self) -> None:
        """Modules become gates, with all hooks that they have by now."""
        for gate in self._chosen:
            self._stand_ins.swap(self._model.get_submodule(gate.path), Gated, _gate=gate, _gates=self)

    def close(self) -> None:
        """Modules are the user's own again."""
        self._stand_ins.close()

    @contextmanager
    def run(self, run: Run) -> Iterator[None]:
        """Inside, the model is the run's stage; the end of the stage's blocks ends it."""
        self.running = run
        try:
            yield
        except StageEndError:
            pass
        finally:
            self.running = None
