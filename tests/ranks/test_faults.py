"""A sample of `python -m tests.faults`: a machine whose link is cut in a save, a rank that leaves blocks out.

Close (1e-5): the losses of every step, after resuming, and those of a run that nobody disturbed. Whole to the checksum:
every checkpoint that is left.
"""

from pathlib import Path

import pytest

from tests import faults, hosts

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ranks,
    pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "none"),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return faults.plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(("kind", "moment", "seed"), [("cut", "save", 1), ("skip", "step", 1)])
def test_a_fault_is_one_error_on_each_machine_and_the_run_is_resumed(
    kind: str, moment: str, seed: int, expected: dict[int, float], tmp_path: Path
) -> None:
    outcome = faults.disturb(tmp_path, kind, seed, expected)
    assert outcome.good and outcome.ended, outcome
    assert outcome.drawn.moment == moment
