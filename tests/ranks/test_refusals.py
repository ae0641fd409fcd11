"""What cannot be honoured is refused before the first step, with the way out."""

from typing import Any

import pytest
import torch
from torch import nn

import zero3d
from tests import tiny
from tests.world import run_ranks

pytestmark = pytest.mark.ranks


def text_of(make: Any) -> str:
    try:
        make()
    except zero3d.UsageError as error:
        assert error.exit_code == 2
        return str(error)
    return ""


def refusals() -> dict[str, str]:
    def engine(module: Any = None, rule: Any = "adamw", loss: Any = tiny.loss, **sections: Any) -> zero3d.Engine:
        return zero3d.Engine(module if module is not None else tiny.tiny(), loss, rule, sections)

    class Coupled(torch.optim.SGD):
        """Clips by itself, over all that it was given."""

        def step(self, closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e-3)
            return super().step(closure)

    def without_gradients() -> None:
        one = engine()
        with one.gathered():
            one.step(batch)

    batch = tiny.batches(1, 4)[0]
    ragged = {"tokens": batch["tokens"], "targets": batch["targets"][:3]}
    return {
        "level": text_of(lambda: engine(zero={"level": 4})),
        "key": text_of(lambda: engine(zero={"levle": 1})),
        "blocks": text_of(lambda: engine(model={"blocks": "layers"})),
        "keep_gathered": text_of(lambda: engine(zero={"level": 3, "keep_gathered": ["blocks.1.*", "block.2.*"]})),
        "keep_gathered at level 0": text_of(lambda: engine(zero={"level": 0, "keep_gathered": ["block.2.*"]})),
        "model": text_of(lambda: engine({"layers": 3})),
        "recompute": text_of(lambda: engine(nn.Linear(4, 4), recompute={"mode": "block"})),
        "optimizer": text_of(lambda: engine(rule="adamm")),
        "no optimizer": text_of(lambda: engine(rule=lambda parameters: 3)),
        "coupled": text_of(lambda: engine(rule=lambda parameters: Coupled(parameters, lr=0.1))),
        "gathered": text_of(without_gradients),
        "float64": text_of(lambda: engine(tiny.tiny().double())),
        "ranks": text_of(lambda: engine(parallel={"dp": 3})),
        "compute": text_of(
            lambda: engine(precision={"compute": "bf16", "gradients": "compute"}, parallel={"micro_batch": 2}).step(
                batch
            )
        ),
        "ragged": text_of(lambda: engine().step(ragged)),
        "keys": text_of(lambda: engine().step({"ids": batch["tokens"]})),
        "loss": text_of(lambda: engine(loss=lambda out, batch: out).step(batch)),
        "count": text_of(lambda: engine(loss=lambda out, batch: (out.sum(), 2.5)).step(batch)),
        "no count": text_of(lambda: engine(loss=lambda out, batch: (out.sum(), torch.tensor(torch.inf))).step(batch)),
        "gradient": text_of(lambda: engine().grad_of("norm.weight")),
        "name": text_of(lambda: engine().grad_of("norm.wait")),
    }


EXPECTED = {
    "level": "outside 0 to 3",
    "key": "level",
    "blocks": 'found at "blocks"',
    "keep_gathered": "blocks.2.",
    "keep_gathered at level 0": "blocks.2.",
    "model": "nn.Module",
    "recompute": "no list of repeated blocks",
    "optimizer": "adamw",
    "no optimizer": "torch.optim.Optimizer",
    "coupled": "does not treat each element by itself",
    "gathered": "switched off",
    "float64": 'precision.compute = "fp32"',
    "ranks": "3",
    "compute": "compute-lossy",
    "ragged": "3, 4",
    "keys": "ids",
    "loss": "0-dim",
    "count": "counted 2.5 targets",
    "no count": "counted inf targets",
    "gradient": "engine.step",
    "name": "norm.wait",
}


def test_each_refusal_says_what_and_how() -> None:
    [found] = run_ranks(1, refusals)
    for what, fragment in EXPECTED.items():
        assert fragment in found[what], (what, found[what])


def touches_level_3_outside() -> str:
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, {"zero": {"level": 3}})
    try:
        torch.save(engine.model.state_dict(), "/dev/null")
    except zero3d.ReleasedParameterError as error:
        return str(error)
    return ""


def test_c8_no_empty_tensor_is_ever_saved() -> None:
    for text in run_ranks(2, touches_level_3_outside):
        assert "engine.full_state_dict()" in text


def diverges(level: int) -> str:
    """Rank 1 skips a block in step 2."""

    class Skipping(tiny.Tiny):
        skip = False

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) + self.places[: tokens.shape[1]]
            for number, block in enumerate(self.blocks):
                if not (self.skip and number == 2):
                    x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    model = Skipping()
    engine = zero3d.Engine(model, tiny.loss, tiny.adamw, {"zero": {"level": level}})
    batches = [tiny.part(batch, engine.rank, 2) for batch in tiny.batches(2, 4)]
    engine.step(batches[0])
    model.skip = engine.rank == 1
    try:
        engine.step(batches[1])
    except zero3d.Zero3dError as error:
        return f"{error.exit_code} {error}"
    return "went on"


@pytest.mark.parametrize("level", range(4))
def test_ranks_that_diverge_do_not_hang(level: int) -> None:
    texts = run_ranks(2, diverges, level, timeout=30)
    if level < 3:
        assert texts == ["went on"] * 2  # only gathers need matching; a skipped block's gradient is zero there
    else:
        assert all(text.startswith("4 ") and "blocks.2" in text for text in texts), texts
