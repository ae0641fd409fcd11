"""Models that change in training: modules replaced, parameters frozen and unfrozen.

Bit-equal: levels 0 to 3 among each other. Close (1e-5): plain torch, where the same change is made to the model and its
optimizer keeps the state of what stayed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests import tiny
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

Change = Callable[[nn.Module], Any]
STEPS, SAMPLES = 3, 4


def resize(model: nn.Module) -> None:
    """C22: a larger vocabulary, as `resize_token_embeddings` makes it; the tie stays a tie."""
    old = model.get_submodule("tokens").weight
    new = nn.Embedding(80, tiny.WIDTH)
    with torch.no_grad():
        new.weight.copy_(torch.linspace(-0.1, 0.1, 80 * tiny.WIDTH).view(80, -1))
        new.weight[: len(old)] = old
    model.tokens = new
    model.head = nn.Linear(tiny.WIDTH, 80, bias=False)
    model.head.weight = new.weight


def untie(model: nn.Module) -> None:
    head = nn.Linear(tiny.WIDTH, tiny.VOCABULARY)
    with torch.no_grad():
        head.weight.copy_(model.get_submodule("tokens").weight)
        head.bias.fill_(0.01)
    model.head = head


def shorten(model: nn.Module) -> None:
    del model.get_submodule("blocks")[2]  # type: ignore[attr-defined]


def freeze_half(model: nn.Module) -> None:
    for name in ("tokens", "blocks.0", "blocks.1"):
        model.get_submodule(name).requires_grad_(False)


def unfreeze(model: nn.Module) -> None:
    model.requires_grad_(True)


def nothing(model: nn.Module) -> None:
    return None


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """A large eps: where gradients are nearly zero, Adam otherwise turns the last digit of a sum into a step."""
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)


def plain(first: Change, changes: list[Change]) -> tuple[list[float], dict[str, Tensor]]:
    """The optimizer is made anew after each change, with the state of parameters whose name and shape stayed."""
    model = tiny.tiny()
    first(model)
    optimizer = adamw([one for one in model.parameters() if one.requires_grad])
    losses = []
    for number in range(len(changes) + 1):
        if number:
            kept = {name: (one.shape, optimizer.state.get(one)) for name, one in model.named_parameters()}
            changes[number - 1](model)
            optimizer = adamw([one for one in model.parameters() if one.requires_grad])
            for name, one in model.named_parameters():
                shape, state = kept.get(name, (None, None))
                if shape == one.shape and state and one.requires_grad:
                    optimizer.state[one] = state
        for batch in tiny.batches(STEPS, SAMPLES, seed=number):
            optimizer.zero_grad()
            total, count = tiny.loss(model(batch["tokens"]), batch)
            (total / count).backward()
            optimizer.step()
            losses.append(float(total / count))
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def engine_run(
    level: int, first: Change, changes: list[Change], by_hand: bool, sections: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """`by_hand`: the user just changes the model between steps, and `edit` is not called."""
    model = tiny.tiny()
    first(model)
    sections = {"zero": {"level": level, "reduce": "step"}, "parallel": {"micro_batch": 1}, **sections}
    engine = zero3d.Engine(model, tiny.loss, adamw, sections)
    losses = []
    for number in range(len(changes) + 1):
        if number and by_hand:
            changes[number - 1](engine.model)
        elif number:
            engine.edit(changes[number - 1])
        for batch in tiny.batches(STEPS, SAMPLES, seed=number):
            losses.append(engine.step(tiny.part(batch, engine.rank, 2)).loss)
    return losses, engine.full_state_dict()


def some_levels(levels: Iterable[int], *args: Any) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [engine_run(level, *args) for level in levels]


CASES: dict[str, tuple[Change, list[Change], bool, dict[str, Any]]] = {
    "C22 before": (resize, [], False, {}),
    "C22 after": (nothing, [resize], False, {}),
    "C22 with recomputation": (nothing, [resize], False, {"recompute": {"mode": "block"}}),
    "untied and longer": (nothing, [untie, resize], False, {}),
    "a block less": (nothing, [shorten], False, {}),
    "nothing changes": (nothing, [nothing], False, {}),
    "frozen and unfrozen in edits": (freeze_half, [unfreeze, freeze_half], False, {}),
    "frozen and unfrozen by hand": (freeze_half, [unfreeze, freeze_half], True, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_edited_model_trains_as_in_plain_torch(case: str) -> None:
    first, changes, by_hand, sections = CASES[case]
    [(losses, weights)] = run_ranks(1, plain, first, changes)
    levels = range(4) if case in ("C22 after", "frozen and unfrozen by hand") else (1, 3)
    for found in run_ranks(2, some_levels, levels, first, changes, by_hand, sections):
        for level, (one_losses, state) in enumerate(found):
            assert one_losses == found[0][0], level
            assert all(torch.equal(value, found[0][1][name]) for name, value in state.items()), level
            torch.testing.assert_close(one_losses, losses, rtol=1e-5, atol=0)
            assert list(state) == list(weights)
            for name, value in state.items():
                error = float((value - weights[name]).abs().max() / weights[name].abs().max())
                assert error <= 1e-5, (level, name, error)


def masters(level: int) -> tuple[bool, bool]:
    """A model made in bf16: masters are fp32, and an edit of something else leaves their bits."""
    engine = zero3d.Engine(
        tiny.tiny().bfloat16(), tiny.loss, adamw, {"zero": {"level": level}, "precision": {"compute": "bf16"}}
    )
    batch = tiny.part(tiny.batches(1, SAMPLES)[0], engine.rank, 2)
    engine.step(batch)
    before = {name: engine.weight_of(name) for name in ("blocks.1.up.weight", "norm.bias")}
    engine.edit(lambda model: nn.init.constant_(model.norm.bias, 0.5))  # type: ignore[arg-type,union-attr]
    same = torch.equal(engine.weight_of("blocks.1.up.weight"), before["blocks.1.up.weight"])
    engine.step(batch)
    return same, not torch.equal(before["blocks.1.up.weight"], before["blocks.1.up.weight"].bfloat16().float())


def test_an_edit_keeps_the_bits_of_master_weights() -> None:
    for level in (0, 3):
        assert run_ranks(2, masters, level) == [(True, True)] * 2


def differs() -> tuple[str, str]:
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, adamw, {"zero": {"level": 3}})
    batch = tiny.part(tiny.batches(1, SAMPLES)[0], engine.rank, 2)
    engine.step(batch)
    if engine.rank == 1:
        engine.model.norm.requires_grad_(False)  # type: ignore[union-attr]
    with pytest.raises(zero3d.DivergedError) as flags:
        engine.step(batch)
    engine.model.norm.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(zero3d.DivergedError) as edits:
        engine.edit(resize if engine.rank == 0 else nothing)
    return str(flags.value), str(edits.value)


def test_ranks_that_edit_differently_do_not_hang() -> None:
    for flags, edits in run_ranks(2, differs):
        assert "requires_grad" in flags and "different edits" in edits


def hooks(module: nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def closed(level: int) -> tuple[list[int], bool, bool]:
    """(hooks before, at work and after close; weights that are plain; a forward and backward in plain torch)."""
    model = tiny.tiny()
    counts = [sum(map(hooks, model.modules()))]
    engine = zero3d.Engine(model, tiny.loss, adamw, {"zero": {"level": level}, "recompute": {"mode": "block"}})
    batch = tiny.part(tiny.batches(1, SAMPLES)[0], engine.rank, 2)
    engine.step(batch)
    counts.append(sum(map(hooks, model.modules())))
    engine.close()
    counts.append(sum(map(hooks, model.modules())))
    state = engine.full_state_dict()
    with engine.gathered():
        same = all(torch.equal(value, state[name]) for name, value in model.named_parameters())
    if level == 3:
        with pytest.raises(zero3d.ReleasedParameterError):
            model(batch["tokens"])
        return counts, same, True
    total, _ = tiny.loss(model(batch["tokens"]), batch)
    total.backward()
    return counts, same, all(one.grad is not None for one in model.parameters())


@pytest.mark.parametrize("level", range(4))
def test_a_closed_engine_leaves_a_plain_model(level: int) -> None:
    for (before, at_work, after), same, plain_again in run_ranks(2, closed, level):
        assert before == after == 0 < at_work
        assert same and plain_again
