"""What the planner says that a rank holds is what a rehearsal of the real step finds: model states to the byte, the
peak within 2 %. (All points: `python -m tests.planned`.)"""

import pytest

from tests.planned import KINDS, apart, both
from tests.rehearsed import LEVELS, Point

POINTS = [
    Point(model="gpt", settings=(LEVELS[3],), ranks=4),
    Point(model="gpt", settings=(LEVELS[2], "recompute.mode=block"), ranks=2),
    Point(model="gpt", settings=(LEVELS[3], "offload.optimizer=host", "offload.parameters=host"), ranks=2),
    Point(model="gpt", settings=("parallel.tp=2", "parallel.sequence_parallel=true", LEVELS[3]), ranks=4),
    Point(model="gpt", settings=("parallel.pp=2", LEVELS[3]), ranks=2, micro_batches=4, size=2),
    Point(model="gpt", settings=("parallel.pp=2", "parallel.schedule=zbh1"), ranks=2, micro_batches=6),
    Point(model="mlp", settings=(LEVELS[1],), ranks=2),
]


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_the_peak_is_the_rehearsals(point: Point) -> None:
    for planned, rehearsed in both(point):
        assert {kind: planned.by_kind[kind] for kind in KINDS} == {kind: rehearsed.peak.by_kind[kind] for kind in KINDS}
        assert abs(apart(planned, rehearsed)) < 0.02
        assert planned.host_bytes == rehearsed.host_bytes
