"""How long collectives take over a network of two levels: links inside of nodes, and slower ones across. Pure.

    all_gather, reduce_scatter of S bytes over N ranks     S (N-1)/N over the links inside
    on q ranks of each of n nodes                          S (n-1)/n over the q links that leave a node
    all_reduce                                             both one after the other

The two levels work at the same time: rings run through nodes in parallel, one for each link that leaves. What takes
longer counts. Each of the steps of a ring costs a latency.
"""

from dataclasses import dataclass

from zero3d.planner.hardware import Cluster

ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1}


@dataclass(frozen=True)
class Group:
    """`size` ranks of a collective, every `stride`th of the world."""

    size: int
    stride: int = 1

    def together(self, cluster: Cluster) -> int:
        """Of these, how many one node has."""
        return min(self.size, max(1, cluster.per_node // self.stride))


def collective(cluster: Cluster, group: Group, verb: str, num_bytes: float, *, one_ring: bool = False) -> float:
    """Seconds of a call on a tensor that is `num_bytes` large where it is whole. `one_ring`: a single ring runs through
    all ranks, so that one link of a node's carries all that leaves it."""
    if group.size == 1:
        return 0.0
    together = group.together(cluster)
    nodes = -(-group.size // together)
    reached = cluster.device.rates.link
    inside = num_bytes * (group.size - 1) / group.size / (cluster.inside.bandwidth * reached) if together > 1 else 0.0
    leaving = cluster.across.bandwidth * reached * (1 if one_ring else together)
    across = num_bytes * (nodes - 1) / nodes / leaving
    steps = (together - 1) * cluster.inside.latency + (nodes - 1) * cluster.across.latency
    return ROUNDS[verb] * (max(inside, across) + steps)


def message(cluster: Cluster, stride: int, num_bytes: float) -> float:
    """Seconds from one rank to that `stride` ranks on."""
    link = cluster.inside if stride < cluster.per_node else cluster.across
    # A message between nodes is no faster than one inside, and one inside rarely gets all of its link.
    rate = min(cluster.inside.bandwidth * cluster.device.rates.pair, link.bandwidth * cluster.device.rates.link)
    return cluster.device.rates.hop + num_bytes / rate
