"""What a rank sends in a step: bytes, as ideal rings do, and how many calls it makes, by axis. Pure.

A rank has L trained buckets, of B in all; its step has T turns and M micro-batches. Over dp:

    reductions   "step"           L at each level
                 "micro-batch"    T L
    level 0                       L more, which gather the sums (over two ranks one call does both)
    level 1, 2                    L publish new weights
    level 3                       each of M forwards and backwards of a stage gathers the buckets that it uses: about
                                  2 M B; B in all where what is gathered is kept (zero.keep_gathered)
    the tally                     1

Over tp each micro-batch makes the calls of its blocks; over pp it sends, and receives, what crosses.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero3d.comm.bucket import Bucket
from zero3d.pipeline.action import Action, Kind, whole_backwards
from zero3d.planner.gathering import PaperWindows
from zero3d.planner.keeping import DTYPES, Keeping
from zero3d.planner.reducing import PaperReducer
from zero3d.planner.standing import Standing, all_actions, stage_buckets, standing_of, windows_of
from zero3d.planner.workload import Workload

TALLY, NUMBER = 52, 8
"""Numbers that ranks add up once a step beside one of each trained parameter, and bytes of one (`optim.tally`)."""
Pass = tuple[int, Kind]
"""A stage, and what it does."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Of a step, over one axis. num_bytes: that leave the rank"""

    num_bytes: float = 0.0
    calls: int = 0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(num_bytes=self.num_bytes + other.num_bytes, calls=self.calls + other.calls)

    def __mul__(self, times: int) -> "Sent":
        return Sent(num_bytes=self.num_bytes * times, calls=self.calls * times)


def sent_by(workload: Workload, keeping: Keeping, index: int = 0, *, few: int | None = None) -> dict[str, Sent]:
    """By axis, of those that have several ranks; of a rank that is number `index` on pp. few: micro-batches from which
    its buckets are known."""
    any_size = replace(keeping, micro_batch=min(keeping.micro_batch, 2), micro_batches=few or keeping.micro_batches)
    standing = standing_of(workload, any_size, index)
    ranks = all_actions(keeping, keeping.micro_batches)
    actions = whole_backwards(ranks[index])
    found = {}
    if keeping.group > 1:
        found["dp"] = _over_dp(standing, keeping, actions)
    if workload.tp > 1:
        found["tp"] = _over_tp(standing, workload, keeping)
    if keeping.pp > 1:
        found["pp"] = _over_pp(standing, workload, keeping, ranks, index)
    return found


def _over_dp(standing: Standing, keeping: Keeping, actions: Sequence[Action]) -> Sent:
    trained = [bucket for bucket in standing.held.buckets if bucket.trainable]
    away, others, level = standing.kept.away, (keeping.group - 1) / keeping.group, keeping.effective_level
    turns = sum(action.kind is not Kind.FORWARD for action in actions)
    total = Sent(num_bytes=2 * NUMBER * (TALLY + sum(len(one.slots) for one in trained)) * others, calls=1)
    for bucket in trained:
        width = DTYPES[bucket.dtype]
        wire, held = keeping.wire_of(width) * bucket.numel * others, keeping.held_of(width) * bucket.numel * others
        at_once = level == 0 and bucket not in away and _at_once(bucket, keeping)
        reduction = Sent(num_bytes=2 * wire if at_once else wire, calls=1)
        total += reduction * (turns if keeping.every_turn else 1)
        if level == 0 and not at_once:
            total += Sent(num_bytes=held, calls=1)
        if level in (1, 2):
            total += Sent(num_bytes=width * bucket.numel * others, calls=1)
    if level == 3:
        for bucket, times in _gathers(standing, keeping, actions).items():
            total += Sent(num_bytes=DTYPES.get(bucket.dtype, 4) * bucket.numel * others, calls=1) * times
    return total


def _at_once(bucket: Bucket, keeping: Keeping) -> bool:
    """Two ranks sum and spread fp32 with one call."""
    width = DTYPES[bucket.dtype]
    return not keeping.every_turn and keeping.group == 2 and keeping.held_of(width) == keeping.wire_of(width) == 4


def _gathers(standing: Standing, keeping: Keeping, actions: Sequence[Action]) -> Counter[Bucket]:
    """Of level 3, how often each bucket is gathered. What a pass finds there hangs on the pass before it."""
    held = standing.held
    passes = [(action.stage, action.kind) for action in actions]
    before_each: list[Pass | None] = [None, *passes]
    found: Counter[Bucket] = Counter()
    if keeping.keeps_gathered:
        return Counter(dict.fromkeys(held.buckets, 1))
    for (before, one), times in Counter(zip(before_each, passes)).items():
        windows = windows_of(PaperReducer([], keeping, frozenset()), keeping, held)
        if before is not None:
            _go(windows, standing, before)
        already = len(windows.gathered)
        _go(windows, standing, one)
        for bucket in windows.gathered[already:]:
            found[bucket] += times
    return found


def _go(windows: PaperWindows, standing: Standing, one: Pass) -> None:
    stage, kind = one
    blocks = stage_buckets(standing.held, standing.at_stage[stage])
    if kind is Kind.FORWARD:
        windows.forward(blocks, standing.held.outside)
    elif kind is Kind.WEIGHT:  # Its gradients are made of what the other half of the backward has kept.
        windows.end_turn()
    else:
        windows.backward(blocks, standing.held.outside)


def _over_tp(standing: Standing, workload: Workload, keeping: Keeping) -> Sent:
    """A block that is computed again makes the calls of its forward again."""
    total = Sent()
    for place in standing.places:
        again = place.block and keeping.recompute == "block"
        for one, times in ((place.part.forward, 2 if again else 1), (place.part.backward, 1)):
            for call in one.calls:
                num_bytes = call.num_bytes.of(keeping.micro_batch) * (workload.tp - 1) / workload.tp
                total += Sent(num_bytes=num_bytes * (2 if call.verb == "all_reduce" else 1), calls=1) * times
    return total * keeping.micro_batches


def _over_pp(
    standing: Standing, workload: Workload, keeping: Keeping, ranks: Sequence[Sequence[Action]], index: int
) -> Sent:
    """Calls are sends and receives."""
    rank_of = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
    last = keeping.stages - 1
    out = Sent(num_bytes=workload.blocks[0].leaving.of(keeping.micro_batch), calls=1)
    total = Sent()
    for action in ranks[index]:
        if action.kind is Kind.WEIGHT:
            continue
        before = action.stage > 0 and rank_of[action.stage - 1] != index
        after = action.stage < last and rank_of[action.stage + 1] != index
        sends, receives = (after, before) if action.kind is Kind.FORWARD else (before, after)
        total += out * sends + Sent(calls=receives)
    if rank_of[0] != rank_of[last]:
        for bucket in standing.held.tied:  # The first and the last stage tell each other what their shards have.
            elements = bucket.numel if keeping.effective_level == 0 else bucket.shard_numel
            total += Sent(num_bytes=keeping.held_of(DTYPES[bucket.dtype]) * elements, calls=2)
    return total
