"""An axis that counts what it sends, for the run's report, the rehearsal and the tests."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from zero3d.comm.aside import Aside
from zero3d.contracts import Axis, Pending, Watched, Watcher
from zero3d.unwatched import UNWATCHED


@dataclass(frozen=True)
class Call:
    """One collective as this rank made it; `sent_bytes` is what an ideal ring sends from one rank."""

    verb: str
    label: str
    sent_bytes: int


class RecordedAxis:
    """`Axis` calls pass through to `inner`; `calls` and `sent_bytes` tell what they were.

    `record`: the recorded axis whose calls these count as, where `inner` is a part of it; `name`: dp, tp or pp;
    `watcher`: who is told of each call; `aside`: what the tally of a step takes along.
    """

    def __init__(self, inner: Axis, record: "RecordedAxis | None" = None, name: str = "") -> None:
        self.inner = inner
        self.size = inner.size
        self.index = inner.index
        self.one_call_sums = inner.one_call_sums
        self.calls: list[Call] = []
        self.sent_bytes = 0
        self.name = name
        self.watcher: Watcher = UNWATCHED
        self.aside = Aside()
        self._record = record or self

    def held(self) -> Iterable[Tensor]:
        return self.inner.held()

    def all_gather(self, out: Tensor, part: Tensor, label: str) -> Pending:
        watched = self._count("all_gather", label, (self.size - 1) * part.nbytes, out)
        return watched(self.inner.all_gather(out, part, label))

    def reduce_scatter(self, out: Tensor, whole: Tensor, label: str, *, add: bool = False) -> Pending:
        watched = self._count("reduce_scatter", label, whole.nbytes // self.size * (self.size - 1), whole)
        return watched(self.inner.reduce_scatter(out, whole, label, add=add))

    def all_reduce(self, tensor: Tensor, label: str) -> Pending:
        watched = self._count("all_reduce", label, 2 * tensor.nbytes * (self.size - 1) // self.size, tensor)
        return watched(self.inner.all_reduce(tensor, label))

    def broadcast(self, tensor: Tensor, root: int, label: str) -> Pending:
        watched = self._count("broadcast", label, tensor.nbytes * (self.size - 1) // self.size, tensor)
        return watched(self.inner.broadcast(tensor, root, label))

    def send(self, tensor: Tensor, to: int, label: str) -> Pending:
        watched = self._count("send", label, tensor.nbytes, tensor)
        return watched(self.inner.send(tensor, to, label))

    def recv(self, tensor: Tensor, source: int, label: str) -> Pending:
        watched = self._count("recv", label, 0, tensor)
        return watched(self.inner.recv(tensor, source, label))

    def start_step(self) -> None:
        """Forgets the calls of the step before; `sent_bytes` goes on."""
        self.calls.clear()

    @property
    def digest(self) -> int:
        """The calls since `start_step` as a number below 2**31, whatever their order."""
        return sum(zlib.crc32(f"{call.verb} {call.label}".encode()) for call in self.calls) % (1 << 31)

    def _count(self, verb: str, label: str, sent: int, tensor: Tensor) -> Watched:
        record = self._record
        record.calls.append(Call(verb, label, sent))
        record.sent_bytes += sent
        return record.watcher.calling(record.name, verb, label, tensor.nbytes)
