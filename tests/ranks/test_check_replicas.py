"""Replicas of tensor parallelism stay equal in every bit, and a copy that strays is found and named."""

import pytest
import torch

import zero3d
from tests import tiny
from tests.world import run_ranks
from zero3d.config import Config
from zero3d.errors import ConfigError
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.llama import Llama, LlamaConfig

SAMPLES = 4


def gpt() -> GPT:
    return GPT(GPTConfig(vocabulary=61, sequence_length=tiny.LENGTH, width=32, layers=2, heads=4, dropout=0.2))


def llama() -> Llama:
    """With fewer KV heads than ranks: two ranks hold the same one."""
    shape = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 1, "mlp_width": 48}
    return Llama(LlamaConfig(vocabulary=61, sequence_length=tiny.LENGTH, **shape))


def batch(seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 61, (SAMPLES, tiny.LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def engine_for(model: object, dp: int, level: int, every: int = 1, *, sequence: bool = True) -> zero3d.Engine:
    return zero3d.Engine(
        model,  # type: ignore[arg-type]
        lambda logits, batch: zero3d.cross_entropy(logits, batch["targets"]),
        tiny.adamw,
        {
            "run": {"check_every": every},
            "parallel": {"dp": dp, "tp": 2, "sequence_parallel": sequence, "micro_batch": 1},
            "data": {"sequence_length": tiny.LENGTH},
            "zero": {"level": level},
        },
    )


def train(engine: zero3d.Engine, steps: int) -> None:
    for step in range(steps):
        engine.step(tiny.part(batch(step), engine.dp_index, engine.dp_size))


def checked(dp: int) -> int:
    """Every step is checked; an error would end the rank."""
    ways = [(gpt, level, sequence) for level in (0, 3) for sequence in (True, False)] + [(llama, 2, True)]
    for model, level, sequence in ways:
        engine = engine_for(model, dp, level, sequence=sequence)
        train(engine, 3)
        engine.check_replicas()
        engine.close()
    return len(ways)


@pytest.mark.parametrize("dp", [1, 2])
def test_replicas_are_equal_in_every_bit(dp: int) -> None:
    """With dropout, on parts of the sequence and on all of it; llama's KV head is held twice."""
    assert run_ranks(2 * dp, checked, dp) == [5] * (2 * dp)


def strayed(model: object, dp: int, level: int, name: str, stray: int) -> list[str]:
    """What a rank hears of a weight that changes on rank `stray`: from the check by hand, and from the next step."""
    engine = engine_for(model, dp, level, every=2)
    train(engine, 1)
    for shard in engine._parts.replica.shards if engine.rank == stray else ():
        for piece in shard.pieces:
            if piece.name == name:
                shard.master[piece.start] += 1.0
    told = []
    for check in (engine.check_replicas, lambda: train(engine, 1)):
        with pytest.raises(zero3d.DivergedError) as caught:
            check()
        told.append(str(caught.value))
    return told


@pytest.mark.parametrize(("dp", "level", "stray"), [(1, 0, 1), (2, 0, 3), (2, 3, 1)])
def test_a_copy_that_strays_is_named_on_every_rank(dp: int, level: int, stray: int) -> None:
    """At level 3 the element is in the first dp index's shard, and the other one's ranks hear of it too."""
    name = "blocks.0.mlp_norm.weight"
    for found in run_ranks(2 * dp, strayed, gpt, dp, level, name, stray):
        for text in found:
            assert f"{name} has other values on rank {stray} than on rank {stray - 1}" in text


def test_heads_that_two_ranks_hold_are_compared() -> None:
    name = "blocks.1.attention.k.weight"
    for found in run_ranks(2, strayed, llama, 1, 2, name, 1):
        assert f"{name} has other values on rank 1 than on rank 0" in found[0]


def test_a_check_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run.check_every = 5 at parallel.tp = 1"):
        Config.load({"run": {"check_every": 5}})


def untied(stray: int | None) -> str:
    """The output layer is the embedding, on another stage: with a copy that has changed on rank `stray`."""
    engine = zero3d.Engine(
        gpt,
        lambda logits, batch: zero3d.cross_entropy(logits, batch["targets"]),
        tiny.adamw,
        {
            "run": {"check_every": 1},
            "parallel": {"dp": 1, "pp": 2, "micro_batch": 1},
            "data": {"sequence_length": tiny.LENGTH},
        },
    )
    train(engine, 2)
    for shard in engine._parts.replica.shards if engine.rank == stray else ():
        if shard.bucket.slots[0].name in engine._parts.shared:
            shard.master[3] += 1.0
    try:
        engine.check_replicas()
    except zero3d.DivergedError as error:
        return str(error)
    return ""


def test_weights_tied_across_stages_stay_equal_and_one_that_strays_is_named() -> None:
    assert run_ranks(2, untied, None) == ["", ""]
    told = run_ranks(2, untied, 1)
    assert told[0] == told[1] and "tied across stages, has other values on rank 1 than on 0" in told[0]
