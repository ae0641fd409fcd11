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
from zero3d.stand_in import StandIns

Spec = Any
"""What a module gave, as JSON: {"tensor": [name, shape, dtype, needs gradient]}, {"list" | "tuple" | "dict": ...} or
{"value": ...}."""


class StageEndError(Exception):
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

    blocks: its own; received: tensors from earlier stages, by name; specs: what earlier stages' modules gave;
    is_sent: a later stage gets what it makes; made: what its modules gave; given: the tensors in that; used: names of
    received tensors that were needed
    """

    stage: int
    blocks: range
    received: Mapping[str, Tensor]
    specs: Mapping[str, Spec]
    device: torch.device
    is_sent: bool
    made: dict[str, Spec] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    calls: dict[str, int] = field(default_factory=dict)

    def call(self, gate: Gate, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = self.calls[gate.path] = self.calls.get(gate.path, -1) + 1
        label = f"{gate.path}#{number}"
        if self._is_elsewhere(gate, args, kwargs):
            return self._absent(label)
        keeps = gate.stages is not None or gate.random
        if keeps:
            args, kwargs = present(args), present(kwargs)
        output = forward(*args, **kwargs)
        if keeps and self.is_sent:
            self.made[label] = self._told(output, label)
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
        return self.received[source.name]

    def _is_elsewhere(self, gate: Gate, args: Any, kwargs: Any) -> bool:
        if gate.block is not None:
            if gate.block >= self.blocks.stop:
                raise StageEndError
            return gate.block < self.blocks.start
        if gate.stages is None:
            return gate.random and is_absent((args, kwargs))
        return self.stage not in gate.stages

    def _absent(self, label: str) -> Any:
        if label not in self.specs:
            raise UsageError(
                f"pipeline stage {self.stage} calls {label.partition('#')[0]}, which no stage before it has called",
                hint="Name the module in parallel.last_stage or parallel.first_stage, wherever it runs.",
            )
        return _made(self.specs[label], self)

    def _told(self, value: Any, name: str) -> Spec:
        if isinstance(value, Tensor):
            self.given[name] = value
            dtype = str(value.dtype).removeprefix("torch.")
            return {"tensor": [name, list(value.shape), dtype, value.requires_grad]}
        if type(value) is dict:
            return {"dict": {key: self._told(one, f"{name}.{key}") for key, one in value.items()}}
        if type(value) in (list, tuple):
            members = [self._told(one, f"{name}.{index}") for index, one in enumerate(value)]
            return {type(value).__name__: members}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise UsageError(
            f"{name.partition('#')[0]} gives a {type(value).__name__}, which cannot cross a pipeline stage's boundary",
            hint="Blocks may give tensors, numbers, text and None, in tuples, lists and dicts.",
        )


def _made(spec: Spec, run: Run) -> Any:
    ((kind, value),) = spec.items()
    if kind == "tensor":
        name, shape, dtype, needs_gradient = value
        meta = torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=needs_gradient)
        return Absent.of(meta, Source(name, run.value).value, run.device)
    if kind == "dict":
        return {key: _made(one, run) for key, one in value.items()}
    if kind in ("list", "tuple"):
        members = [_made(one, run) for one in value]
        return tuple(members) if kind == "tuple" else members
    return value


class Gated(nn.Module):
    """The class of a gate, and its module's."""

    _gate: Gate
    _gates: "Gates"

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
