"""Finds where numbers stopped being finite, by running a failed step again under watch."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.assemble import Parts
from zero3d.comm.texts import everyones_text
from zero3d.contracts import Batch
from zero3d.errors import NonFiniteError
from zero3d.optim.tally import Totals
from zero3d.pipeline.runtime import run
from zero3d.trees import tensors_in
from zero3d.unwatched import UNWATCHED

AGAIN = (
    "is finite when the step is made again: a fault of the machine or of its memory, or code that does not do the same "
    "twice"
)
MOST_SKIPS = 10
"""fp16: so many steps in a row without finite gradients are no matter of the loss scale any more."""


def refuse_non_finite(parts: Parts, totals: Totals, micro_batches: Sequence[Batch], step: int) -> None:
    """Raises `NonFiniteError` if numbers of the step went wrong for good. Collective then; weights stay as they are."""
    if totals.finite or (parts.scaler.enabled and parts.scaler.bad_steps < MOST_SKIPS):
        return
    skips = parts.scaler.bad_steps if parts.scaler.enabled else 0
    losses = [outcome.loss for stage in parts.stages.values() for outcome in stage.outcomes]
    had_loss = all(_finite(loss) for loss in losses)
    found = "; ".join(first_non_finite(parts, micro_batches, step, had_loss=had_loss)) or _without_a_rank(parts)
    in_a_row = f" in {skips} steps in a row" if skips else ""
    raise NonFiniteError(
        f"loss or gradients are not finite{in_a_row} (step {step}): {found}",
        hint="The weights are those before this step. Look at that module's input, or lower the learning rate.",
    )


def first_non_finite(parts: Parts, micro_batches: Sequence[Batch], step: int, *, had_loss: bool) -> list[str]:
    """One sentence for each rank that saw something: its first module in forward and first parameter in backward.

    had_loss: this rank's losses were finite in the step that failed. Collective. Changes gradients and sums as a step
    does, but no weight.
    """
    modules: list[str] = []
    gradients: list[str] = []
    for stage in parts.stages.values():
        stage.start()
    with _watching(parts.model, modules, gradients), parts.randomness.step(step):
        run(parts.actions(len(micro_batches)), parts.stages, parts.replica, micro_batches, UNWATCHED)
    parts.pipeline.settle()
    parts.replica.finish()
    said = []
    if gradients:
        said.append(f"the first gradient is that of {gradients[0]}")
    if modules:
        said.append(f"it began in the forward of {modules[0]}")
    elif gradients:
        said.append(f"forward was finite, it began in the backward of {gradients[0].rpartition('.')[0] or 'the model'}")
    if not said and not had_loss:
        said.append(f"its loss was not finite, and {AGAIN}")
    mine = f"rank {parts.everyone.index}: {', '.join(said)}" if said else ""
    return [text for text in everyones_text(mine, parts.everyone, parts.device, "what went wrong") if text]


def _without_a_rank(parts: Parts) -> str:
    """What no rank's own numbers show, of a step that was run under watch. Collective."""
    norms = parts.replica.norms(parts.uncounted) if parts.counts_norms else ()
    mine = "" if all(_finite(torch.as_tensor(norm)) for norm in norms) else "not finite"
    if any(everyones_text(mine, parts.everyone, parts.device, "whether sums are finite")):
        return "every rank's own are, their sum is not"
    return f"every rank's losses were, and all {AGAIN}"


@contextmanager
def _watching(model: nn.Module, modules: list[str], gradients: list[str]) -> Iterator[None]:
    def output_of(name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not all(_finite(tensor) for tensor in tensors_in(output)):
                modules.append(f"{name or 'the model'} ({type(module).__name__})")

        return look

    def gradient_of(name: str) -> Any:
        def look(gradient: Tensor) -> None:
            if not _finite(gradient):
                gradients.append(name)

        return look

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(output_of(name)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_hook(gradient_of(name)))
        yield


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
