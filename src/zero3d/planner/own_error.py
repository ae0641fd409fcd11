"""How far the planner was off where it could be compared: the last row of docs/planner.md's table, and memory. Pure."""

from typing import Final

RUNS: Final = 184
"""Published throughputs and times of A100s and H100s."""
MEDIAN: Final = 0.049
NINETIETH: Final = 0.109
"""Of ten predictions nine are as near as that."""
CALIBRATED_MEDIAN: Final = 0.116
"""Of layouts on a machine that was calibrated."""
CALIBRATED_LARGEST: Final = 0.27
MEMORY: Final = 0.03
"""The peak of a rank, against a rehearsal of the real step."""


def told(*, preset: bool) -> str:
    """preset: of a device with makers' figures; else of one that was measured."""
    times = (
        f"times of {RUNS} published runs were off by {MEDIAN:.1%} in the median and {NINETIETH:.1%} in nine of ten"
        if preset
        else f"times on a calibrated machine were off by {CALIBRATED_MEDIAN:.1%} in the median and "
        f"{CALIBRATED_LARGEST:.0%} at most"
    )
    return (
        f"Its own error: {times} (docs/planner.md); peaks of memory are within {MEMORY:.0%} of a rehearsal "
        "(zero3d dryrun)."
    )
