"""What ranks tell each other in words."""

import pytest
import torch
import torch.distributed as dist

from tests.world import run_ranks
from zero3d.comm.process_axis import ProcessAxis
from zero3d.comm.solo_axis import SoloAxis
from zero3d.comm.texts import everyones_text

pytestmark = pytest.mark.ranks

TEXTS = ["", "größer als\nalle anderen, und länger " * 40, "x \0"]
CPU = torch.device("cpu")


def told() -> tuple[list[str], list[str]]:
    axis = ProcessAxis(dist.group.WORLD, CPU)
    mixed = everyones_text(TEXTS[axis.index], axis, CPU, "words of a test")
    return mixed, everyones_text("", axis, CPU, "nothing")


def test_texts_of_any_length_come_whole_and_in_order() -> None:
    for mixed, nothing in run_ranks(len(TEXTS), told):
        assert mixed == TEXTS and nothing == [""] * len(TEXTS)


def test_one_rank_hears_itself() -> None:
    assert everyones_text(TEXTS[1], SoloAxis(), CPU, "words") == [TEXTS[1]]
