"""Work beside the main thread: queues whose jobs run in order, each on a thread of its own and, on a GPU, on a stream
of its own. On a CPU the same queues run the same jobs in the same order.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import SimpleQueue
from threading import current_thread
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from zero3d.contracts import Watcher
from zero3d.unwatched import UNWATCHED

Job = Callable[[], Any]

THREAD = "zero3d queue "
"""How the names of the queues' threads begin."""


class Ticket:
    """A `Pending`: a job of a queue. Waiting raises what the job raised."""

    def __init__(self, queue: "Queue", future: "Future[Any]") -> None:
        self._queue = queue
        self._future = future
        self._event: Any = None

    def wait(self) -> None:
        """On the caller's thread; on a GPU what the caller's stream does next comes after what the job did."""
        if not self._future.done():
            self._queue.waited_for(self._future)
        event = self._future.result()
        if event is not None:
            torch.cuda.current_stream(self._queue.device).wait_event(event)


class Queue:
    """Jobs in order. `watcher`: who is told of them from now on."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.watcher: Watcher = UNWATCHED
        self._busy = self._waited = 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD}{name}", initializer=self._begin)

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
        return Ticket(self, self._threads.submit(self._run, job, ready, watched))

    def take_seconds(self) -> tuple[float, float]:
        """(that its jobs took, that the rank waited for them) since it was asked last."""
        found = self._busy, self._waited
        self._busy = self._waited = 0.0
        return found

    def close(self) -> None:
        """Waits for what is under way."""
        self._threads.shutdown()

    def waited_for(self, future: "Future[Any]") -> None:
        began = perf_counter()
        future.exception()
        # A GPU's backward runs in a thread of autograd's; that a job waits for another's is no standing still.
        if not current_thread().name.startswith(THREAD):
            self._waited += perf_counter() - began

    def _begin(self) -> None:
        """The device and the stream are the thread's for good: each would begin with the first GPU."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

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
