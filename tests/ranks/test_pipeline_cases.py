"""What pipeline stages must get right, case by case, and what they refuse.

Bit-equal: copies of ties, all ranks, and pp = 1 where nothing is tied and clipping is off. Close: the plain loop, 1e-5;
gradient norms of the first step, 1e-6.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests import reference, tiny
from tests.pipeline_runs import adamw, distance
from tests.world import run_ranks
from zero3d.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.ranks

SAMPLES = 8
TIED = "tokens.weight"


def engine_for(model: nn.Module, *, rule: Any = adamw, loss: Any = tiny.loss, **sections: Any) -> zero3d.Engine:
    sections["zero"] = {"level": 1, "reduce": "step", **sections.get("zero", {})}
    return zero3d.Engine(model, loss, rule, sections)


def gpt() -> GPT:
    torch.manual_seed(0)
    shape = {"vocabulary": tiny.VOCABULARY, "sequence_length": tiny.LENGTH}
    return GPT(GPTConfig(**shape, width=16, layers=4, heads=2, tied=True))


def split_loss(logits: Any, batch: dict[str, Tensor]) -> Any:
    return zero3d.cross_entropy(logits, batch["targets"])


def steps(engine: zero3d.Engine, number: int, samples: int = SAMPLES) -> list[zero3d.StepReport]:
    batches = tiny.batches(number, samples)
    return [engine.step(tiny.part(batch, engine.dp_index, engine.dp_size)) for batch in batches]


def plain(model: nn.Module, number: int, samples: int = SAMPLES, clip: float = 0.0) -> reference.Trace:
    batches = [[batch] for batch in tiny.batches(number, samples)]
    return reference.train(
        model, tiny.loss, adamw, batches, call=lambda model, batch: model(batch["tokens"]), clip=clip
    )


def assert_close(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, value in mine.items():
        assert distance(value, expected[name]) <= 1e-5, name


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def first_norms(options: Sequence[dict[str, Any]]) -> list[float]:
    return [steps(engine_for(tiny.tiny(tied=False), parallel=one), 1)[0].grad_norm for one in options]


def test_c46_gradients_have_one_scale_whatever_the_number_of_micro_batches() -> None:
    expected = run_ranks(1, plain, tiny.tiny(tied=False), 1)[0].norms
    for pp in (1, 2, 4):
        options = [{"pp": pp, "micro_batch": SAMPLES // number} for number in (1, 2, 8)]
        for found in run_ranks(pp, first_norms, options):
            torch.testing.assert_close(found, expected * 3, rtol=1e-6, atol=0)


def trained(model: Callable[[], nn.Module], samples: Sequence[int], **sections: Any) -> list[Any]:
    found = []
    for number in samples:
        engine = engine_for(model(), **sections)
        found.append(([one.loss for one in steps(engine, 2, number)], engine.full_state_dict()))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zbh2"])
def test_c57_fewer_micro_batches_than_stages(schedule: str) -> None:
    counts, model = (1, 2, 3, 5), partial(tiny.tiny, tied=False)
    parallel = {"pp": 4, "schedule": schedule, "micro_batch": 1}
    for found in run_ranks(4, partial(trained, parallel=parallel), model, counts):
        for number, (losses, weights) in zip(counts, found):
            expected = run_ranks(1, plain, model(), 2, number)[0]
            torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0)
            assert_close(weights, expected.weights)


def held(layers: int, pp: int) -> tuple[list[int], dict[str, Tensor]]:
    engine = engine_for(tiny.tiny(layers=layers, tied=False), parallel={"pp": pp})
    steps(engine, 1)
    return engine.held_bytes()["weights"], engine.full_state_dict()


@pytest.mark.parametrize(("layers", "pp"), [(5, 2), (7, 2), (5, 4), (7, 4)])
def test_c59_no_layer_is_dropped_where_stages_do_not_divide_them(layers: int, pp: int) -> None:
    [(whole, expected)] = run_ranks(1, held, layers, 1)
    own = 4 * tiny.LENGTH * tiny.WIDTH
    for weights, state in run_ranks(pp, held, layers, pp):
        # `places` belongs to no module, so it is on every stage.
        assert sum(weights) == whole[0] + (pp - 1) * own
        assert min(weights) > whole[0] / (layers + 2), "a stage without blocks"
        assert_close(state, expected)


def tied(options: Sequence[dict[str, Any]], layers: int, clip: float) -> list[Any]:
    """Losses, norms, weights, this rank's own copy of the tie and what is read of it by either name."""
    found = []
    for parallel in options:
        model = tiny.tiny(layers=layers)
        engine = engine_for(model, parallel={"micro_batch": 2, **parallel}, optimizer={"clip_norm": clip})
        assert len([one for one in engine.parameters if TIED in (one.name, *one.ties)]) == 1
        reports = steps(engine, 5)
        assert engine.model.head.weight is engine.model.tokens.weight  # type: ignore[union-attr]
        parameter = engine.model.get_parameter(TIED)
        mine = None if parameter.is_meta else parameter.detach().clone()
        names = (engine.weight_of(TIED), engine.weight_of("head.weight"))
        losses, norms = [one.loss for one in reports], [one.grad_norm for one in reports]
        found.append((losses, norms, engine.full_state_dict(), mine, names))
        engine.close()
    return found


