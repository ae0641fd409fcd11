"""Published memory and traffic: each row of the table is computed by the planner and compared as its `how` says.

round                   equal to the digits printed, halves rounded up
round or truncate       or cut off after the digits printed
one digit               equal to one significant digit
multiple of truncated   tp times the value for tp = 1, cut off after one decimal (table 2 of ZeRO)
chart                   within 3 %: read from a bar
near                    within 20 %: the source says "about"
at most                 a measured maximum: no more than the states alone leave room for
formula                 the text is the formula that the planner computes
inconsistent            the source contradicts itself: the note says how, and the value differs
measured                no formula gives it: the note says why
"""

import csv
import re
from collections import Counter
from collections.abc import Callable
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero3d.config import Offload
from zero3d.pipeline.schedules.registry import SCHEDULES
from zero3d.pipeline.simulate import peak_live
from zero3d.planner import activations, estimators, infinity, memory, traffic
from zero3d.planner.activations import Shape
from zero3d.planner.memory import Widths

TABLE = Path(__file__).parents[1] / "golden" / "published_memory.csv"
ROWS = [*csv.DictReader(TABLE.open(encoding="utf-8"))]
COUNTED = {
    "round": 95,
    "round or truncate": 39,
    "one digit": 4,
    "multiple of truncated": 17,
    "chart": 8,
    "near": 4,
    "at most": 32,
    "formula": 7,
    "inconsistent": 3,
    "measured": 20,
}
NEAR, CHART = 0.20, 0.03
SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary", "micro_batch")
FIXED = {"layers": 1, "hidden": 1}
NUMBER = r"\d+(\.\d+)?(e\+\d+)?"
Inputs = dict[str, Any]


def shape(given: Inputs) -> Shape:
    return Shape(**(FIXED | {name: given[name] for name in SIZES if name in given}))


def cut(given: Inputs) -> Inputs:
    return {name: given[name] for name in ("tp", "sequence_parallel", "recompute") if name in given}


def states(given: Inputs, reduce: Any = None) -> memory.ModelStates:
    home = Offload(optimizer="host") if given.get("offload") == "optimizer" else Offload()
    return memory.states(
        given["params"],
        given["level"],
        dp=given["dp"],
        widths=Widths(gradients=given.get("gradients", 2)),
        reduce=reduce,
        offload=home,
    )


def most(given: Inputs) -> float:
    home = Offload(optimizer="host") if given.get("offload") == "optimizer" else Offload()
    return memory.most_parameters(given["device_bytes"], given["level"], dp=given["dp"], tp=given["tp"], offload=home)


def estimate(given: Inputs) -> estimators.Estimate:
    return estimators.estimate(
        given["params"],
        given["level"],
        devices=given["devices"],
        per_node=given["per_node"],
        largest=given["largest"],
        offload=given["offload"],
        built_sharded=bool(given["built_sharded"]),
    )


def total(given: Inputs, *, with_ends: bool = False) -> float:
    """Model states and activations of the first stage; figure 1 leaves out what is outside the blocks."""
    schedule = {name: given[name] for name in ("pp", "schedule", "chunks")} | {"with_ends": with_ends}
    one = states({**given, "params": given["params"] / (given["tp"] * given["pp"]), "level": 0, "dp": 1})
    return one.total + activations.first_stage(shape(given), **cut(given), **schedule)


def needed(given: Inputs, intensity: Callable[[Shape], float]) -> float:
    return infinity.bandwidth(intensity(shape(given)), given["efficiency"], given["peak"])


def relative(given: Inputs) -> float:
    """Percent of what a block keeps with tensor parallelism alone."""
    one = shape(given)
    return 100 * activations.block(one, **cut(given)) / activations.block(one, tp=given["tp"])


