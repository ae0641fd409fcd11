"""The stages of one rank, put together: their gates, boundaries and parameters."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.comm.texts import everyones_text
from zero3d.config import Parallel
from zero3d.contracts import Axis, Batch, Loss, Place
from zero3d.linears import Linears
from zero3d.pipeline.action import Action, whole_backwards
from zero3d.pipeline.calling import Call
from zero3d.pipeline.cut import cut
from zero3d.pipeline.exchange import Boundary
from zero3d.pipeline.gates import Gates
from zero3d.pipeline.outputs import joined, plain, shared
from zero3d.pipeline.placed import Placed
from zero3d.pipeline.schedules.own import find
from zero3d.pipeline.stage import ModelStage, StageModel
from zero3d.pipeline.uneven import Buffers
from zero3d.randomness import Randomness


class Pipeline:
    """This rank's part of a model in stages; all of it where there is one stage.

    root: the module whose forward is a forward of a stage; `local`: the stages by number; linears: how gradients of
    linear layers are computed
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        options: Parallel,
        axis: Axis,
        device: torch.device,
        randomness: Randomness,
        call: Call,
    ) -> None:
        schedule = find(options.schedule)
        self.stages = stages = cut(model, blocks, schedule, options, ranks=axis.size, index=axis.index)
        self.placed = Placed(model, stages, axis, device)
        self.local: dict[int, ModelStage] = {}
        self._model = model
        self._schedule = schedule
        self._axis = axis
        self._device = device
        self._randomness = randomness
        self._call = call
        self._gates = Gates(model, stages.gates)
        self.linears = Linears()
        self._plan: Sequence[Sequence[Action]] = ()
        self._planned = 0
        self._agreed = stages.number == 1
        self.root = model if stages.number == 1 else StageModel(model, self._gates, call)

    @property
    def speaks(self) -> bool:
        """Whether the loss is computed here."""
        return self.stages.number - 1 in self.stages.mine

    def open(self, loss: Loss, scale: Callable[[Tensor], float], blocks: Sequence[nn.Module], place: Place) -> None:
        """The stages can run: weights are there, and all hooks. `place`: where gradients are kept."""
        splits = self._schedule.splits_backward(self.stages.number, self._axis.size)
        self.linears.watch(self._model, place, blocks if splits else ())
        self._gates.open()
        boundaries: dict[int, Boundary] = {}
        for stage in range(self.stages.number - 1):
            sides = self.stages.holders[stage], self.stages.holders[stage + 1]
            if self._axis.index in sides:
                peer = sides[0] if sides[1] == self._axis.index else sides[1]
                boundaries[stage] = Boundary(self._axis, stage, self._axis.index, peer, self._device)
        for stage in self.stages.mine:
            self.local[stage] = ModelStage(
                index=stage,
                blocks=self.stages.blocks[stage],
                model=self._model,
                compute=self._compute,
                loss=loss,
                randomness=self._randomness,
                scale=scale,
                device=self._device,
                linears=self.linears,
                before=boundaries.get(stage - 1),
                after=boundaries.get(stage),
            )

    def actions(self, micro_batches: int) -> Sequence[Action]:
        """Of this rank in one step."""
        if micro_batches != self._planned:
            ranks = self._schedule.actions(self.stages.number, self._axis.size, micro_batches)
            self._plan = [whole_backwards(actions) for actions in ranks]
            self._planned = micro_batches
            for boundary in self._boundaries():
                boundary.follow(self._plan[boundary.peer])
        return self._plan[self._axis.index]

    def settle(self) -> None:
        """All that was sent has arrived."""
        for boundary in self._boundaries():
            boundary.settle()

    def agree(self, batch: Batch) -> None:
        """Finds out, before the first step, what later stages need of earlier ones: one micro-batch goes through all
        stages with everything there is. Collective over pp."""
        if self._agreed:
            return
        for boundary in self._boundaries():
            boundary.carry(None)
        told: dict[str, Any] = {}
        kept = Buffers(self._model)
        with self._randomness.step(0):
            self._randomness.enter(0)
            for number, stage in sorted(self.local.items()):
                run = stage.try_out(batch, ("first",))
                told[str(number)] = {"used": sorted(run.used), "given": list(run.given)}
        self.settle()
        kept.put_back()
        everyone: dict[int, Any] = {}
        for text in everyones_text(json.dumps(told), self._axis, self._device, "what stages need"):
            everyone.update((int(number), what) for number, what in json.loads(text).items())
        for boundary in self._boundaries():
            boundary.carry(_carried(everyone, boundary.stage))
        self._agreed = True

    def output(self, outputs: Sequence[Any]) -> Any:
        """Those of micro-batches, from the rank of the last stage, as one on all ranks. Collective over pp."""
        if self._axis.size == 1:
            return joined(outputs)
        return shared(joined([plain(one) for one in outputs]), self._axis, self.stages.holders[-1], self._device)

    def close(self) -> None:
        """Modules are the user's own again."""
        self._gates.close()
        self.linears.close()

    def _compute(self, batch: Batch, run: Any) -> Any:
        if self.root is self._model:
            return self._call(self._model, batch)
        output, _ = self.root(batch, run)
        return output

    def _boundaries(self) -> list[Boundary]:
        found = [(one.before, one.after) for one in self.local.values()]
        return list(dict.fromkeys(one for pair in found for one in pair if one is not None))


def _carried(everyone: Mapping[int, Any], boundary: int) -> list[str]:
    """What stages up to `boundary` give and later ones use, in the order in which it is given."""
    given = [name for stage in range(boundary + 1) for name in everyone[stage]["given"]]
    used = {name for stage, what in everyone.items() if stage > boundary for name in what["used"]}
    return [name for name in given if name in used]
