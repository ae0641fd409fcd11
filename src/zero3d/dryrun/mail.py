"""What stages of one pipeline tell each other before a rehearsal: their ranks are threads, of which one runs at a time.

Only what has data is carried, such as the headers that say what crosses a boundary. Once it is known, a stage needs its
neighbours no more.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from zero3d.comm.lookout import Leg
from zero3d.comm.paper_wire import PaperWire
from zero3d.computed import is_fake
from zero3d.errors import RankFailedError

SECONDS = 600.0
"""How long a stage may take until it sends what another one waits for."""


class Address(NamedTuple):
    """What is sent from one index to another under a tag."""

    source: int
    to: int
    tag: int


class PostOffice:
    """Letters between threads, in the order in which they were sent."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._letters: dict[Address, deque[Tensor]] = defaultdict(deque)
        self._failed = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Round all that a thread does: it runs alone, but while it waits for a letter."""
        with self._turn:
            try:
                yield
            except BaseException:
                self._failed = True
                raise
            finally:
                self._turn.notify_all()

    def send(self, address: Address, letter: Tensor) -> None:
        self._letters[address].append(letter.clone())
        self._turn.notify_all()

    def receive(self, address: Address) -> Tensor:
        """Raises `RankFailedError` where it will not come, as another thread has failed."""
        there = self._turn.wait_for(lambda: self._failed or bool(self._letters[address]), timeout=SECONDS)
        if self._failed or not there:
            raise RankFailedError(
                f"the stage at index {address.source} of pp failed, or never sent what was expected",
                hint="See that stage's own error; every stage must run the same forward.",
            )
        return self._letters[address].popleft()


class _Coming:
    def __init__(self, office: PostOffice, address: Address, tensor: Tensor) -> None:
        self._office, self._address, self._tensor = office, address, tensor

    def wait(self) -> None:
        self._tensor.copy_(self._office.receive(self._address))


class MailWire(PaperWire):
    """The `Wire` of one stage of a pipeline; a `PaperWire` once it is cut off from the others."""

    def __init__(self, office: PostOffice, size: int, index: int, name: str) -> None:
        super().__init__(size, index, name)
        self._office: PostOffice | None = office

    def cut_off(self) -> None:
        """From now on nobody is there."""
        self._office = None

    def arrive(self, tensor: Tensor, source: int, tag: int) -> Leg:
        if is_fake(tensor):
            return super().arrive(tensor, source, tag)
        if self._office is None:
            tensor.zero_()
            return super().arrive(tensor, source, tag)
        return Leg(_Coming(self._office, Address(source, self.index, tag), tensor), "in", source, tensor)

    def leave(self, tensor: Tensor, to: int, tag: int) -> Leg:
        if self._office is not None and not is_fake(tensor):
            self._office.send(Address(self.index, to, tag), tensor)
        return super().leave(tensor, to, tag)

    def spread(self, mine: Tensor, rows: Tensor, tag: int) -> list[Leg]:
        if self._office is None or is_fake(mine):
            return super().spread(mine, rows, tag)
        others = [index for index in range(self.size) if index != self.index]
        leaving = [self.leave(mine, index, tag) for index in others]
        return [*leaving, *(self.arrive(rows[index], index, tag) for index in others)]