FORMULAS: dict[str, Callable[[Inputs], float]] = {
    "states": lambda given: states(given).total / 1e9,
    "weights": lambda given: states(given).weights / 1e9,
    "gradients": lambda given: states(given).gradients / 1e9,
    "states GiB": lambda given: (
        states({**given, "params": given["params"] / (given["tp"] * given["pp"]), "level": 0, "dp": 1}).total / 2**30
    ),
    "device bytes a parameter": lambda given: states({**given, "params": 1}, given.get("reduce")).device,
    "most parameters": lambda given: most(given) / 1e9,
    "parameters": lambda given: shape(given).parameters / 1e9,
    "dp elements": lambda given: traffic.dp_elements(1, given["level"], dp=inf),
    "tp elements": lambda given: traffic.tp_elements(Shape(**FIXED), tp=inf, recompute=given["recompute"]),
    "parts elements": lambda given: (
        traffic.tp_elements(Shape(**FIXED), tp=inf, recompute="full", kept_in_parts=True)
        - traffic.tp_elements(Shape(**FIXED), tp=inf, recompute="full")
    ),
    "host bytes": lambda given: traffic.host_bytes(1).total,
    "l2l bytes": lambda given: traffic.L2L * traffic.host_bytes(1).total,
    "rough": lambda given: activations.rough(shape(given)) / 1e9,
    "checkpoints": lambda given: (
        activations.checkpoints(shape(given), parts=given.get("parts", 1), width=given.get("width", 2)) / 1e9
    ),
    "checkpoints and one block": lambda given: (
        (activations.checkpoints(shape(given)) + activations.again(shape(given), recompute="full")) / 1e9
    ),
    "checkpoints TiB": lambda given: activations.checkpoints(shape(given)) / 2**40,
    "infinity states": lambda given: infinity.states(shape(given)) / 2**40,
    "infinity activations": lambda given: infinity.activations(shape(given)) / 2**40,
    "infinity working states": lambda given: infinity.working_states(shape(given)) / 2**30,
    "infinity working activations": lambda given: infinity.working_activations(shape(given)) / 2**30,
    "bandwidth of weights": lambda given: needed(given, infinity.intensity_of_weights) / 1e9,
    "bandwidth of optimizer": lambda given: needed(given, infinity.intensity_of_optimizer) / 1e12,
    "estimate device": lambda given: estimate(given).device / 2**30,
    "estimate device MiB": lambda given: estimate(given).device / 2**20,
    "estimate host": lambda given: estimate(given).host / 2**30,
    "total GiB": lambda given: total(given) / 2**30,
    "percent of tp": relative,
    "percent saved": lambda given: (
        100 - 100 * activations.block(shape(given), recompute="selective") / activations.block(shape(given))
    ),
    "kept outputs": lambda given: activations.kept_outputs(shape(given), pp=given["pp"]) / 2**30,
}
TEXTS: dict[str, Callable[..., float]] = {
    "sbh(34+5as/h)": lambda s, b, h, a, t, n: s * b * h * (34 + 5 * a * s / h),
    "sbh(34/t+5as/(ht))": lambda s, b, h, a, t, n: s * b * h * (34 / t + 5 * a * s / (h * t)),
    "2sbh": lambda s, b, h, a, t, n: 2 * s * b * h,
    "s b h L (10 + 24/t + 5as/(ht))": lambda s, b, h, a, t, n: s * b * h * n * (10 + 24 / t + 5 * a * s / (h * t)),
    "s b h L (10 + 24/t)": lambda s, b, h, a, t, n: s * b * h * n * (10 + 24 / t),
    "2 s b h L": lambda s, b, h, a, t, n: 2 * s * b * h * n,
    "8 b s h (t-1)/t": lambda s, b, h, a, t, n: 8 * b * s * h * (t - 1) / t,
}


