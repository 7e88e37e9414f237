"""Overlap of gradient reductions with the backward of the last microbatch, and the choice of their routes.

Gradients are summed in buckets, as ``runtime/parameters/gradients.py`` makes them: parameters with equal axes and
dtype, the last used first, the first bucket small. A bucket starts when its last gradient is there and the buckets
before it have started, and they travel one after another. While the backward still runs, the share ``Device.overlap``
of a transfer costs nothing; the rest of it, and what comes after the backward, is exposed.

Lower bounds of the search count reductions as exposed, so they are lowered by the most that can hide. In one stage
that is the share ``Device.overlap`` of one microbatch's backward, which is less than that share of its seconds per
microbatch t. In all stages together it is that share of the seconds that reducing every gradient could take.
With the largest of all devices' shares o, m microbatches and a bound W ≥ m t of the exposed makespan, the true one is
at least W (1 − o/m) and at least W − o · (all reductions).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch.fx import Node

from ...costmodel.cluster import Cluster
from ...costmodel.codecs import CODECS
from ..ir.graph import Graph
from ..plan.plan import BUCKET_BYTES, GradientReduction, Stage, gradient_buckets
from .gradient_communication import GradientRoute
from .pricing import MeshPricer, gradient_route, gradient_routes, gradient_type

__all__ = [
    "Bucket",
    "Gradient",
    "bucket_seconds",
    "choose_routes",
    "coding_source",
    "fastest_route_index",
    "hidden_seconds",
    "itemsize_of",
    "lossy_notes",
    "lower_by_overlap",
    "make_buckets",
    "max_bucket_seconds",
    "max_hidden_seconds",
    "max_overlap",
    "max_reduction_seconds",
    "raise_by_overlap",
    "route_source",
]  # fmt: skip


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient on one device. axes: over which it is a sum of addends; key: the dtype, which
    must agree within a bucket."""

    name: str
    axes: tuple[int, ...]
    nbytes: float
    key: Hashable = None


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed in one message."""

    axes: tuple[int, ...]
    gradients: tuple[Gradient, ...]

    @property
    def nbytes(self) -> float:
        """Size of the message."""
        return sum(gradient.nbytes for gradient in self.gradients)


def make_buckets(gradients: Sequence[Gradient], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """The buckets of gradients given in program order, those without axes left out, in the order in which they
    start."""
    keys = [((gradient.axes, gradient.key) if gradient.axes else None, gradient.nbytes) for gradient in gradients]
    groups = gradient_buckets(keys, bucket_bytes)
    return [Bucket(gradients[group[0]].axes, tuple(gradients[k] for k in group)) for group in groups]


def hidden_seconds(
    buckets: Sequence[Bucket],
    seconds: Callable[[Bucket], float],
    ready_s: Mapping[str, float],
    backward_s: float,
    overlap: float,
) -> tuple[float, float]:
    """(all seconds of the reduction, those of them that hide).

    ready_s: gradient name → when its parameter's last gradient is there, seconds after the backward began, which takes
    ``backward_s``. overlap: the share of a transfer that costs nothing while the device computes.
    """
    total = beside = wire_free = started = 0.0
    for bucket in buckets:
        started = max(started, *(ready_s[gradient.name] for gradient in bucket.gradients))
        begin, long = max(started, wire_free), seconds(bucket)
        wire_free = begin + long
        total += long
        beside += max(0.0, min(wire_free, backward_s) - begin)
    return total, overlap * beside


def max_hidden_seconds(graph: Graph, cluster: Cluster, optimizer: str, shapes: Iterable[tuple[int, ...]]) -> float:
    """Upper bound on the seconds of reductions that can hide in any plan over meshes of these shapes."""
    share, parameters = max_overlap(cluster), list(graph.placeholders("parameter"))
    if not share:
        return 0.0
    # of a shared weight several stages may hold a copy
    parameters += [node for node in parameters for _ in node.meta["source"].aliases]
    meshes = [MeshPricer(cluster, 0, shape, optimizer, mixed=graph.mixed) for shape in set(shapes)]
    return share * max((max_reduction_seconds(pricer, parameters) for pricer in meshes), default=0.0)


def lower_by_overlap(bound_s: float, microbatches: int, cluster: Cluster, hidden_s: float) -> float:
    """Turn a bound that counts reductions as exposed into a bound of the true makespan."""
    return max(bound_s * (1 - max_overlap(cluster) / microbatches), bound_s - hidden_s)


def raise_by_overlap(seconds: float, microbatches: int, cluster: Cluster, hidden_s: float) -> float:
    """The inverse of ``lower_by_overlap``: a larger bound with exposed reductions cannot be faster than ``seconds``."""
    share = max_overlap(cluster) / microbatches
    return min(seconds / (1 - share) if share < 1 else seconds + hidden_s, seconds + hidden_s)


def max_overlap(cluster: Cluster) -> float:
    """The largest share of a backward that any device's reductions may run beside."""
    return max(host.device.overlap for host in cluster.hosts) if cluster.num_devices > 1 else 0.0


