"""A run that is killed while it saves or resumes goes on from its newest whole checkpoint, and ends bit-equal to one
that was never killed."""

from pathlib import Path

import pytest

from tests.checkpoint_kills import kill

pytestmark = pytest.mark.ranks


def test_runs_that_are_killed_while_saving_end_as_others(tmp_path: Path) -> None:
    kill(tmp_path, 4, seed=1)
