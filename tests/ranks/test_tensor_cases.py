"""What tensor parallelism must get right, case by case, and what it refuses.

Bit-equal: replicas on all ranks, both names of a tie, and steps with and without recomputation. Close: the plain loop
in one process, 1e-5; gradient norms 1e-6.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero3d
from tests import reference, tiny
from tests.world import run_ranks
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.llama import Llama, LlamaConfig
from zero3d.models.losses import next_token_loss

pytestmark = pytest.mark.ranks

SAMPLES = 4


def loss(logits: Any, batch: dict[str, Tensor]) -> Any:
    return zero3d.cross_entropy(logits, batch["targets"])


def gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    shape = {"vocabulary": tiny.VOCABULARY, "sequence_length": tiny.LENGTH, "width": 32, "layers": 2, "heads": 4}
    return GPT(GPTConfig(**{**shape, **options}))


def llama(**options: Any) -> Llama:
    torch.manual_seed(0)
    shape = {"vocabulary": tiny.VOCABULARY, "sequence_length": tiny.LENGTH, "layers": 2, "mlp_width": 48}
    return Llama(LlamaConfig(**{**shape, **options}))


def engine_for(model: nn.Module, *, rule: Any = tiny.adamw, call: Any = None, **sections: Any) -> zero3d.Engine:
    return zero3d.Engine(model, loss, rule, {"zero": {"level": 2}, **sections}, call=call)


def steps(engine: zero3d.Engine, number: int) -> list[zero3d.StepReport]:
    batches = tiny.batches(number, SAMPLES)
    return [engine.step(tiny.part(batch, engine.dp_index, engine.dp_size)) for batch in batches]


def plain(model: nn.Module, number: int, call: Any = None, clip: float = 0.0) -> reference.Trace:
    call = call or (lambda model, batch: model(batch["tokens"]))
    return reference.train(
        model, next_token_loss, tiny.adamw, [[batch] for batch in tiny.batches(number, SAMPLES)], call=call, clip=clip
    )


def assert_close(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, value in mine.items():
        error = float((value - expected[name]).abs().max() / expected[name].abs().max())
        assert error <= 1e-5, (name, error)


def tied(level: int, sequence: bool) -> dict[str, Tensor]:
    model = gpt()
    engine = engine_for(model, zero={"level": level}, parallel={"tp": 2, "sequence_parallel": sequence})
    model = engine.model  # type: ignore[assignment]
    assert model.head.weight is model.embedding.weight
    with engine.gathered():
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.shape == (tiny.VOCABULARY, 32)
    steps(engine, 5)
    assert model.head.weight is model.embedding.weight
    assert len([one for one in engine.parameters if one.name == "embedding.weight"]) == 1
    state = engine.full_state_dict()
    engine.close()
    assert model.head.weight is model.embedding.weight
    return state


def test_c27_ties_hold() -> None:
    [expected] = run_ranks(1, lambda: plain(gpt(), 5).weights)
    for level in range(4):
        for state in run_ranks(2, tied, level, level % 2 == 1):
            assert torch.equal(state["head.weight"], state["embedding.weight"])
            assert_close(state, expected)


def norms(level: int, tp: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    parallel = {"tp": tp, "sequence_parallel": level > 0}
    engine = engine_for(gpt(), zero={"level": level}, parallel=parallel, optimizer={"clip_norm": 0.1})
    reports = steps(engine, 3)
    after = [one.grad_norm_after for one in reports]
    return [one.grad_norm for one in reports], after, engine.full_state_dict()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("level", [0, 3])
def test_c44_each_element_counts_once_in_the_norm(level: int, ranks: int) -> None:
    """Of replicas, ties and parts."""
    [expected] = run_ranks(1, plain, gpt(), 3, None, 0.1)
    for found, after, weights in run_ranks(ranks, norms, level, 2):
        torch.testing.assert_close(found, expected.norms, rtol=1e-6, atol=0)
        torch.testing.assert_close(after, [0.1] * 3, rtol=1e-4, atol=0)
        assert_close(weights, expected.weights)


class Mixer(nn.Module):
    """Attention of the user's own: reads shapes from its input, counts its heads by itself."""

    def __init__(self, width: int, many: int, drop: float) -> None:
        super().__init__()
        self.many, self.breadth = many, width // many
        self.kyu = nn.Linear(width, width)
        self.kayvee = nn.Linear(width, 2 * width, bias=False)
        self.away = nn.Linear(width, width)
        self.forget = nn.Dropout(drop)

    def forward(self, stream: Tensor, **how: Any) -> tuple[Tensor, str]:
        samples, length, _ = stream.shape
        shape = (samples, length, self.many, self.breadth)
        q = self.kyu(input=stream).view(shape).transpose(1, 2)
        k, v = (one.reshape(shape).transpose(1, 2) for one in self.kayvee(stream).chunk(2, dim=-1))
        mixed = F.scaled_dot_product_attention(q * how["scale"], k, v, is_causal=True)
        return self.forget(self.away(mixed.transpose(1, 2).flatten(2))), "said"


