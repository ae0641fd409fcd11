"""The narrow interfaces between the parts. Everything else is hidden behind one of these.

batch ──> step ──> runtime ──(action)──> Stage ──> the user's module
            │          └──(turn)───> Replica ──> Axis ──> ranks
            │                            └── Shard ──(deliver)──> Home
            └──(shards)──> Optimizer
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from zero3d.comm.bucket import Bucket
    from zero3d.pipeline.action import Action
    from zero3d.zero.shard import Shard

Batch = Any
"""A tensor, or a tuple, list, dict or dataclass of tensors whose first dim counts samples."""

Loss = Callable[[Any, Batch], Tensor | tuple[Tensor, Tensor | int]]
"""loss(model_output, batch) -> (sum over counted targets, their number), or a mean tensor."""

OptimizerFactory = Callable[[Sequence[Any]], Any]
"""parameters (tensors or groups) -> torch.optim.Optimizer. The tensors are fp32: flat pieces of parameters, and of what
`zero.whole_parameters` names whole ones of their own shapes, each in a call by itself."""

OptimizerChoice = str | OptimizerFactory | Mapping[str, str | OptimizerFactory]
"""A function or a name for all parameters, or {pattern of names: function or name}, of which the first match wins."""


class Pending(Protocol):
    """Something under way."""

    def wait(self) -> None: ...


Watched = Callable[[Pending], Pending]
"""Takes the call that was about to be issued, and gives what is to be waited for in its place."""

Place = Callable[[Tensor, torch.dtype], tuple[Tensor, bool] | None]
"""(parameter, dtype) -> where a gradient of that dtype may be written, and whether it is to be added to what is there;
what is there then goes to autograd as the gradient. None: anywhere."""


class Watcher(Protocol):
    """Is told what a rank does, as it does it. `unwatched.UNWATCHED` is the one that keeps nothing."""

    def acting(self, action: "Action") -> AbstractContextManager[None]:
        """Round an action of the schedule."""
        ...

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Round another part of the step."""
        ...

    def calling(self, axis: str, verb: str, label: str, nbytes: int) -> Watched:
        """A call is about to be issued; `nbytes`: of the whole tensor that it fills, sums or moves."""
        ...

    def queueing(self, queue: str, what: str) -> AbstractContextManager[None]:
        """A job of a queue of offload is announced, of the step that goes on now; what comes back is round the job, in
        the queue's own thread. `what`: which bucket it is of."""
        ...


class Axis(Protocol):
    """One of dp, tp, pp as one rank sees it: `size` ranks, of which I am number `index`.

    All buffers are contiguous and one-dimensional. A call starts at once and is done when the returned object's
    `wait` returns; until then its buffers belong to the axis. `label` says in errors and records what moves.
    Reductions add in rank order, in fp32 (integers: in int64), whatever dtype travels.
    """

    size: int
    index: int
    one_call_sums: bool
    """Whether `all_reduce` of fp32 is one call that is no slower than a reduce-scatter and an all-gather (of two terms
    the order does not matter, so the back end's own sum will do)."""

    def all_gather(self, out: Tensor, part: Tensor, label: str) -> Pending:
        """`part` [n] of every rank, in rank order, into `out` [size * n]; `part` may be my place in `out`."""
        ...

    def reduce_scatter(self, out: Tensor, whole: Tensor, label: str, *, add: bool = False) -> Pending:
        """The sum over ranks of my part of `whole` [size * n] into (`add`: onto) `out` [n], in out's dtype. On an axis
        of size 1 `out` may be `whole` itself, unless `add`."""
        ...

    def all_reduce(self, tensor: Tensor, label: str) -> Pending:
        """The sum over ranks, in place, the same bits on every rank."""
        ...

    def broadcast(self, tensor: Tensor, root: int, label: str) -> Pending: ...

    def send(self, tensor: Tensor, to: int, label: str) -> Pending: ...

    def recv(self, tensor: Tensor, source: int, label: str) -> Pending: ...

    def held(self) -> Iterable[Tensor]:
        """Buffers of the axis' own that live over steps."""
        ...


