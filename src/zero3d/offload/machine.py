"""What memory this machine has free for its ranks, and what limits it. Reads the system's files; changes nothing.

    of the machine, for all its ranks together     MemAvailable; every cgroup from this process' own up to the top
    of each process                                address space and data size (ulimit -v and -d)

Files that are missing limit nothing. `root` is the folder in which proc and sys are, so that tests can make their own.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
UNLIMITED = 1 << 60
"""Bytes: cgroup 1 writes a number that no machine has for "no limit"."""


class Limit(NamedTuple):
    """`available` bytes may still be taken because of `name`."""

    available: int
    name: str


class Mount(NamedTuple):
    """Where cgroups that count memory are: `top`, a path of theirs, is found at `place`."""

    version: int
    top: str
    place: Path


class Files(NamedTuple):
    limits: tuple[str, ...]
    used: str
    cache: tuple[str, ...]


FILES = {
    # Beyond memory.high nothing is killed, but all is slowed down to a standstill.
    2: Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "file")),
    1: Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_cache")),
}
"""By version of cgroups; `cache`: the first that is there counts what is read from files and can be dropped."""


def free_memory(root: Path = ROOT) -> Limit | None:
    """The least of all limits, for a machine whose memory one rank has to itself; None where nothing is known."""
    return _least([of_machine(root), of_process(root)])


def of_machine(root: Path = ROOT) -> Limit | None:
    """What all ranks of the machine can take together, swap not counted; None where nothing is known."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc" / "meminfo"), re.MULTILINE)
    system = Limit(int(found[1]) * 1024, "memory available") if found else None
    return _least([system, *_cgroup_limits(root)])


def of_process(root: Path = ROOT) -> Limit | None:
    """What this process can take in addition to what it has; None where that has no limit."""
    own = root / "proc" / "self"
    limits, status = _text(own / "limits"), _text(own / "status")
    found = []
    for name, used_name, text in (
        ("address space", "VmSize", "address space limit, ulimit -v"),
        ("data size", "VmData", "data size limit, ulimit -d"),
    ):
        limit = re.search(rf"^Max {name}\s+(\d+)", limits, re.MULTILINE)
        used = re.search(rf"^{used_name}:\s+(\d+) kB", status, re.MULTILINE)
        if limit:
            found.append(Limit(max(int(limit[1]) - (int(used[1]) * 1024 if used else 0), 0), text))
    return _least(found)


def _cgroup_limits(root: Path) -> Iterator[Limit]:
    """Each limit counts all that is below it, so every folder on the way up has a say."""
    for mount in _mounts(root):
        below = _below(mount, _text(root / "proc" / "self" / "cgroup"))
        for group in (below, *below.parents):
            place = mount.place / group
            used = _number(place / FILES[mount.version].used)
            for file in FILES[mount.version].limits:
                limit = _number(place / file)
                if limit is not None and used is not None and limit < UNLIMITED:
                    held = max(used - _cache(place, mount.version), 0)
                    name = f"cgroup limit, {file}" + (f" of {group}" if group.parts else "")
                    yield Limit(max(limit - held, 0), name)


def _mounts(root: Path) -> list[Mount]:
    """From the system's list, as a container sees a part of the tree; the usual places where there is no list."""
    found = []
    for line in _text(root / "proc" / "self" / "mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        words, kinds = mount.split(), kind.split()
        if len(words) < 5 or len(kinds) < 3:
            continue
        (top, place), (system, options) = map(_unescaped, words[3:5]), (kinds[0], kinds[-1])
        if system == "cgroup2" or (system == "cgroup" and "memory" in options.split(",")):
            found.append(Mount(2 if system == "cgroup2" else 1, top, root / place.lstrip("/")))
    usual = root / "sys" / "fs" / "cgroup"
    return found or [Mount(2, "/", usual), Mount(1, "/", usual / "memory")]


def _below(mount: Mount, cgroups: str) -> PurePosixPath:
    """This process' cgroup as a path below the mount; the mount itself where that shows another part of the tree."""
    for line in cgroups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (number == "0" and not controllers) if mount.version == 2 else "memory" in controllers.split(","):
            own, top = PurePosixPath(path), PurePosixPath(mount.top)
            if own.is_relative_to(top) and ".." not in own.parts:
                return own.relative_to(top)
    return PurePosixPath()


def _cache(place: Path, version: int) -> int:
    counts = dict(line.split(maxsplit=1) for line in _text(place / "memory.stat").splitlines() if " " in line)
    return next((int(counts[name]) for name in FILES[version].cache if name in counts), 0)


def _least(limits: Iterable[Limit | None]) -> Limit | None:
    return min((one for one in limits if one is not None), default=None)


def _number(path: Path) -> int | None:
    """None: no such file, or "max"."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _unescaped(word: str) -> str:
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), word)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