@pytest.mark.parametrize("pp", [2, 4])
def test_c60_ties_over_stages_are_one_tensor(pp: int) -> None:
    """With clipping: a norm that counts one copy twice would show in every weight."""
    layers, clip = 8, 0.5
    options = [{"pp": pp}, {"pp": pp, "schedule": "interleaved", "stages_per_rank": 2}]
    expected = run_ranks(1, plain, tiny.tiny(layers=layers), 5, SAMPLES, clip)[0]
    assert min(expected.norms) > clip, "nothing is clipped"
    ranks = run_ranks(pp, tied, options, layers, clip)
    for number, parallel in enumerate(options):
        copies = [found[number][3] for found in ranks if found[number][3] is not None]
        assert len(copies) == 2, parallel
        for found in ranks:
            losses, norms, weights, _, names = found[number]
            torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0)
            torch.testing.assert_close(norms, expected.norms, rtol=1e-5, atol=0)
            assert_close(weights, expected.weights)
            assert same(weights, ranks[0][number][2])
            for one in (*copies, *names, weights["head.weight"]):
                assert torch.equal(one, weights[TIED]), parallel


def on_tp_too(options: Sequence[dict[str, Any]], clip: float) -> list[Any]:
    """As `tied`, of a model that tensor parallelism cuts as well."""
    found = []
    for parallel in options:
        parallel = {"micro_batch": 2, **parallel}
        engine = engine_for(gpt(), loss=split_loss, parallel=parallel, optimizer={"clip_norm": clip})
        reports = steps(engine, 3)
        found.append(([one.loss for one in reports], [one.grad_norm for one in reports], engine.full_state_dict()))
        engine.close()
    return found