def max_reduction_seconds(pricer: MeshPricer, parameters: Iterable[Node]) -> float:
    """Seconds to sum the gradient of each of these alone and whole, over the slowest groups of a mesh."""
    trained = [node for node in parameters if node.meta["source"].requires_grad]
    return _slowest_sums(pricer, Counter(gradient_type(node.meta["type"], pricer.mixed).nbytes for node in trained))


def max_bucket_seconds(pricer: MeshPricer) -> float:
    """Seconds to sum a full bucket over the slowest groups of a mesh."""
    return _slowest_sums(pricer, {BUCKET_BYTES: 1})


def _slowest_sums(pricer: MeshPricer, sizes: Mapping[float, int]) -> float:
    """Seconds to sum so many tensors of each number of bytes, one by one."""
    num = len(pricer.mesh_shape)
    groups = [(axis,) for axis in range(num)] + ([tuple(range(num))] if num > 1 else [])
    each = (sum(count * pricer.reduce_seconds(size, axes) for size, count in sizes.items()) for axes in groups)
    return max(each, default=0.0)


# ---- what is chosen


def choose_routes(
    pricer: MeshPricer,
    buckets: Sequence[Bucket],
    exposed: Callable[[Callable[[Bucket], float]], float],
    reductions: Sequence[GradientReduction] = (),
) -> dict[tuple[int, ...], tuple[str, str]]:
    """Return (algorithm, codec) per group of axes that sums some bucket: those of the least exposed and coding seconds.

    exposed: seconds of a stage's reductions that nothing hides, given the seconds of each bucket; reductions: those
    whose route is fixed. Raises ValueError for a fixed route that its groups cannot run.
    """
    fixed = {one.axes: (one.algorithm, one.compressor) for one in reductions}
    groups: dict[tuple[int, ...], list[Bucket]] = {}
    for bucket in buckets:
        groups.setdefault(bucket.axes, []).append(bucket)
    names: list[list[tuple[str, str]]] = []
    for axes, members in groups.items():
        if axes in fixed:
            names.append([fixed[axes]])
            for size in {itemsize_of(bucket) for bucket in members} if fixed[axes] != ("backend", "none") else ():
                gradient_route(pricer, axes, size, *fixed[axes])
        else:
            names.append(_undominated_routes(pricer, axes, members))
    combinations = [dict(zip(groups, chosen)) for chosen in product(*names)]
    if len(combinations) == 1:
        return combinations[0]

    def seconds(chosen: Mapping[tuple[int, ...], tuple[str, str]]) -> float:
        prices = {id(bucket): bucket_seconds(pricer, bucket, chosen[bucket.axes]) for bucket in buckets}
        return exposed(lambda bucket: prices[id(bucket)][1]) + sum(coding for coding, _ in prices.values())

    prices = [seconds(chosen) for chosen in combinations]
    lossy = [any(_is_lossy(way) for axes, way in chosen.items() if axes not in fixed) for chosen in combinations]
    return combinations[fastest_route_index(prices, lossy, pricer.communication.gain)]


