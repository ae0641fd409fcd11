"""An axis over a torch.distributed process group: the one place that knows its calls and their names.

Reductions are exchanges followed by a local sum, on every back end: half the bytes of gloo's own reduce-scatter,
a fixed order (by rank), and a sum in fp32 whatever travels. gloo exchanges by posted sends and receives, which
need no thread of their own and are matched by what they carry, so that two ranks that disagree about what comes
next never add the wrong buffers; other back ends by their all-to-all and all-gather.
"""

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero3d.comm.flat import Pool
from zero3d.errors import RankFailedError

CHUNK = 1 << 17
"""Elements summed at a time: parts and sum stay in a core's cache."""


class Posted:
    """Calls under way and what is to be done once they are through."""

    def __init__(self, works: Sequence[dist.Work | None], then: Callable[[], None], what: str) -> None:
        self._works = works
        self._then: Callable[[], None] | None = then
        self._what = what

    def wait(self) -> None:
        """Once; gloo's own second wait would not return."""
        if self._then is None:
            return
        for work in self._works:
            if work is None:
                continue
            try:
                work.wait()
            except RuntimeError as error:
                first = str(error).splitlines()[0][:200]
                raise RankFailedError(
                    f"another rank is gone or did not join the {self._what}",
                    where=first,
                    hint="Every rank must run the same modules and as many micro-batches in a step; "
                    "see the first rank that failed.",
                ) from error
        then, self._then = self._then, None
        then()


class ProcessAxis:
    """An `Axis` over `group`, whose ranks in order are the axis' indices."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self.size = dist.get_world_size(group)
        self.index = dist.get_rank(group)
        self._pool = Pool(device)
        self._scratch = torch.empty(CHUNK, dtype=torch.float32, device=device)
        self._posts = dist.get_backend(group) == "gloo"
        self.one_call_sums = self.size == 2

    def held(self) -> Sequence[Tensor]:
        return [*self._pool, self._scratch]

    def all_gather(self, out: Tensor, part: Tensor, label: str) -> Posted:
        mine = out.view(self.size, -1)[self.index]
        if mine.data_ptr() != part.data_ptr():
            mine.copy_(part)
        if self._posts:
            rows = list(out.view(self.size, -1))
            works = self._post([mine] * self.size, rows, "all-gather", label)
        else:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            works = [gather(out, mine, group=self._group, async_op=True)]
        return Posted(works, _nothing, f"all-gather of {label}")

    def reduce_scatter(self, out: Tensor, whole: Tensor, label: str, *, add: bool = False) -> Posted:
        landing = self._pool.take(whole.numel(), whole.dtype)
        parts, rows = list(whole.view(self.size, -1)), list(landing.view(self.size, -1))
        if self._posts:
            works = self._post(parts, rows, "reduce-scatter", label)
            rows[self.index] = parts[self.index]
        else:
            works = [dist.all_to_all_single(landing, whole, group=self._group, async_op=True)]

        def land() -> None:
            _sum(out, rows, self._scratch, add=add)
            self._pool.give(landing)

        return Posted(works, land, f"reduce-scatter of {label}")

    def all_reduce(self, tensor: Tensor, label: str) -> Posted:
        if not tensor.is_floating_point() or (self.one_call_sums and tensor.dtype == torch.float32):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
            return Posted([work], _nothing, f"all-reduce of {label}")
        everyone = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        gathered = self.all_gather(everyone, tensor, label)

        def add_up() -> None:
            gathered.wait()
            _sum(tensor, list(everyone.view(self.size, -1)), self._scratch, add=False)

        return Posted([], add_up, f"all-reduce of {label}")

    def broadcast(self, tensor: Tensor, root: int, label: str) -> Posted:
        work = dist.broadcast(tensor, self._ranks[root], group=self._group, async_op=True)
        return Posted([work], _nothing, f"broadcast of {label}")

    def send(self, tensor: Tensor, to: int, label: str) -> Posted:
        work = dist.isend(tensor, self._ranks[to], group=self._group, tag=_tag("send", label))
        return Posted([work], _nothing, f"send of {label} to rank {self._ranks[to]}")

    def recv(self, tensor: Tensor, source: int, label: str) -> Posted:
        work = dist.irecv(tensor, self._ranks[source], group=self._group, tag=_tag("send", label))
        return Posted([work], _nothing, f"receive of {label} from rank {self._ranks[source]}")

    def _post(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], verb: str, label: str
    ) -> list[dist.Work | None]:
        """Row r of `outgoing` goes to rank r, whose row for me arrives in row r of `incoming`."""
        tag = _tag(verb, label)
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        arriving = [dist.irecv(incoming[r], self._ranks[r], group=self._group, tag=tag) for r in others]
        leaving = [dist.isend(outgoing[r], self._ranks[r], group=self._group, tag=tag) for r in others]
        return [*arriving, *leaving]


def _sum(out: Tensor, rows: Sequence[Tensor], scratch: Tensor, *, add: bool) -> None:
    """The sum of `rows` in their order, in fp32, into or onto `out`, which may be one of them."""
    if len(rows) == 2 and not add and {out.dtype, rows[0].dtype} == {torch.float32}:
        torch.add(rows[0], rows[1], out=out)
        return
    for start in range(0, out.numel(), CHUNK):
        part = slice(start, min(start + CHUNK, out.numel()))
        total = scratch[: part.stop - part.start]
        total.copy_(rows[0][part])
        for row in rows[1:]:
            total.add_(row[part])
        if add:
            out[part].add_(total)
        else:
            out[part].copy_(total)


def _tag(verb: str, label: str) -> int:
    return zlib.crc32(f"{verb} {label}".encode()) & 0x7FFFFFFF


def _nothing() -> None:
    return None
