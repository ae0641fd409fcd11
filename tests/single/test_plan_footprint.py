"""What the planner says that a rank holds is what a rehearsal of the real step finds: model states to the byte, the
peak within 2 %. (All points: `python -m tests.planned`.)"""

import pytest

from tests.planned import KINDS, both, number_of_calls
from tests.rehearsed import LEVELS, Point

POINTS = [
    Point(model="gpt", settings=(LEVELS[3],), ranks=4),
    Point(model="gpt", settings=(LEVELS[2], "recompute.mode=block"), ranks=2),
    Point(model="gpt", settings=(LEVELS[3], "offload.optimizer=host", "offload.parameters=host"), ranks=2),
    Point(model="gpt", settings=("parallel.tp=2", "parallel.sequence_parallel=true", LEVELS[3]), ranks=4),
    Point(model="gpt", settings=("parallel.pp=2", LEVELS[3]), ranks=2, micro_batches=4, size=2),
    Point(model="gpt", settings=("parallel.pp=2", "parallel.schedule=zbh1"), ranks=2, micro_batches=6),
    *(
        Point(
            model="llama",
            settings=("parallel.pp=4", "parallel.schedule=zbh1", "precision.compute=bf16", f"recompute.mode={mode}"),
            ranks=4,
            micro_batches=6,
        )
        for mode in ("none", "block")
    ),
    Point(model="mlp", settings=(LEVELS[1],), ranks=2),
    Point(model="mlp", settings=(LEVELS[2], "offload.optimizer=host"), ranks=2),
]


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_c67_the_peak_is_the_rehearsals(point: Point) -> None:
    for pair in both(point):
        planned, rehearsed = pair.planned, pair.rehearsed
        assert {kind: planned.by_kind[kind] for kind in KINDS} == {kind: rehearsed.peak.by_kind[kind] for kind in KINDS}
        assert abs(pair.apart) < 0.02
        assert planned.host_bytes == rehearsed.host_bytes


@pytest.mark.parametrize("reduce", ["step", "micro-batch"])
@pytest.mark.parametrize("kept", [LEVELS[1:2], LEVELS[2:3], LEVELS[3:], (LEVELS[3], "zero.keep_gathered=step")])
def test_c55_the_plan_says_how_many_calls_each_choice_costs(kept: tuple[str, ...], reduce: str) -> None:
    """C55, pp 2 x dp 2: calls and bytes are the rehearsal's, which are those of a step (tests/rehearsed.py)."""
    settings = ("parallel.pp=2", *kept, f"zero.reduce={reduce}")
    pairs = both(Point(model="gpt", settings=settings, ranks=4, micro_batches=3, size=2))
    for pair in pairs:
        sent = {axis: one.num_bytes for axis, one in pair.sent.items()}
        assert sent == {axis: one.sent for axis, one in pair.rehearsed.traffic.items()}
        assert {axis: one.calls for axis, one in pair.sent.items()} == number_of_calls(pair.rehearsed)
    assert {axis for pair in pairs for axis in pair.sent} == {"dp", "pp"}