def inputs_of(row: dict[str, str]) -> Inputs:
    pairs = (word.split("=") for word in row["inputs"].split())
    return {name: _number(value) if re.fullmatch(NUMBER, value) else value for name, value in pairs}


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def rounded(value: float, printed: str, mode: str = ROUND_HALF_UP, slack: str = "1e-12") -> Decimal:
    """To the digits of `printed`. A trailing .0 is a digit too; what floats add below `slack` does not count."""
    exact = Decimal(value).quantize(Decimal(slack))
    return exact.quantize(Decimal(printed), mode)


def agrees(how: str, value: float, printed: str, given: Inputs) -> bool:
    told = float(printed)
    if how == "round":
        return rounded(value, printed) == Decimal(printed)
    if how == "round or truncate":
        return Decimal(printed) in (rounded(value, printed), rounded(value, printed, ROUND_DOWN))
    if how == "one digit":
        return float(f"{value:.0e}") == told
    if how == "multiple of truncated":
        one = rounded(value / given["tp"], "0.1", ROUND_DOWN)
        return one * given["tp"] == Decimal(printed)
    if how == "at most":
        return told <= value
    return abs(value - told) <= {"near": NEAR, "chart": CHART}[how] * told


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_row(row: dict[str, str]) -> None:
    given, how = inputs_of(row), row["how"]
    if how == "measured":
        assert row["note"] and not row["formula"]
    elif how == "formula":
        assert row["value"] in TEXTS
    elif how == "inconsistent":
        assert row["note"] and FORMULAS[row["formula"]](given) > 0
    else:
        value = FORMULAS[row["formula"]](given)
        assert agrees(how, value, row["value"], given), f"{value} is not {row['value']} ({how})"


def test_no_row_is_dropped() -> None:
    """How many rows of each kind there are: dropping one, or saying it is less exact, changes this."""
    assert Counter(row["how"] for row in ROWS) == COUNTED
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    assert all(row["source"] and row["value"] and row["unit"] for row in ROWS)


def test_inconsistent_rows_are_what_their_notes_say() -> None:
    values = {
        row["id"]: (float(row["value"]), FORMULAS[row["formula"]](inputs_of(row)))
        for row in ROWS
        if row["how"] == "inconsistent"
    }
    assert {name: round(ours, 2) for name, (_, ours) in values.items()} == {
        "zero-100b-act-ckpt-mp16": 33.55,
        "zoff-t1-3": 2,
        "zinf-f2a-0.1T-mswm": 1.56,
    }
    hundred = Shape(layers=125, hidden=8192, sequence=1024, micro_batch=32)
    assert round(activations.checkpoints(hundred) / 1e9) == 67


@given(
    s=st.integers(1, 4096),
    b=st.integers(1, 8),
    a=st.integers(1, 64),
    head=st.sampled_from([32, 64, 128]),
    t=st.sampled_from([1, 2, 8]),
    n=st.integers(1, 100),
)
def test_formulas_that_are_printed_as_text(s: int, b: int, a: int, head: int, t: int, n: int) -> None:
    one = Shape(layers=n, hidden=a * head, heads=a, sequence=s, micro_batch=b)
    for row in (row for row in ROWS if row["how"] == "formula"):
        given = inputs_of(row)
        tp = t if given["tp"] == "t" else 1
        expected = TEXTS[row["value"]](s=s, b=b, h=a * head, a=a, t=tp, n=n)
        if row["formula"] == "formula of tp":
            found = traffic.tp_elements(one, tp=tp)
        else:
            more = {"sequence_parallel": bool(given["sequence_parallel"]), "recompute": given["recompute"]}
            found = activations.block(one, tp=tp, **more) * (n if "layers" in given else 1)
        assert found == pytest.approx(expected, rel=1e-12), row["id"]


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 3), (2, 1), (4, 3), (4, 8)])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_live_blocks_are_those_of_the_simulated_schedule(
    schedule: Any, chunks: int, pp: int, micro_batches: int
) -> None:
    """Two blocks a stage; the schedules are those that ranks run."""
    if schedule == "interleaved" and (micro_batches % pp or pp == 1):
        micro_batches, pp = 8, 4
    actions = SCHEDULES[schedule].actions(pp * chunks, pp, micro_batches)
    layers = 2 * pp * chunks
    found = activations.live_blocks(layers, pp=pp, schedule=schedule, chunks=chunks, micro_batches=micro_batches)
    assert found == 2 * peak_live(actions)[0]


