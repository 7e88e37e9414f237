"""How much of the gradients' reductions may hide behind compute: bounds count them as exposed, so they are lowered.

Of one stage at most the share ``Device.overlap`` of one microbatch's backward hides, which is less than that share of
its pace t; and of all stages at most that share of what reducing every gradient could take. With the largest of all
devices' shares o, m microbatches and a bound W ≥ m t of the exposed makespan, the true one is at least W (1 − o/m) and
at least W − o · (all reductions).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..costmodel.cluster import Cluster
from .graph import Graph
from .pricing import MeshPricer, gradient_type

__all__ = ["lowered", "most_hidden_seconds", "overlap", "raised"]


def most_hidden_seconds(graph: Graph, cluster: Cluster, optimizer: str, shapes: Iterable[tuple[int, ...]]) -> float:
    """Seconds of reductions that can hide, whatever the plan over meshes of these shapes."""
    share = overlap(cluster)
    return share * _most_reduction(graph, cluster, optimizer, shapes) if share else 0.0


def lowered(bound_s: float, microbatches: int, cluster: Cluster, hidden_s: float) -> float:
    """A bound that counts reductions as exposed, made one of the true makespan."""
    return max(bound_s * (1 - overlap(cluster) / microbatches), bound_s - hidden_s)


def raised(seconds: float, microbatches: int, cluster: Cluster, hidden_s: float) -> float:
    """What counts reductions as exposed and is ``lowered`` to these seconds: what is above can be no faster."""
    share = overlap(cluster) / microbatches
    return min(seconds / (1 - share) if share < 1 else seconds + hidden_s, seconds + hidden_s)


def overlap(cluster: Cluster) -> float:
    """The largest share of a backward that any device's reductions may run beside."""
    return max(host.device.overlap for host in cluster.hosts) if cluster.num_devices > 1 else 0.0


def _most_reduction(graph: Graph, cluster: Cluster, optimizer: str, shapes: Iterable[tuple[int, ...]]) -> float:
    """Seconds to sum every gradient alone and whole, over the slowest groups of any mesh."""
    sizes: Counter[int] = Counter()
    for node in graph.placeholders("parameter"):
        if node.meta["source"].requires_grad:  # of a shared weight several stages may hold a copy
            sizes[gradient_type(node.meta["type"], graph.mixed).nbytes] += 1 + len(node.meta["source"].aliases)
    worst = 0.0
    for shape in set(shapes):
        pricer = MeshPricer(cluster, 0, shape, optimizer)
        groups = [(axis,) for axis in range(len(shape))] + ([tuple(range(len(shape)))] if len(shape) > 1 else [])
        for axes in groups:
            worst = max(worst, sum(count * pricer.reduce_seconds(size, axes) for size, count in sizes.items()))
    return worst