class Replica(Protocol):
    """My copy of the model over dp; hides buckets, hooks, gather and release, overlap, and the level."""

    def turn(self, stage: int, first: bool, last: bool, *, counts: bool = True) -> AbstractContextManager[None]:
        """Round one backward of a stage: it is this rank's first, or last, in this step. Without `counts` its
        gradients are left out: it only makes this rank's calls match those of the others."""
        ...

    def rest(self) -> None:
        """At the start of a step: gradients of the one before have no memory until those of this one come."""
        ...

    def place(self, parameter: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool] | None:
        """A `Place`, in a turn."""
        ...

    def finish(self) -> Sequence["Shard"]:
        """Waits for every reduction; the shards then hold the sums over ranks and micro-batches (at level 0 the
        parts of other ranks may still be `coming`)."""
        ...

    @property
    def shards(self) -> Sequence["Shard"]: ...

    @property
    def by_use(self) -> Sequence["Shard"]:
        """The same in the order in which a forward wants their weights."""
        ...

    def norms(self, uncounted: Collection[str] = ()) -> Sequence[Tensor]:
        """Norms of groups of gradient elements, fp64: over the ranks that share the shards each element counts once.
        Those of parameters that are `uncounted`, as another rank holds the same, are zero."""
        ...

    def arrivals(self) -> Mapping[str, int]:
        """How many gradients each trainable parameter got on this rank in the step."""
        ...

    def publish(self, shards: Iterable["Shard"]) -> None:
        """New master weights become the model's weights on every rank, at the latest when they are used."""
        ...


class Home(Protocol):
    """Where the optimizer's part of shards lives that is not beside the weights: master weights, summed gradients,
    state."""

    def shard(self, bucket: "Bucket", span: slice, initial: Tensor, weights: Tensor, held: torch.dtype) -> "Shard":
        """A shard whose master weights are a copy of `initial` [n] here, whose gradient is summed in `held`, and whose
        `weights` [n] the model computes with."""
        ...

    def make_room(self) -> None:
        """Waits until at most one gradient is on its way here."""
        ...

    def deliver(
        self, shard: "Shard", gradient: Tensor, free: Callable[[], None], *, first: bool, final: bool
    ) -> Pending:
        """`gradient` [n] becomes (`first`), or is added to, the shard's; `free` is called when it has been read. What
        is pending is that it has arrived, and if `final` that the norms of the sum are known."""
        ...

    def norms(self, shard: "Shard") -> Tensor:
        """Norms of groups of 64 elements of the sum that has arrived, fp64."""
        ...


class Store(Protocol):
    """Where parts of the model's weights are kept that are not on the device. `kind`: what they count as."""

    kind: str

    def keep(self, first: Tensor, dtype: torch.dtype) -> Tensor:
        """A part [n] that is kept here, with the values of `first`."""
        ...

    def lift(self, part: Tensor, out: Tensor, label: str) -> Pending:
        """Starts to bring `part` into `out` [n] on the device; `label` says in records what moves."""
        ...


class Homes(Protocol):
    """Which bucket has which home."""

    store: Store | None
    """None: weights are on the device."""

    def plan(self, buckets: "Sequence[Bucket]", axis: Axis, whole: bool) -> None:
        """Called once with all buckets, before anything is allocated: raises `ConfigError` for what will not fit.
        `whole`: gradients are summed on the device, whole, and leave once a step. Collective."""
        ...

    def of(self, bucket: "Bucket") -> Home | None:
        """None: beside the weights."""
        ...


class Optimizer(Protocol):
    """Updates master weights where they live."""

    def step(self, shards: Iterable["Shard"], lr: float, scale: float) -> Iterable["Shard"]:
        """One update with gradient * `scale` and `lr` times each group's own learning rate; gives each shard back as
        soon as it is updated."""
        ...

    def leave(self, unused: frozenset[str]) -> None:
        """The next step leaves these parameters, which no rank's backward reached, as they are."""
        ...

    def state_of(self, shard: "Shard") -> Mapping[str, Mapping[str, Tensor]]:
        """Optimizer state by parameter name: flat tensors of the shard's slice, and scalars."""
        ...


class Stage(Protocol):
    """A run of blocks that one rank computes."""

    index: int

    def expect(self, micro_batch: int, x: Any) -> None:
        """What the forward of `micro_batch` needs of the stage before may come from now on."""
        ...

    def expect_gradients(self, micro_batch: int) -> None: ...

    def forward(self, micro_batch: int, x: Any) -> None: ...

    def backward(self, micro_batch: int) -> None: ...

    def input_backward(self, micro_batch: int) -> None:
        """The part of the backward that the stage before waits for."""
        ...

    def weight_backward(self, micro_batch: int) -> None:
        """The rest of it."""
        ...


Schedule = Callable[[int, int, int], list[list["Action"]]]
"""A pure function (stages, ranks, micro-batches) -> the actions of each rank, in order."""

ModelSource = nn.Module | Callable[[], nn.Module]
"""A module on any device, meta too, or a function that builds one."""
