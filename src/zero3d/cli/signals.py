"""Signals that ask a rank to end, and the code that the command leaves with.

A rank mostly waits in native code, where Python runs no handler. So the number of a signal goes through a pipe, which
a thread reads at once.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from zero3d.stopping import SIGNALS

NUMBERS = {int(getattr(signal, name)): name for name in SIGNALS if hasattr(signal, name)}
INTERRUPTED = 130
"""What the command leaves with after Ctrl-C."""
SHELL = 128
"""What shells add to the number of a signal."""


def exit_code(name: str, *, saved: bool) -> int:
    """What the command leaves with: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP. SIGUSR1, by which schedulers say
    that time is up soon, asks for a checkpoint: 0 where there is one."""
    return 0 if name == "SIGUSR1" and saved else SHELL + int(getattr(signal, name))


class Signals:
    """An `Asked` of this process. `alone`: no `zero3d` started it, so that Ctrl-C twice ends it here, at once."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._came: list[str] = []

    def by(self) -> Sequence[bool]:
        return [name in self._came for name in SIGNALS]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Only the main thread of a process may."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        fd = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, _leave_it) for number in NUMBERS}
        for number in NUMBERS:
            signal.siginterrupt(number, False)  # System calls of native code go on as if nothing had come.
        reader = threading.Thread(target=self._read, args=(theirs,), name="zero3d signals", daemon=True)
        reader.start()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(fd)
            ours.close()
            reader.join()

    def _read(self, pipe: socket.socket) -> None:
        with pipe:
            while numbers := pipe.recv(64):
                for name in filter(None, map(NUMBERS.get, numbers)):
                    if self._alone and name == "SIGINT" and name in self._came:
                        os._exit(exit_code(name, saved=False))
                    self._came.append(name)


def _leave_it(number: int, frame: FrameType | None) -> None:
    """The thread has it already."""
