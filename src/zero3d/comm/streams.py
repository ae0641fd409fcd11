"""Work beside the main thread: queues whose jobs run in order, each on a thread of its own and, on a GPU, on a stream
of its own. On a CPU the same queues run the same jobs in the same order.
"""

import atexit
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from time import perf_counter
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from zero3d.contracts import Watcher
from zero3d.unwatched import UNWATCHED

Job = Callable[[], Any]
Jobs = SimpleQueue[tuple[Future[Any], Job] | None]

THREAD = "zero3d queue "
"""How the names of the queues' threads begin."""


class Ticket:
    """A `Pending`: a job of a queue. Waiting raises what the job raised."""

    def __init__(self, queue: "Queue", future: "Future[Any]") -> None:
        self._queue = queue
        self._future = future

    def wait(self) -> None:
        """On the caller's thread; on a GPU what the caller's stream does next comes after what the job did."""
        if not self._future.done():
            self._queue.waited_for(self._future)
        event = self._future.result()
        if event is not None:
            torch.cuda.current_stream(self._queue.device).wait_event(event)


class Queue:
    """Jobs in order. `watcher`: who is told of them from now on. late: they run as late as can be, when somebody waits
    for them, on that thread: on paper, where what is under way counts at its most."""

    def __init__(self, name: str, device: torch.device, *, late: bool = False) -> None:
        self.name = name
        self.device = device
        self.watcher: Watcher = UNWATCHED
        self._busy = self._waited = 0.0
        self._late: deque[tuple[Future[Any], Job]] | None = deque() if late else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: Jobs = SimpleQueue()
        # A daemon, which knows the jobs alone: it ends with a queue that nobody closed, and the process need not wait
        # for it. (An executor's threads take no further jobs once the main thread has ended, and these make some.)
        self._thread = Thread(target=_work, args=(self._jobs, self._stream), name=f"{THREAD}{name}", daemon=True)
        self._thread.start()
        self._dropped = finalize(self, self._jobs.put, None)
        self._dropped.atexit = False
        _open.add(self)

    def announce(self, what: str) -> AbstractContextManager[None]:
        """For `put`, where a job is put later than in the step that it is of."""
        return self.watcher.queueing(self.name, what)

    def put(self, job: Job, what: str, announced: AbstractContextManager[None] | None = None) -> Ticket:
        """`job` runs once those before it have, and what the caller's stream was given until now. `what`: its bucket's
        label."""
        watched = self.announce(what) if announced is None else announced
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event(blocking=True)
            ready.record(torch.cuda.current_stream(self.device))
        if not self._dropped.alive:
            raise RuntimeError(f"the queue {self.name} is closed")
        future: Future[Any] = Future()
        run = partial(self._run, job, ready, watched)
        (self._jobs.put if self._late is None else self._late.append)((future, run))
        return Ticket(self, future)

    def take_seconds(self) -> tuple[float, float]:
        """(that its jobs took, that the rank waited for them) since it was asked last."""
        found = self._busy, self._waited
        self._busy = self._waited = 0.0
        return found

    def close(self) -> None:
        """Waits for what is under way."""
        self.flush()
        self._dropped()
        self._thread.join()
        _open.discard(self)

    def flush(self) -> None:
        """Waits for the jobs that it has now, however they end."""
        if self._dropped.alive:
            self.put(_nothing, "").wait()

    def waited_for(self, future: "Future[Any]") -> None:
        while self._late and not future.done():
            _settle(*self._late.popleft())
        began = perf_counter()
        future.exception()
        # A GPU's backward runs in a thread of autograd's; that a job waits for another's is no standing still.
        if not current_thread().name.startswith(THREAD):
            self._waited += perf_counter() - began

    @torch.no_grad()
    def _run(self, job: Job, ready: Any, watched: AbstractContextManager[None]) -> Any:
        if ready is not None:
            ready.synchronize()  # What is waited for here is the device's own work, none of the job's.
        began = perf_counter()
        try:
            with watched:
                job()
            if self._stream is None:
                return None
            done = torch.cuda.Event()
            done.record(self._stream)
            return done
        finally:
            self._busy += perf_counter() - began


def _work(jobs: "Jobs", stream: Any) -> None:
    """A queue's thread."""
    if stream is not None:
        # Device and stream are the thread's for good: each would begin with the first GPU.
        torch.cuda.set_stream(stream)
    while (one := jobs.get()) is not None:
        _settle(*one)
        del one  # It would live until the next job.


def _settle(future: "Future[Any]", run: Job) -> None:
    try:
        future.set_result(run())
    except BaseException as error:
        future.set_exception(error)


def _nothing() -> None:
    return None


_open: "WeakSet[Queue]" = WeakSet()


def _finish() -> None:
    """The process ends, and engines that nobody closed have jobs, which make jobs of other queues: all are done, as a
    thread that torch runs in must not be cut off."""
    for _ in range(3):
        for queue in list(_open):
            queue.flush()


atexit.register(_finish)


def settled(device: torch.device) -> None:
    """What this thread's stream was given is done: the host may read what it copied there."""
    if device.type == "cuda":
        # An event of this kind lets the thread sleep, and leaves its core to the update.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


class Staging:
    """Two host buffers of `nbytes` that take turns, pinned where the device is a GPU: what is under way between host
    and device, and all the pinned memory there is."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for buffer in self.buffers:
            self._free.put(buffer)

    def take(self, numel: int, dtype: torch.dtype) -> "Lent":
        """Waits until one of the two is free."""
        return Lent(self._free, self._free.get(), numel, dtype)


class Lent(AbstractContextManager[Tensor]):
    """A staging buffer, as `numel` elements of `dtype`, until it is given back."""

    def __init__(self, home: "SimpleQueue[Tensor]", buffer: Tensor, numel: int, dtype: torch.dtype) -> None:
        self._home = home
        self._buffer = buffer
        self.tensor = buffer[: numel * dtype.itemsize].view(dtype)

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *_: object) -> None:
        self.give()

    def give(self) -> None:
        self._home.put(self._buffer)
