"""Ranks on several machines: test hosts whose cards send 1 Gbit/s.

Close (1e-5 in fp32): the plain loop in one process. Within 5 %: what each host's card has sent, headers and all, beside
the formulas 2 Psi (N-1)/N and 3 Psi (N-1)/N elements a step. Nobody says which interface to use.
"""

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zero3d
from tests import hosts, reference, tiny
from zero3d.alike import refuse_own_folders
from zero3d.comm import machines
from zero3d.errors import UsageError, Zero3dError
from zero3d.layout import Layout
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.losses import next_token_loss as plain_loss
from zero3d.tensor.loss import next_token_loss

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ranks,
    pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "none"),
]

STEPS, SAMPLES = 3, 8
CUT_TIMEOUT = 4
"""Seconds."""
SHAPE: dict[str, Any] = {"vocabulary": 64, "sequence_length": tiny.LENGTH, "width": 32, "heads": 4}


def gpt(layers: int = 4, **other: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SHAPE, "layers": layers, **other}))


def expected() -> list[float]:
    steps = [[batch] for batch in tiny.batches(STEPS, SAMPLES)]
    call = lambda model, batch: model(batch["tokens"])  # noqa: E731
    return reference.train(gpt(), plain_loss, tiny.adamw, steps, call=call).losses


def losses(layouts: list[dict[str, int]], levels: list[int]) -> list[tuple[list[float], str]]:
    """(the losses of each step, what an engine has to say) of each layout at each level."""
    found = []
    for layout in layouts:
        for level in levels:
            options = {"parallel": {**layout, "micro_batch": 1}, "zero": {"level": level}}
            engine = zero3d.Engine(gpt(), next_token_loss, tiny.adamw, options)
            batches = (tiny.part(batch, engine.dp_index, engine.dp_size) for batch in tiny.batches(STEPS, SAMPLES))
            found.append(([engine.step(batch).loss for batch in batches], engine.notice))
    return found


