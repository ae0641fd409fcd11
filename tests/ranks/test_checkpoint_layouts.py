"""Saved in one layout and level, resumed in another: the next steps are those of a run that was not interrupted.

Bit-equal: the same layout, at whatever levels. Close (1e-5): another layout, whose sums are in another order; both
beside a plain loop in one process.
"""

from pathlib import Path

import pytest

from tests.checkpoint_runs import LAYOUTS, LEVELS, Run, check

pytestmark = pytest.mark.ranks


def test_every_layout_resumes_in_every_other(tmp_path: Path) -> None:
    """All pairs of layouts; levels go round, so that each level is resumed at each other one."""
    pairs = [
        (Run(source, LEVELS[(one + 3) % 4]), Run(target, LEVELS[(one + 2 * other) % 4]))
        for one, source in enumerate(LAYOUTS)
        for other, target in enumerate(LAYOUTS)
    ]
    check(tmp_path, pairs)
