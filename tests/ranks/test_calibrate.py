"""Measuring on real ranks, with tiny sizes: which numbers there are, not how large they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import zero3d
from tests.world import run_ranks
from zero3d.calibrate import links
from zero3d.calibrate.measure import measure, this_machine
from zero3d.calibrate.measured import Effort, Measured
from zero3d.calibrate.profile import cluster_of
from zero3d.planner import hardware

TINY = Effort(seconds=0.05, dims=(8, 16), skinny=(2, 32), messages=(64, 4096), elements=1 << 12, held=1 << 13)


def _measured(per_node: int) -> tuple[Measured, list[tuple[str, float]]]:
    told: list[tuple[str, float]] = []
    machine = this_machine(per_node=per_node, cores=2, host_memory=1e9)
    return measure(TINY, machine, lambda what, part: told.append((what, part))), told


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_every_rank_finds_the_same(ranks: int, per_node: int) -> None:
    """Numbers are those of the slowest rank, so that all ranks agree on them to the bit."""
    results = run_ranks(ranks, _measured, per_node)
    measured, told = results[0]
    assert all(one == measured for one, _ in results)
    sizes = {(8, 8, 8), (16, 16, 16), (2, 16, 16)}
    assert {(one.m, one.n, one.k) for one in measured.products} == sizes, "32 rows are more than the largest dim"
    assert {one.dtype for one in measured.products} == {"fp32", "bf16", "fp16"}
    assert measured.attention.keys() == measured.moving.keys() == {"fp32", "bf16", "fp16"}
    numbers = (measured.stream, measured.launch, measured.update, measured.copy)
    assert all(number > 0 for number in (*numbers, *measured.attention.values(), *measured.moving.values()))
    assert measured.skew >= 0 if ranks > 1 else measured.skew == 0
    assert all(one.seconds > 0 for one in measured.messages)
    parts = [part for _, part in told]
    assert parts == sorted(parts) and parts[0] == 0 and parts[-1] < 1
    cluster = cluster_of(measured)
    assert cluster.per_node == per_node and cluster == hardware.Cluster.from_json(cluster.to_json())


def test_groups_of_each_size_within_a_node_and_across() -> None:
    measured, _ = run_ranks(4, _measured, 2)[0]
    found = {(one.verb, one.ranks, one.across) for one in measured.messages}
    pair = ("send", "all-gather", "reduce-scatter")
    assert found == {(verb, 2, across) for verb in pair for across in (False, True)}
    measured, _ = run_ranks(4, _measured, 4)[0]
    found = {(one.verb, one.ranks, one.across) for one in measured.messages}
    assert found == {(verb, 2, False) for verb in pair} | {(verb, 4, False) for verb in pair[1:]}
    gathered = [one.sent for one in measured.messages if (one.verb, one.ranks) == ("all-gather", 4)]
    assert gathered == [48, 3072], "three quarters of the buffer leave a rank"


def test_sizes_of_groups() -> None:
    assert [links.group_sizes(ranks) for ranks in (1, 2, 3, 6, 8)] == [[], [2], [3], [2, 6], [2, 4, 8]]


def test_the_command(tmp_path: Path) -> None:
    """One run of the sizes that few seconds leave."""
    done = zero3d(tmp_path, "calibrate", "-n", "2", "--seconds", "0.1", "--out", "mine.json", "--json")
    assert done.returncode == 0, done.stderr
    event: dict[str, Any] = json.loads(done.stdout)
    assert (event["event"], event["profile"], event["curves"]) == ("done", "mine.json", "mine.curves.json")
    assert "measuring" in done.stderr
    cluster = hardware.find(str(tmp_path / "mine.json"))
    assert cluster.model_dump(mode="json") == event["cluster"] and cluster.per_node == 2
    assert json.loads((tmp_path / "mine.curves.json").read_text()) == event["measured"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mine.curves.json", "mine.json"]


@pytest.mark.parametrize(("out", "way_out"), [("x.txt", "x.json"), ("none/x.json", "a folder that is there")])
def test_a_profile_that_cannot_be_written_is_refused_first(tmp_path: Path, out: str, way_out: str) -> None:
    done = zero3d(tmp_path, "calibrate", "--out", out, "--json")
    assert done.returncode == 2 and way_out in done.stderr and "starting" not in done.stderr
    assert json.loads(done.stdout)["code"] == 2


def test_more_ranks_than_there_is_memory_for(tmp_path: Path) -> None:
    done = zero3d(tmp_path, "calibrate", "-n", "1000000", "--json")
    assert done.returncode == 2 and "start at most" in json.loads(done.stdout)["hint"].lower()
    assert not list(tmp_path.iterdir())
