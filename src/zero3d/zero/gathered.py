"""Level 3: a rank keeps its shard of the weights; a bucket is whole only while somebody uses it.

    hold   one more user; the gather starts if the bucket is not there or coming
    take   the same, and waits until it is there
    drop   one user less; without any the memory goes back to the pool, of a bucket that several units share once
           another bucket is taken: the next unit is likely to want it

`use.py` decides who uses what and when.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from zero3d.comm.bucket import Bucket
from zero3d.comm.done import DONE
from zero3d.comm.flat import Pool, Window
from zero3d.comm.ranges import put
from zero3d.contracts import Axis, Pending, Store
from zero3d.errors import ReleasedParameterError
from zero3d.mapped import kept_copy
from zero3d.zero.guard import Guard
from zero3d.zero.holding import Holding, point_at
from zero3d.zero.shard import Shard
from zero3d.zero.units import Unit
from zero3d.zero.use import Names, Uses


class Place:
    """A bucket that comes and goes."""

    def __init__(self, holding: Holding, window: Window, guard: Guard) -> None:
        self.holding = holding
        self.window = window
        self.guard = guard
        self.label = f"weights of {holding.bucket.label}"
        self.users = 0
        self.lingers = False
        self.updated: Pending = DONE
        self.coming: tuple[Pending, Tensor] | None = None


class GatheredWeights:
    """`Weights` that are gathered for each use and released after it."""

    def __init__(
        self,
        axis: Axis,
        pool: Pool,
        *,
        prefetch: int,
        overlap: bool,
        keeps: bool = False,
        store: Store | None = None,
    ) -> None:
        """`keeps`: what a training forward gathers stays until the end of the step. `store`: where this rank's parts
        are kept, if not on the device; they are then brought ahead of use, and gathered when more is brought or they
        are used, at the same points on every rank."""
        self._axis = axis
        self._pool = pool
        self._overlap = overlap
        self._prefetch = prefetch
        self._places: dict[Bucket, Place] = {}
        self._place_of: dict[str, Place] = {}
        self._places_of: dict[Names, Sequence[Place]] = {}
        self._uses: Uses | None = None
        self._lingering: Place | None = None
        self._keeps = keeps
        self._kept: set[Place] = set()
        self._store = store
        self._lifting: list[tuple[Place, Pending, Tensor]] = []

    def adopt(
        self, bucket: Bucket, parameters: Sequence[tuple[str, nn.Parameter]], initial: Tensor, dtype: torch.dtype
    ) -> Holding:
        first = initial[bucket.shard(self._axis.index)]
        part = kept_copy(first, dtype) if self._store is None else self._store.keep(first, dtype)
        window = Window(bucket.numel, part, self._pool, stays=self._store is None and part.numel() == bucket.numel)
        point_at(parameters, bucket, window.tensor)
        holding = Holding(bucket=bucket, parameters=parameters, flat=window.tensor, part=part)
        place = Place(holding, window, Guard(parameters, self._touched))
        window.hide()
        place.guard.close()
        self._places[bucket] = place
        self._place_of.update((name, place) for name, _ in parameters)
        return holding

    def watch(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._uses = Uses(model, units, self, self._prefetch)
        sharers = Counter(place for unit in units for place in set(self._named(unit.names)))
        for place, number in sharers.items():
            place.lingers = number > 1

    def unwatch(self) -> None:
        assert self._uses is not None
        self._uses.close()

    def leave(self) -> None:
        self._stop_lingering()
        for place in self._places.values():
            self._forget(place)
            place.guard.open()

    def by_use(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        """What the whole forward holds comes first, wherever in the model it is."""
        assert self._uses is not None
        held = set(self._named(self._uses.outside))
        return sorted(shards, key=lambda shard: self._places[shard.bucket] not in held)

    def publish(self, shard: Shard) -> None:
        self._stop_lingering()
        shard.narrow()
        self._places[shard.bucket].updated = shard.updated
        if not self._overlap:
            shard.updated.wait()

    def write(self, bucket: Bucket, span: slice, values: Tensor) -> None:
        place = self._places[bucket]
        self._stop_lingering()
        self._forget(place)
        self._ready(place)
        place.updated.wait()
        put(place.holding.part, bucket.shard(self._axis.index), values, span)
        if place.window.shown:
            place.window.tensor[span].copy_(values)

    def end_turn(self) -> None:
        assert self._uses is not None
        self._uses.end_turn()
        self._stop_lingering()
        for place in self._places.values():
            self._forget(place)

    def end_step(self) -> None:
        while self._kept:
            self._drop(self._kept.pop())

    def open(self) -> None:
        for place in self._places.values():
            self._hold(place)
        for place in self._places.values():
            self._ready(place)

    def close(self) -> None:
        for place in self._places.values():
            self._drop(place)
        self._stop_lingering()

    def held(self) -> Iterable[tuple[str, Tensor]]:
        for place in self._places.values():
            yield ("weights" if self._store is None else self._store.kind), place.holding.part
            yield "buffers", place.window.tensor

    def hold(self, names: Names) -> None:
        for place in self._named(names):
            self._hold(place)

    def take(self, names: Names) -> None:
        """One more user, who needs it now."""
        places = self._named(names)
        if self._lingering is not None and self._lingering not in places:
            self._stop_lingering()
        for place in places:
            place.users += 1
            if not place.window.shown:
                self._start(place)
        if self._keeps and torch.is_grad_enabled():
            for place in places:
                self._keep(place)
        for place in places:
            self._ready(place)

    def drop(self, names: Names) -> None:
        for place in self._named(names):
            self._drop(place)

    def start(self, names: Names) -> None:
        """Gathers ahead of use."""
        for place in self._named(names):
            if not place.window.shown:
                self._start(place)

    def _named(self, names: Names) -> Sequence[Place]:
        found = self._places_of.get(names)
        if found is None:
            found = self._places_of[names] = tuple(dict.fromkeys(self._place_of[name] for name in names))
        return found

    def _start(self, place: Place) -> None:
        if place.coming is not None or place.window.shown or self._is_lifting(place):
            return
        place.updated.wait()
        target = place.window.buffer()
        if self._store is None:
            self._gather(place, place.holding.part, target)
        else:
            self._lifted()
            mine = target[place.holding.bucket.shard(self._axis.index)]
            self._lifting.append((place, self._store.lift(place.holding.part, mine, place.label), target))
        if not self._overlap:
            self._lifted()

    def _is_lifting(self, place: Place) -> bool:
        return any(one is place for one, _, _ in self._lifting)

    def _lifted(self) -> None:
        """What was being brought is here, and is gathered."""
        while self._lifting:
            place, pending, target = self._lifting.pop(0)
            pending.wait()
            self._gather(place, target[place.holding.bucket.shard(self._axis.index)], target)

    def _gather(self, place: Place, part: Tensor, target: Tensor) -> None:
        place.coming = (self._axis.all_gather(target, part, place.label), target)
        if not self._overlap:
            place.coming[0].wait()

    def _hold(self, place: Place) -> None:
        place.users += 1
        self._start(place)

    def _keep(self, place: Place) -> None:
        if place not in self._kept:
            self._kept.add(place)
            place.users += 1

    def _ready(self, place: Place) -> None:
        if self._is_lifting(place):
            self._lifted()
        if place.coming is not None:
            pending, filled = place.coming
            pending.wait()
            place.coming = None
            place.window.show(filled)
            place.guard.open()

    def _drop(self, place: Place) -> None:
        place.users -= 1
        assert place.users >= 0
        if place.users:
            return
        self._ready(place)
        if place.lingers:
            if self._lingering is not place:
                self._stop_lingering()
            self._lingering = place
        else:
            place.window.hide()
            place.guard.close()

    def _stop_lingering(self) -> None:
        place, self._lingering = self._lingering, None
        if place is not None and not place.users and place.window.shown:
            place.window.hide()
            place.guard.close()

    def _forget(self, place: Place) -> None:
        """What was gathered ahead and never used."""
        if not place.users and (place.coming is not None or self._is_lifting(place)):
            place.users = 1
            self._drop(place)

    def _touched(self, name: str) -> None:
        place = self._place_of[name]
        if place.users:
            self._ready(place)
        elif self._uses is None or not self._uses.borrow(name):
            raise ReleasedParameterError(
                f"the data of parameter {name} is released: at ZeRO level 3 each rank keeps only its shard of it",
                hint="Read it inside `with engine.gathered():` (or sharded.gathered()), or use "
                f'engine.full_state_dict(), weight_of("{name}") or grad_of("{name}"); write it by set_weight or '
                "load_state_dict. A term of the loss that needs it is computed in the model's forward.",
            )
