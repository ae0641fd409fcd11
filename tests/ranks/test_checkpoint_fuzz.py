"""Checkpoints with random damage. More of it by hand: see `tests.checkpoint_fuzz`."""

from pathlib import Path

import pytest

from tests.checkpoint_fuzz import fuzz

pytestmark = pytest.mark.ranks


def test_what_is_damaged_is_refused_or_loaded_right(tmp_path: Path) -> None:
    """And nothing outside of its folder is opened. What is refused has changed nothing."""
    refused, loaded = fuzz(tmp_path, 100)
    assert refused > loaded > 0
