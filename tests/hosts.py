"""Test hosts on one machine: network namespaces, each with one card `eth0` on a common bridge, of a chosen speed.

    with hosts(2) as names:
        results = run_on_hosts(names, work, arguments)     one forked rank a host, without a process group

What a card may send is capped by `tc tbf`. Needs root, iproute2 and a kernel with veth, bridge and tbf; `why_not` says
what is missing. Nothing here touches the machine's own network.
"""

import ctypes
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests.world import run_apart

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
FOLDER = Path("/run/netns")
NETWORK = "10.78.0"
PORT = 29741


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout


@cache
def why_not() -> str:
    """Why no test hosts can be made here; empty if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (iproute2)"
    try:
        with hosts(1):
            return ""
    except (subprocess.SubprocessError, OSError) as error:
        told = getattr(error, "stderr", "") or str(error)
        return f"network namespaces cannot be made: {told.strip()}"


@contextmanager
def hosts(number: int, rate: str = "1gbit") -> Iterator[list[str]]:
    """Names of namespaces; host i has the address `address(i)`. rate: in tc's units."""
    tag = f"z{secrets.token_hex(3)}"
    bridge, names = f"{tag}b", [f"{tag}h{index}" for index in range(number)]
    try:
        run("ip", "netns", "add", bridge)
        run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "br0", "up")
        for index, name in enumerate(names):
            run("ip", "netns", "add", name)
            peer = ("type", "veth", "peer", "name", f"p{index}", "netns", bridge)
            run("ip", "link", "add", "eth0", "netns", name, *peer)
            run("ip", "-n", bridge, "link", "set", f"p{index}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"{address(index)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            cap = ("tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *cap)
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


def address(index: int) -> str:
    return f"{NETWORK}.{index + 1}"


def cut(name: str) -> None:
    """The host's link goes down."""
    run("ip", "-n", name, "link", "set", "eth0", "down")


def mend(name: str) -> None:
    run("ip", "-n", name, "link", "set", "eth0", "up")


def slow_down(name: str, rate: str) -> None:
    """From now on the host's card sends no more than `rate`."""
    cap = ("tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
    run("ip", "netns", "exec", name, "tc", "qdisc", "change", "dev", "eth0", "root", *cap)


def run_on_hosts(
    names: Sequence[str], work: Callable[..., Any], *args: Any, ranks_each: int = 1, timeout: float = 60
) -> list[Any]:
    """`work(*args)` on forked ranks, `ranks_each` a host, with the environment that torchrun gives them and no process
    group; results by rank."""
    return run_apart(len(names) * ranks_each, _on_host, list(names), ranks_each, work, args, timeout=timeout)


def _on_host(rank: int, names: list[str], ranks_each: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    node, local = divmod(rank, ranks_each)
    enter(names[node], f"host{node}")
    world = len(names) * ranks_each
    told = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": ranks_each}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update({"MASTER_ADDR": address(0), "MASTER_PORT": str(PORT), "GROUP_RANK": str(node)})
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # found by itself
    return work(*args)


def enter(name: str, host: str) -> None:
    """This process, which has one thread, goes to a namespace and calls its machine `host`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (FOLDER / name).open() as place:
        if libc.setns(place.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "the namespace cannot be entered")
    socket.sethostname(host)


def sent_bytes(name: str = "") -> int:
    """What the card of the host has sent; of this process' own without a name."""
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    if name:
        return int(run("ip", "netns", "exec", name, "cat", path))
    words = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(words.partition(":")[2].split()[8])