def test_gpipe_wants_a_number_of_micro_batches() -> None:
    with pytest.raises(ValueError, match="how many"):
        activations.live_blocks(8, pp=2, schedule="gpipe")


def test_recompute_keeps_less_and_needs_one_block_again() -> None:
    one = Shape(layers=4, hidden=1024, heads=16, sequence=512, micro_batch=2)
    for parallel in ({"tp": 1}, {"tp": 4}, {"tp": 4, "sequence_parallel": True}):
        kept = [activations.block(one, recompute=mode, **parallel) for mode in ("none", "selective", "full")]
        assert kept == sorted(kept, reverse=True)
        again = [activations.again(one, recompute=mode, **parallel) for mode in ("none", "selective", "full")]
        assert [a + k for a, k in zip(again, kept, strict=True)] == [kept[0]] * 3
    flash = activations.block(one, keeps_scores=False)
    assert flash == activations.block(one, recompute="selective")


def test_totals_with_embeddings_and_logits_are_within_3_percent_of_the_figure_too() -> None:
    rows = [row for row in ROWS if row["formula"] == "total GiB"]
    for row in rows:
        whole, told = total(inputs_of(row), with_ends=True) / 2**30, float(row["value"])
        assert told * (1 - CHART) < whole < told * (1 + CHART), row["id"]
    assert len(rows) == 4


def test_ends_are_the_papers() -> None:
    """Section 4.3: s b h l/t (34 + ...) times p/l + 4/l (1 + V/h) where there is one stage."""
    one = Shape(layers=12, hidden=768, heads=12, sequence=1024, micro_batch=4, vocabulary=50304)
    expected = one.elements / 8 * (1 + 4 * (1 + 50304 / 768))
    assert activations.ends(one, tp=8, sequence_parallel=True) == pytest.approx(expected)
    assert activations.ends(one, tp=8, sequence_parallel=True, pp=4) == one.elements / 8 * 4


def test_the_estimators_know_levels_2_and_3_alone() -> None:
    for level, offload in ((1, "none"), (2, "parameters")):
        with pytest.raises(ValueError, match="the estimators know"):
            estimators.estimate(1e9, level, devices=8, per_node=8, offload=offload)  # type: ignore[arg-type]
    two = [estimators.estimate(1e9, 3, devices=count, per_node=8, largest=1e6) for count in (8, 16)]
    assert two[1].device < two[0].device and two[0].host == two[1].host


def test_traffic_of_several_micro_batches_and_to_the_host() -> None:
    """README: level 2 sends (M+1) Psi (N-1)/N, level 3 3 M; gradients once a step make level 3 send 1 + 2 M."""
    assert traffic.dp_elements(1000, 2, dp=4, micro_batches=3) == 4 * 750
    assert traffic.dp_elements(1000, 3, dp=4, micro_batches=3) == 9 * 750
    assert traffic.dp_elements(1000, 3, dp=4, micro_batches=3, reduce="step") == 7 * 750
    assert traffic.dp_elements(1000, 0, dp=1) == 0
    host = traffic.host_bytes(1000, dp=4, offload="parameters")
    assert (host.down, host.up) == (500, 1000)
    assert traffic.pp_elements(Shape(layers=1, hidden=8, sequence=4, micro_batch=2)) == 128


def test_efficiency_and_the_bandwidth_for_it_are_inverse() -> None:
    speed = infinity.bandwidth(512, 0.9, 70e12)
    assert infinity.efficiency(512, speed, 70e12) == pytest.approx(0.9)
    assert infinity.intensity_of_checkpoints(Shape(layers=1, hidden=1000), every=2) == 48000