@pytest.mark.parametrize("number", [2, 4])
def test_every_layout_trains_over_hosts_as_in_one_process(number: int) -> None:
    """dp, tp and pp over all hosts, at levels 1 and 3. A tp group of several machines is told, and no other."""
    layouts = [{"dp": number}, {"tp": number}, {"pp": number}]
    layouts += [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}] if number == 4 else []
    with hosts.hosts(number) as names:
        everyone = hosts.run_on_hosts(names, losses, layouts, [1, 3], timeout=100)
    plain = expected()
    for told in everyone:
        for place, (found, notice) in enumerate(told):
            assert found == pytest.approx(plain, rel=1e-5), layouts[place // 2]
            assert ("several machines (host0, host1" in notice) is ("tp" in layouts[place // 2]), notice
            assert "--nproc-per-node" in notice or "tp" not in layouts[place // 2]


def test_tp_ranks_that_share_a_machine_are_no_note() -> None:
    with hosts.hosts(2) as names:
        everyone = hosts.run_on_hosts(names, losses, [{"dp": 2, "tp": 2}], [1], ranks_each=2)
    assert all(notice == "" for told in everyone for _, notice in told)


def sent(level: int, steps: int) -> tuple[int, int]:
    """(bytes a step that this host's card sent, parameters)."""
    model = gpt(width=256, tied=False)
    engine = zero3d.Engine(model, next_token_loss, tiny.adamw, {"zero": {"level": level}})
    batch = tiny.part(tiny.batches(1, engine.dp_size)[0], engine.rank, engine.dp_size)
    engine.step(batch)
    engine.evaluate(batch)
    torch.distributed.barrier()
    before = hosts.sent_bytes()
    torch.distributed.barrier()
    for _ in range(steps):
        engine.step(batch)
    engine.evaluate(batch)  # Weights that are still being published arrive; at level 3 one more gather.
    torch.distributed.barrier()
    return hosts.sent_bytes() - before, sum(info.numel for info in engine.parameters)


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("level", [1, 3])
def test_what_cards_send_is_the_formula(number: int, level: int) -> None:
    steps = 2
    gathers = 3 * steps + 1 if level == 3 else 2 * steps
    with hosts.hosts(number) as names:
        for card, parameters in hosts.run_on_hosts(names, sent, level, steps):
            assert card == pytest.approx(gathers * parameters * 4 * (number - 1) / number, rel=0.05)


def refused(environment: dict[str, str]) -> str:
    os.environ.update(environment)
    try:
        zero3d.Engine(gpt(), next_token_loss, tiny.adamw)
    except UsageError as error:
        return str(error)
    return ""


def test_an_interface_that_is_not_there_is_refused() -> None:
    with hosts.hosts(2) as names:
        for text in hosts.run_on_hosts(names, refused, {"GLOO_SOCKET_IFNAME": "ib7"}):
            assert "'ib7'" in text and "eth0" in text and "\nIt has lo, eth0." in text


def listening(master: str) -> tuple[dict[str, str], str | None]:
    told = {"MASTER_ADDR": master, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    return machines.interfaces(told), machines.interface_to(hosts.address(1))


def test_the_interface_is_the_one_that_reaches_the_first_machine() -> None:
    """Also where the first machine calls itself localhost, as some launchers have it."""
    both = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    with hosts.hosts(2) as names:
        for master in (hosts.address(0), "localhost"):
            assert hosts.run_on_hosts(names, listening, master) == [(both, "eth0")] * 2


def test_which_tp_groups_are_on_several_machines() -> None:
    layout = Layout(dp=2, tp=4)
    assert machines.placement(layout, ["a"] * 4 + ["b"] * 4) == ""
    text = machines.placement(layout, ["a"] * 3 + ["b"] * 3 + ["c"] * 2)
    assert "ranks 0, 1, 2, 3 are on several machines (a, b), and 1 more such group:" in text


def own_folder(folder: Path) -> str:
    """Each rank has a folder of its own at the same path: a mount that no other sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    engine = zero3d.Engine(gpt(), next_token_loss, tiny.adamw)
    refuse_own_folders(engine, folder / "shared", "run.out")
    if engine.rank == 1:
        assert not libc.unshare(0x00020000)
        assert not libc.mount(b"none", b"/", None, 0x4000 | (1 << 18), None)  # private, and all below it
        assert not libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, None), ctypes.get_errno()
    try:
        refuse_own_folders(engine, folder / "out", "run.out")
    except UsageError as error:
        return str(error)
    return ""


def test_a_folder_that_machines_do_not_share_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with hosts.hosts(2) as names:
        told = hosts.run_on_hosts(names, own_folder, tmp_path)
    assert told[0] == told[1] and "rank 1 on host1 cannot write there, or does not see" in told[0]
    assert "checkpoint.every = 0" in told[0]
    assert not list(tmp_path.rglob(".seen-*"))


def steps_until_cut(level: int) -> tuple[str, str, float]:
    """(kind, text, seconds since the link went down) of the error; host 1 cuts itself off after two steps."""
    engine = zero3d.Engine(
        gpt(), next_token_loss, tiny.adamw, {"zero": {"level": level}, "run": {"timeout_seconds": CUT_TIMEOUT}}
    )
    batch = tiny.part(tiny.batches(1, 2)[0], engine.rank, 2)
    for _ in range(2):
        engine.step(batch)
    if engine.rank == 1:
        hosts.run("ip", "link", "set", "eth0", "down")
    began = time.monotonic()
    try:
        while True:
            engine.step(batch)
    except Zero3dError as error:
        return type(error).__name__, str(error), time.monotonic() - began


def test_a_cut_link_ends_the_ranks_on_both_sides_soon_after_the_time_out() -> None:
    """On the side without the store the rank had asked it what the other did, over the link that was cut, and waited
    for an answer for a quarter of an hour."""
    with hosts.hosts(2) as names:
        found = hosts.run_on_hosts(names, steps_until_cut, 1)
    for rank, (kind, text, seconds) in enumerate(found):
        assert kind == "RankFailedError" and seconds < CUT_TIMEOUT + 7, found
        assert f"rank {1 - rank} did not join the" in text
    assert "the store of rank 0's machine does not answer either" in found[1][1]
