"""The usual home of the optimizer's part of a shard: beside the weights."""

from collections.abc import Sequence

from zero3d.comm.bucket import Bucket
from zero3d.contracts import Axis, Home, Store


class Beside:
    """The `Homes` of a run without offload."""

    store: Store | None = None

    def plan(self, buckets: Sequence[Bucket], axis: Axis, whole: bool) -> None:
        return None

    def of(self, bucket: Bucket) -> Home | None:
        return None


BESIDE = Beside()