class Layer(nn.Module):
    def __init__(self, width: int, many: int, drop: float) -> None:
        super().__init__()
        self.calm = nn.LayerNorm(width)
        self.mixer = Mixer(width, many, drop)
        self.quiet = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 3 * width)
        self.inner = nn.Dropout(drop)
        self.narrow = nn.Linear(3 * width, width)
        self.outer = nn.Dropout(drop)

    def forward(self, stream: Tensor, **how: Any) -> Tensor:
        mixed, said = self.mixer(self.calm(stream), **how)
        assert said == "said"
        stream = stream + mixed
        return stream + self.outer(self.narrow(self.inner(torch.tanh(self.wide(self.quiet(stream))))))


class Talker(nn.Module):
    """A user's module: odd names, **kwargs in forward."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.eye = nn.Embedding(tiny.VOCABULARY, 32)
        self.where = nn.Parameter(torch.randn(tiny.LENGTH, 32) * 0.1)
        self.stack = nn.ModuleList(Layer(32, 4, drop) for _ in range(2))
        self.finish = nn.LayerNorm(32)
        self.say = nn.Linear(32, tiny.VOCABULARY)

    def forward(self, **given: Any) -> Tensor:
        stream = self.eye(given["tokens"]) + self.where
        for layer in self.stack:
            stream = layer(stream, scale=given["scale"])
        said: Tensor = self.say(self.finish(stream))
        return said


PLAN = {
    "eye": "vocab",
    "stack.*.mixer": "gather + divide(many)",
    "stack.*.mixer.kyu": "colwise(8)",
    "stack.*.mixer.kayvee": "gate_up",
    "stack.*.mixer.away": "rowwise",
    "stack.*.wide": "colwise",
    "stack.*.narrow": "rowwise",
    "finish": "sequence",
    "say": "vocab",
}


def talker(drop: float = 0.0) -> Talker:
    torch.manual_seed(0)
    return Talker(drop)


def call_talker(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(tokens=batch["tokens"], scale=0.5)


def talk(sequence: bool, level: int, plan: dict[str, str]) -> tuple[list[float], dict[str, Tensor], list[str]]:
    parallel = {"tp": 2, "sequence_parallel": sequence, "plan": plan, "micro_batch": 2}
    engine = engine_for(talker(), call=call_talker, zero={"level": level}, parallel=parallel)
    losses = [one.loss for one in steps(engine, 3)]
    assert type(engine.model) is Talker and type(engine.model.stack[0]) is Layer
    return losses, engine.full_state_dict(), [one.name for one in engine.parameters if one.slicing is not None]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "last", [{}, {"say": "colwise_gather_output"}, {"finish": "sequence_end", "say": "replicate", "eye": "replicate"}]
)
def test_c62_a_module_of_the_users_own_needs_a_plan_and_no_edit(sequence: bool, last: dict[str, str]) -> None:
    [expected] = run_ranks(1, plain, talker(), 3, call_talker)
    plan = {**PLAN, **last}
    for losses, weights, cut in run_ranks(2, talk, sequence, 3 if sequence else 1, plan):
        torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0)
        assert_close(weights, expected.weights)
        named = {pattern.rpartition(".")[2] for pattern, style in plan.items() if style != "replicate"}
        assert {name.split(".")[-2] for name in cut} == named - {"mixer", "finish"}
        assert ("stack.1.wide.bias" in cut) and ("stack.1.narrow.bias" not in cut)


def talk_dropping(sequence: bool, recompute: str) -> tuple[list[float], dict[str, Tensor], dict[str, list[Tensor]]]:
    """Losses and replicas of 20 steps, and what dropout left in the last."""
    parallel = {"tp": 2, "sequence_parallel": sequence, "plan": PLAN}
    engine = engine_for(talker(0.1), call=call_talker, parallel=parallel, recompute={"mode": recompute})
    kept: dict[str, list[Tensor]] = {}
    losses = [one.loss for one in steps(engine, 19)]
    for name, module in engine.model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, args, out, name=name: kept.setdefault(name, []).append(out != 0))
    losses += [one.loss for one in steps(engine, 1)]
    whole = {one.name for one in engine.parameters if one.slicing is None}
    replicas = {name: one.detach().clone() for name, one in engine.model.named_parameters() if name in whole}
    return losses, replicas, kept


@pytest.mark.parametrize("sequence", [False, True])
def test_c51_replicas_stay_equal_and_masks_differ_where_activations_are_cut(sequence: bool) -> None:
    """Recomputed blocks draw the same masks again: bit-equal to keeping activations."""
    first, second = run_ranks(2, talk_dropping, sequence, "none")
    assert first[0] == second[0] and first[0][-1] < first[0][0]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in first[1]} >= {"calm", "quiet", "away", "finish"}
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())
    for name, (mine,) in first[2].items():
        (others,) = second[2][name]
        cut = sequence or name.endswith("inner")
        assert 0.05 < float((~mine).float().mean()) < 0.2
        assert torch.equal(mine, others) != cut, name
        assert (mine.size(1) == tiny.LENGTH // 2) == (sequence and not name.endswith("inner"))
    assert not torch.equal(first[2]["stack.0.outer"][0], first[2]["stack.1.outer"][0])
    for again, once in zip(run_ranks(2, talk_dropping, sequence, "block"), (first, second)):
        assert again[0] == once[0]
        assert all(torch.equal(value, once[1][name]) for name, value in again[1].items())
        # A recomputation ends with the last tensor that is wanted, which may be that of the last dropout itself.
        assert all(torch.equal(mask, masks[0]) for masks in again[2].values() for mask in masks)
        assert all(len(masks) == 2 for name, masks in again[2].items() if name.endswith("inner"))


def uneven(model: Callable[[], nn.Module]) -> str:
    with pytest.raises(zero3d.ConfigError) as caught:
        engine_for(model(), parallel={"tp": 4})
    return str(caught.value)


def test_c61_what_does_not_divide_is_refused_with_the_degrees_that_do() -> None:
    uneven_llama = {"heads": 6, "width": 48, "kv_heads": 2, "vocabulary": 61}
    for text in run_ranks(4, uneven, lambda: llama(**uneven_llama)):
        assert "blocks.0.attention.q" in text and "6 heads of 8 do not divide over 4 ranks" in text
        assert "parallel.tp to 1 or 2 or 6." in text
    for text in run_ranks(4, uneven, lambda: gpt(heads=6, width=48, vocabulary=61)):
        assert "parallel.tp to 1 or 2 or 3 or 6." in text


def test_c61_what_can_be_padded_or_held_twice_works() -> None:
    def trained(tp: int, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
        engine = engine_for(llama(**options), parallel={"tp": tp})
        return [one.loss for one in steps(engine, 2)], engine.full_state_dict()

    for tp, options in (
        (2, {"heads": 6, "width": 48, "kv_heads": 2, "vocabulary": 67}),
        (4, {"heads": 4, "width": 32, "kv_heads": 2, "vocabulary": 65}),
    ):
        [expected] = run_ranks(1, plain, llama(**options), 2)
        for losses, weights in run_ranks(tp, lambda tp=tp, options=options: trained(tp, **options)):
            torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0)
            assert_close(weights, expected.weights)


def text_of(make: Callable[[], object]) -> str:
    try:
        make()
    except zero3d.UsageError as error:
        assert error.exit_code == 2
        return f"{error} {error.hint}"
    return "nothing was refused"


def refusals() -> dict[str, str]:
    def planned(model: nn.Module, sequence: bool = False, plan: dict[str, str] | None = None, **sections: Any) -> str:
        parallel = {"tp": 2, "sequence_parallel": sequence, "plan": plan or {}}
        return text_of(lambda: engine_for(model, parallel=parallel, **sections))

    def looked_at() -> None:
        engine = zero3d.Engine(gpt(), tiny.loss, "adamw", {"parallel": {"tp": 2}})
        engine.step(tiny.batches(1, SAMPLES)[0])

    def odd_length() -> None:
        engine = engine_for(gpt(), parallel={"tp": 2, "sequence_parallel": True})
        engine.step({key: value[:, :15].contiguous() for key, value in tiny.batches(1, SAMPLES)[0].items()})

    def unnamed() -> None:
        model: Any = talker()
        model.finish = nn.Sequential(nn.LayerNorm(32), nn.LayerNorm(32))
        plan = {**{key: style for key, style in PLAN.items() if key != "finish"}, "finish.1": "sequence"}
        parallel = {"tp": 2, "sequence_parallel": True, "plan": plan}
        engine = engine_for(model, call=call_talker, parallel=parallel, recompute={"mode": "block"})
        engine.step(tiny.batches(1, SAMPLES)[0])

    compiled = gpt()
    compiled.blocks[0].compile()
    without_end = {key: style for key, style in PLAN.items() if key != "finish"}
    return {
        "style": planned(gpt(), plan={"blocks.*.mlp.up": "colwize"}),
        "pattern": planned(gpt(), plan={"blocks.*.mlp.upp": "colwise"}),
        "pattern at tp 1": text_of(lambda: engine_for(gpt(), parallel={"plan": {"blocks.*.mlp.upp": "colwise"}})),
        "no linear": planned(gpt(), plan={"blocks.*.mlp_norm": "colwise"}),
        "no embedding": planned(gpt(tied=False), plan={"norm": "vocab"}),
        "tie": planned(gpt(), plan={"head": "rowwise_split_input"}),
        "no plan": planned(tiny.tiny()),
        "divide": planned(talker(), plan={**PLAN, "stack.*.mixer": "divide(mny)"}),
        "whole": planned(gpt(), rule="adamw", zero={"level": 2, "whole_parameters": ["*.up.weight"]}),
        "blocks": planned(nn.Sequential(nn.Linear(4, 4)), sequence=True, plan={"0": "colwise"}),
        "sequence without an end": planned(talker(), sequence=True, plan=without_end),
        "sequence that nothing gathers": planned(talker(), sequence=True, plan={**PLAN, "say": "replicate"}),
        "sequence in an unnamed module": text_of(unnamed),
        "compiled": planned(compiled),
        "length": planned(gpt(), sequence=True, data={"sequence_length": 15}),
        "length of a batch": text_of(odd_length),
        "logits": text_of(looked_at),
    }


EXPECTED = {
    "style": ["blocks.*.mlp.up", "Did you mean colwise?"],
    "pattern": ["blocks.*.mlp.upp", "blocks.0.mlp.up"],
    "pattern at tp 1": ["blocks.*.mlp.upp"],
    "no linear": ["blocks.0.mlp_norm", "LayerNorm", "replicate"],
    "no embedding": ["norm", "nn.Linear and nn.Embedding"],
    "tie": ["embedding.weight", "in two ways", '"vocab" for both'],
    "no plan": ["no plan says", "[parallel.plan]"],
    "divide": ["stack.0.mixer", "mny", "2 divides"],
    "whole": ["zero.whole_parameters", "blocks.0.mlp.up.weight", "parallel.tp = 1"],
    "blocks": ["no list of repeated blocks", "model.blocks"],
    "sequence without an end": ["becomes whole again", "sequence_end"],
    "sequence that nothing gathers": ["becomes whole again", "sequence_end"],
    "sequence in an unnamed module": ["finish.0 runs on a part", '"finish.0" = "sequence"'],
    "compiled": ["blocks.0", "torch.compile"],
    "length": ["data.sequence_length = 15", "14"],
    "length of a batch": ["sequence of 15", "multiple of 2"],
    "logits": ["zero3d.cross_entropy", "colwise_gather_output"],
}


def test_what_does_not_fit_is_refused_on_all_ranks_with_the_way_out() -> None:
    first, second = run_ranks(2, refusals)
    for what, fragments in EXPECTED.items():
        assert all(fragment in first[what] for fragment in fragments), (what, first[what])
    assert first == second


def other_data(rank: int, at: int) -> list[str]:
    """Rank `rank` draws its own data in step `at`."""
    engine = engine_for(gpt(), parallel={"tp": 2}, run={"timeout_seconds": 20})
    batches = tiny.batches(3, SAMPLES)
    texts = []
    for number, batch in enumerate(batches):
        mine = tiny.part(batch, engine.dp_index, engine.dp_size)
        if (engine.rank, number) == (rank, at):
            mine["tokens"] = mine["tokens"].roll(1, 0)
        try:
            engine.step(mine)
        except zero3d.Zero3dError as error:
            texts.append(f"{type(error).__name__} {error} {error.hint}")
            break
        texts.append("")
    return texts


@pytest.mark.parametrize(("ranks", "at"), [(2, 0), (2, 2), (4, 1)])
def test_ranks_that_share_a_replica_must_see_the_same_data(ranks: int, at: int) -> None:
    for texts in run_ranks(ranks, other_data, ranks - 1, at):
        assert texts[:-1] == [""] * at
        assert texts[-1].startswith("DataError") and "dp_index" in texts[-1], texts
        assert f"rank {ranks - 1} got other data than rank {ranks - 2}" in texts[-1]
