"""Machines: by which network interface they reach each other, and which ranks share one. Reads the system alone.

gloo and NCCL listen on the interface that is asked for. Where nobody asked, it is the one that reaches the address at
which ranks meet, and no other: what a machine has besides, such as a public network, never hears of the run.
"""

import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from zero3d.errors import ConfigError
from zero3d.layout import Layout

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915
"""Linux' request for an interface's IPv4 address."""
INET6 = Path("/proc/net/if_inet6")
NO_PORT = 9
"""A UDP socket that is connected, to any port, sends nothing: it only learns by which way it would."""


def interfaces(environment: Mapping[str, str]) -> dict[str, str]:
    """What is to be added to `environment`, which a launcher has filled, so that ranks listen on one interface alone.

    ConfigError: the one that is asked for is not there; of several nobody can tell which is meant.
    """
    if asked := environment.get(GLOO):
        _refuse_missing(asked.split(","))
        return {}
    found = interface_to(environment.get("MASTER_ADDR", ""))
    many = int(environment.get("LOCAL_WORLD_SIZE", "0")) not in (0, int(environment.get("WORLD_SIZE", "1")))
    if many and (found is None or is_loopback(found)):
        # Some launchers and some /etc/hosts call the first machine by a name that only reaches itself.
        found = _only_one()
    if found is None:
        return {}
    return {name: found for name in (GLOO, NCCL) if name not in environment}


def interface_to(address: str) -> str | None:
    """The interface by which this machine reaches `address`, a name or a number; None where the system does not say."""
    for family, kind, protocol, _, place in _resolved(address):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                mine = str(probe.getsockname()[0])
        except OSError:
            continue
        for _, name in socket.if_nameindex():
            if mine in _addresses(name):
                return name
    return None


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Each interface of this machine and its addresses; none where the system is not Linux."""
    return {name: tuple(_addresses(name)) for _, name in socket.if_nameindex()}


def is_loopback(name: str) -> bool:
    return any(one == "::1" or one.startswith("127.") for one in _addresses(name))


def placement(layout: Layout, hosts: Sequence[str]) -> str:
    """What to say where tensor-parallel ranks do not share a machine; empty where all do. hosts: of each rank."""
    spread = layout.spread_over(hosts)
    if not spread:
        return ""
    ranks = ", ".join(map(str, spread[0]))
    names = ", ".join(dict.fromkeys(hosts[rank] for rank in spread[0]))
    more = f", and {len(spread) - 1} more such group{'s' * (len(spread) > 2)}" if len(spread) > 1 else ""
    return (
        f"The tensor-parallel ranks {ranks} are on several machines ({names}){more}: every layer waits for the network "
        f"between them. Start ranks by multiples of parallel.tp on each machine (torchrun --nproc-per-node "
        f"{layout.tp}), or use parallel.pp across machines and a smaller parallel.tp."
    )


def _only_one() -> str:
    names = [name for _, name in socket.if_nameindex() if _addresses(name) and not is_loopback(name)]
    if len(names) == 1:
        return names[0]
    raise ConfigError(
        "the machines of this run do not say by which network interface they reach each other, and "
        f"{socket.gethostname()} has {', '.join(names) or 'none but loopback'}",
        where="MASTER_ADDR",
        hint=f"Set {GLOO} to one of them, or give torchrun a --master-addr (or --rdzv-endpoint) that is an IP address.",
    )


def _refuse_missing(asked: Sequence[str]) -> None:
    there = [name for _, name in socket.if_nameindex()]
    missing = [name for name in asked if name not in there]
    if missing:
        raise ConfigError(
            f"{GLOO} names {missing[0]!r}, which {socket.gethostname()} does not have",
            where=GLOO,
            hint=f"It has {', '.join(there)}.",
        )


def _resolved(address: str) -> "list[tuple[int, int, int, str, tuple[object, ...]]]":
    try:
        return list(socket.getaddrinfo(address, NO_PORT, type=socket.SOCK_DGRAM)) if address else []
    except OSError:
        return []


def _addresses(name: str) -> list[str]:
    """Of interface `name`: the first IPv4 one, and all of IPv6; empty where the system is not Linux."""
    if sys.platform != "linux":
        return []
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:  # It has none.
            pass
    try:
        lines = INET6.read_text(encoding="ascii").splitlines()
    except OSError:
        return found
    rows = [line.split() for line in lines]
    return found + [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[-1] == name]