def fastest_route_index(seconds: Sequence[float], lossy: Sequence[bool], gain: float) -> int:
    """Index of the fastest route. A lossy one wins only if it is at least ``gain`` times faster than any exact one."""
    ranked = sorted(range(len(seconds)), key=seconds.__getitem__)
    exact = next((index for index in ranked if not lossy[index]), ranked[0])
    return ranked[0] if gain * seconds[ranked[0]] <= seconds[exact] else exact


def _is_lossy(way: tuple[str, str]) -> bool:
    return CODECS[way[1]].lossy


def bucket_seconds(pricer: MeshPricer, bucket: Bucket, way: tuple[str, str]) -> tuple[float, float]:
    """(coding, sending) of one bucket."""
    if way == ("backend", "none"):
        return 0.0, pricer.reduce_seconds(bucket.nbytes, bucket.axes)
    priced = gradient_route(pricer, bucket.axes, itemsize_of(bucket), *way)
    return priced.coding(bucket.nbytes), priced.sending(bucket.nbytes)


def route_source(pricer: MeshPricer, bucket: Bucket, way: tuple[str, str]) -> str:
    """The origin of the seconds that a bucket travels: "measured", "scaled" or "analytic"."""
    if way == ("backend", "none"):
        return pricer.reduce_source(bucket.axes)
    return gradient_route(pricer, bucket.axes, itemsize_of(bucket), *way).source


def coding_source(pricer: MeshPricer, way: tuple[str, str]) -> str:
    """The origin of the seconds to encode and decode: "measured" or "analytic"."""
    return "measured" if pricer.device.coding_rate(way[1]) else "analytic"


def itemsize_of(bucket: Bucket) -> int:
    """Bytes of an element of the bucket's gradients, which agree in their dtype."""
    dtype: Hashable = bucket.gradients[0].key
    assert isinstance(dtype, torch.dtype), dtype
    return dtype.itemsize


def _undominated_routes(pricer: MeshPricer, axes: tuple[int, ...], buckets: Sequence[Bucket]) -> list[tuple[str, str]]:
    """The routes that are faster than every other exact (or lossy) one for some of these buckets."""
    if pricer.communication.sums_exactly:
        return [("backend", "none")]
    offered: dict[tuple[str, str], list[GradientRoute]] = {}
    sizes = {itemsize_of(bucket) for bucket in buckets}
    for size in sorted(sizes):
        for way in gradient_routes(pricer, axes, size):
            offered.setdefault((way.algorithm, way.compressor), []).append(way)
    shapes = sorted({(bucket.nbytes, itemsize_of(bucket)) for bucket in buckets})
    prices: dict[tuple[str, str], tuple[float, ...]] = {}
    for name, ways in offered.items():
        if len(ways) == len(sizes):
            of = dict(zip(sorted(sizes), ways))
            coding = sum(of[itemsize_of(bucket)].coding(bucket.nbytes) for bucket in buckets)
            prices[name] = (coding, *(of[size].sending(nbytes) for nbytes, size in shapes))
    kept: list[tuple[str, str]] = []
    for name, price in prices.items():
        rivals = [other for other in kept if _is_lossy(other) == _is_lossy(name)]
        if not any(_dominates(prices[other], price) for other in rivals):
            kept = [other for other in kept if other not in rivals or not _dominates(price, prices[other])] + [name]
    return kept or [("backend", "none")]


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """True if ``one`` is nowhere slower than ``other``."""
    return all(a <= b for a, b in zip(one, other, strict=True))


def lossy_notes(stages: Sequence[Stage], codes: Mapping[str, str]) -> list[str]:
    """A line for a plan whose gradients are not summed exactly, and for each of its ``codes``."""
    notes = [f"{what} are compressed by {code}, which is lossy: training differs" for what, code in codes.items()]
    codecs = {wire.compressor for stage in stages for wire in stage.wire}
    lossy = sorted(name for name in codecs if name in CODECS and CODECS[name].lossy)
    if lossy:
        text = f"gradients are compressed by {', '.join(lossy)}, which is lossy: training differs from the exact sum"
        notes.insert(0, text)
    return notes