def test_c60_ties_over_stages_whose_tensors_are_cut() -> None:
    clip = 0.5
    options = [{"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "schedule": "interleaved", "stages_per_rank": 2}]
    expected = run_ranks(1, plain, gpt(), 3, SAMPLES, clip)[0]
    assert min(expected.norms) > clip, "nothing is clipped"
    ranks = run_ranks(4, on_tp_too, options, clip)
    for number in range(len(options)):
        for found in ranks:
            losses, norms, weights = found[number]
            torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0)
            torch.testing.assert_close(norms, expected.norms, rtol=1e-5, atol=0)
            assert_close(weights, expected.weights)
            assert same(weights, ranks[0][number][2])
            assert torch.equal(weights["head.weight"], weights["embedding.weight"])


def evaluated(pp: int, schedule: str) -> list[Any]:
    per_rank = 2 if schedule == "zbv" else 1
    parallel = {"pp": pp, "micro_batch": 3, "schedule": schedule, "stages_per_rank": per_rank if pp > 1 else 1}
    engine = engine_for(tiny.tiny(tied=False, dropout=0.2), parallel=parallel)
    first, second, third = tiny.batches(3, SAMPLES)
    found: list[Any] = [engine.evaluate(first).loss, engine.step(first).loss, engine.step(second).loss]
    with torch.inference_mode():
        found.append(engine.evaluate(first).loss)
    report = engine.evaluate(third, outputs=True)
    found += [report.loss, report.tokens, engine.step(third).loss]
    return [*found, report.outputs, engine.full_state_dict()]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_c82_evaluation_gives_outputs_in_sample_order_and_dropout_is_that_of_one_stage(schedule: str) -> None:
    [expected] = run_ranks(1, evaluated, 1, "1f1b")
    for found in run_ranks(2, evaluated, 2, schedule):
        assert found[:-2] == expected[:-2]
        assert found[-2].shape == (SAMPLES, tiny.LENGTH, tiny.VOCABULARY)
        assert torch.equal(found[-2], expected[-2])
        assert same(found[-1], expected[-1])


def two_losses(pp: int) -> list[Any]:
    """C82: a loop of the user's: two losses in one, an update when it likes, on what was put together."""

    def both(logits: Tensor, batch: dict[str, Tensor]) -> Any:
        total, count = tiny.loss(logits, batch)
        return total + 1e-2 * logits.logsumexp(-1).square().sum(), count

    engine = engine_for(tiny.tiny(tied=False), loss=both, parallel={"pp": pp, "micro_batch": 2})
    waiting: list[dict[str, Tensor]] = []
    found = []
    for number, batch in enumerate(tiny.batches(5, 4)):
        waiting.append(batch)
        if number in (1, 4):
            found.append(engine.step({key: torch.cat([one[key] for one in waiting]) for key in batch}).loss)
            waiting.clear()
    return [found, engine.full_state_dict()]


def test_c82_a_loop_of_the_users_own() -> None:
    [expected] = run_ranks(1, two_losses, 1)
    for losses, weights in run_ranks(2, two_losses, 2):
        assert losses == expected[0] and same(weights, expected[1])


def uneven(pp: int) -> list[Any]:
    """dp index 0 has 3 micro-batches where 1 has one, and then one of them has nothing."""
    engine = engine_for(tiny.tiny(tied=False), parallel={"pp": pp, "micro_batch": 1}, zero={"level": 2})
    found = []
    for number, batch in enumerate(tiny.batches(4, 4)):
        parts: list[Any] = [
            {key: value[:3] for key, value in batch.items()},
            {key: value[3:] for key, value in batch.items()},
        ]
        if number >= 2:
            parts = [batch, None] if number == 2 else [None, batch]
        report = engine.step(parts[engine.dp_index])
        found.append((report.loss, report.tokens))
    empty = engine.step(None)
    return [found, empty.skipped, engine.full_state_dict()]


def test_ranks_with_fewer_micro_batches_or_none_run_along() -> None:
    expected = run_ranks(1, plain, tiny.tiny(tied=False), 4, 4)[0]
    unstaged = run_ranks(2, uneven, 1)[0]
    for reports, skipped, weights in run_ranks(4, uneven, 2):
        assert skipped and reports == unstaged[0]
        torch.testing.assert_close([loss for loss, _ in reports], expected.losses, rtol=1e-5, atol=0)
        assert_close(weights, expected.weights)
        assert same(weights, unstaged[2])


def in_16_bits(pp: int, precision: str, schedule: str) -> list[Any]:
    parallel = {"pp": pp, "micro_batch": 2, "schedule": schedule}
    engine = engine_for(tiny.tiny(tied=False), parallel=parallel, precision={"compute": precision})
    reports = steps(engine, 3)
    return [[(one.loss, one.skipped, one.loss_scale) for one in reports], engine.full_state_dict()]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_are_those_of_one_stage(precision: str) -> None:
    [expected] = run_ranks(1, in_16_bits, 1, precision, "1f1b")
    assert not all(skipped for _, skipped, _ in expected[0])
    for schedule in ("1f1b", "zbh1"):
        for reports, weights in run_ranks(2, in_16_bits, 2, precision, schedule):
            assert reports == expected[0] and same(weights, expected[1]), schedule


class Overflows(nn.Module):
    """TINY whose logits become infinite where the first token is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.tiny(tied=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens) * torch.where(tokens[:, :1, None] == 0, float("inf"), 1.0)  # type: ignore[no-any-return]


def overflow() -> list[tuple[bool, float]]:
    engine = engine_for(Overflows(), parallel={"pp": 2}, precision={"compute": "fp16"})
    first, second = tiny.batches(2, SAMPLES)
    first["tokens"][:, 0] = 1
    second["tokens"][:, 0] = 1
    second["tokens"][-1, 0] = 0  # the last sample: on the last dp index alone
    reports = [engine.step(tiny.part(one, engine.dp_index, engine.dp_size)) for one in (first, second, first)]
    return [(one.skipped, one.loss_scale) for one in reports]


def test_an_overflow_of_one_rank_is_everyones() -> None:
    ranks = run_ranks(4, overflow)
    assert [skipped for skipped, _ in ranks[0]] == [False, True, False]
    assert ranks[0][1][1] < ranks[0][0][1]
    assert all(found == ranks[0] for found in ranks)
