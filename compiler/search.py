"""The search over microbatch counts, meshes and stages: for each count the best pipeline, by composition and dynamic
programming.

Microbatch counts are the divisors of the batch, thinned to about six, then the neighbours of the best. Every submesh
size and logical shape is an option for every run of layers. Where memory binds, each option is offered again with bytes
priced into its seconds (λ at three levels), so that leaner shardings of the same meshes stand for choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np

from ..costmodel.cluster import Cluster
from ..costmodel.memory import FRAMEWORK_BYTES
from . import inter_op
from .compose import Composer, Intervals
from .graph import Graph
from .layers import Layering
from .pricing import MeshPricer
from .problem import Restriction
from .recompute import recompute_of
from .strategy import InfeasibleError, Strategy, divide, divisors_of

__all__ = [
    "Candidate",
    "Option",
    "Search",
    "find_candidates",
    "infeasible",
    "microbatch_counts",
    "nearest",
    "usable_bytes",
    "usable_counts",
]


@dataclass(frozen=True)
class Option:
    """A way to use some devices for a stage. place: where the caller wants it, as (first layer, end layer, first
    device)."""

    shape: tuple[int, ...]
    num_devices: int
    restriction: Restriction
    byte_weight: float = 0.0
    place: tuple[int, int, int] | None = None


@dataclass
class Candidate:
    """The best pipeline found for one microbatch count."""

    microbatches: int
    pipeline: inter_op.Pipeline
    composers: list[Composer]
    options: list[Option]


@dataclass
class Search:
    """Everything that the passes share."""

    graph: Graph
    cluster: Cluster
    global_batch: int
    optimizer: str
    schedule: str
    progress: Callable[[str, float], None]
    recompute: str = "none"
    layering: Layering = field(init=False)  # set by the first pass
    passes: dict[str, float] = field(default_factory=dict)
    misses: list[inter_op.Infeasible] = field(default_factory=list)
    bounds: dict[int, float] = field(
        default_factory=dict
    )  # microbatches → seconds that no plan of the tables undercuts

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's seconds to the pass of this name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.passes[name] = self.passes.get(name, 0.0) + time.perf_counter() - start


# ---- the search


def microbatch_counts(global_batch: int, strategy: Strategy | None) -> list[int]:
    """Divisors of the batch that the strategy can use, thinned to about six; ``_best`` then looks at the neighbours of
    the best."""
    divisors = usable_counts(global_batch, strategy)
    return divisors[:: max(1, (len(divisors) + 5) // 6)]


def usable_counts(global_batch: int, strategy: Strategy | None) -> list[int]:
    """Divisors of the batch whose microbatches the strategy can cut."""
    divisors = divisors_of(global_batch)
    if strategy is not None:
        divisors = [m for m in divisors if (global_batch // m) % strategy.data_parts == 0]
        # a pipeline with fewer microbatches than stages only idles
        divisors = [m for m in divisors if m >= strategy.num_stages] or divisors[-1:]
    return divisors


def find_candidates(search: Search, counts: Sequence[int], strategy: Strategy | None, refine: bool) -> list[Candidate]:
    """A pipeline for each of these microbatch counts (and the neighbours of the best), fastest first."""
    tried: dict[int, Candidate | None] = {}

    def attempt(m: int) -> None:
        if m not in tried:
            search.progress("search", len(tried) / (len(counts) + 2))
            tried[m] = _search_at(search, m, strategy)

    def ranked() -> list[Candidate]:
        return sorted((c for c in tried.values() if c is not None), key=lambda c: c.pipeline.objective_s)

    for m in counts:
        attempt(m)
    if refine:
        divisors, found = usable_counts(search.global_batch, strategy), ranked()
        at = divisors.index(found[0].microbatches) if found else len(divisors) - 1
        for m in {divisors[max(0, at - 1)], divisors[min(len(divisors) - 1, at + 1)]}:
            attempt(m)
    return ranked()


def _search_at(search: Search, m: int, strategy: Strategy | None) -> Candidate | None:
    """The best pipeline with ``m`` microbatches; None if nothing fits (the miss is noted)."""
    try:
        graph = search.graph.with_batch(search.global_batch // m)
    except ValueError:
        return None
    plain = stage_options(search.cluster, strategy, search.layering)
    options = list(plain)
    if (missing := _aggregate_miss(search, graph, m)) > 0:
        number = search.cluster.num_devices
        short, limit = missing / number, sum(usable_bytes(search.cluster)) / number
        reason = (
            f"with {m} microbatches even one stage on all {number} devices needs at least {limit + short:,.0f} bytes "
            f"per device where the limit is {limit:,.0f}: {short:,.0f} bytes are missing"
        )
        search.misses.append(inter_op.Infeasible(reason, short, needed_bytes=limit + short))
        return None
    composers, costs = _composed(search, graph, m, options)
    free = _stages(search, m, options, costs, strategy, limited=False)
    if isinstance(free, inter_op.Pipeline):  # without a memory limit: no plan with m microbatches is faster than this
        search.bounds[m] = free.bound_s
    found = _stages(search, m, options, costs, strategy)
    if not isinstance(found, inter_op.Infeasible) and found.objective_s <= search.bounds.get(m, 0.0) * 1.001:
        return Candidate(m, found, composers, options)
    # memory binds: price bytes at several levels, so that leaner shardings of the same meshes stand for choice
    limit = min(usable_bytes(search.cluster))
    quickest = min((float(c.seconds[0, -1]) for c in costs if isfinite(c.seconds[0, -1])), default=0.0)
    for factor in (0.3, 3.0, 30.0):
        for index, option in enumerate(plain):
            if option.num_devices == 1:
                continue
            lean = replace(option, byte_weight=factor * quickest / limit)
            base = composers[index]
            composer = replace(base, byte_weight=lean.byte_weight, _tables={})
            with search.timed("compose"):
                costs.append(composer.intervals())
            options.append(lean)
            composers.append(composer)
    found = _stages(search, m, options, costs, strategy)
    if isinstance(found, inter_op.Infeasible):
        search.misses.append(found)
        return None
    return Candidate(m, found, composers, options)


def _aggregate_miss(search: Search, graph: Graph, m: int) -> float:
    """Bytes by which one copy of everything (weights, gradients, states, one microbatch's activations) exceeds all
    devices together.

    Whatever the plan, each of these bytes lies on some device; where they do not fit, no mesh needs to be tried."""
    single = _composer(search, graph, m, Option((), 1, Restriction()))
    with search.timed("compose"):
        saved = float(single.intervals().saved[0, -1])
    weights = sum(  # each once, though layers that share one would each count it
        sum(single.pricer.parameter_memory(node.meta["type"], (), node.meta["source"].requires_grad).values())
        for node in graph.placeholders("parameter")
    )
    return weights + saved - sum(usable_bytes(search.cluster))


def _composed(
    search: Search, graph: Graph, m: int, options: Sequence[Option]
) -> tuple[list[Composer], list[Intervals]]:
    """A composer and its intervals per option; options that differ only in their place share them."""
    made: dict[tuple[tuple[int, ...], tuple[str | None, ...]], tuple[Composer, Intervals]] = {}
    for option in options:
        key = option.shape, option.restriction.roles
        if key not in made:
            composer = _composer(search, graph, m, option)
            with search.timed("compose"):
                made[key] = composer, composer.intervals()
    pairs = [made[option.shape, option.restriction.roles] for option in options]
    return [composer for composer, _ in pairs], [costs for _, costs in pairs]


def _composer(search: Search, graph: Graph, m: int, option: Option) -> Composer:
    pricer = MeshPricer(search.cluster, 0, option.shape, search.optimizer)
    in_flight = float(min(m, 4))
    again = recompute_of(search.graph, search.layering, search.recompute, search.schedule)
    return Composer(graph, search.layering, pricer, m, option.restriction, option.byte_weight, in_flight, again)


def _stages(
    search: Search,
    m: int,
    options: Sequence[Option],
    costs: Sequence[Intervals],
    strategy: Strategy | None,
    limited: bool = True,
) -> inter_op.Pipeline | inter_op.Infeasible:
    cluster = search.cluster
    with search.timed("stages"):
        table = inter_op.StageTable(
            num_layers=len(search.layering.layers),
            num_devices=cluster.num_devices,
            devices=np.array([o.num_devices for o in options]),
            seconds=np.stack([_placed(c.seconds, o) for c, o in zip(costs, options)]),
            resident_bytes=np.stack([c.resident for c in costs]),
            saved_bytes=np.stack([c.saved for c in costs]),
            transient_bytes=np.stack([c.transient for c in costs]),
            admissible=np.array([_admissible(cluster, o) for o in options]),
            limit_bytes=np.array(usable_bytes(cluster)) if limited else np.full(cluster.num_devices, 1e30),
        )
        return inter_op.solve(
            table,
            m,
            schedule=search.schedule,
            num_stages=strategy.num_stages if strategy else None,
        )


def _placed(seconds: np.ndarray, option: Option) -> np.ndarray:
    """The seconds of an option, inf but for the layers of its place."""
    if option.place is None:
        return seconds
    first, end, _ = option.place
    only = np.full_like(seconds, np.inf)
    only[first, end] = seconds[first, end]
    return only


def stage_options(cluster: Cluster, strategy: Strategy | None, layering: Layering) -> list[Option]:
    """Every submesh size and logical shape that a stage may have, or those that the strategy forces."""
    if strategy is not None and strategy.stages:
        keys = [layer.class_key for layer in layering.layers]
        bounds = divide(keys, [stage.share for stage in strategy.stages])
        options, offset = [], 0
        for stage, first, end in zip(strategy.stages, bounds, bounds[1:]):
            place = first, end, offset
            options.append(Option(stage.mesh_shape, stage.num_devices, Restriction(stage.roles), place=place))
            offset += stage.num_devices
        return options
    if strategy is not None:
        n = strategy.dp * strategy.tp
        return [Option(strategy.mesh_shape, n, Restriction(strategy.roles))]
    total = cluster.num_devices
    per_host = cluster.hosts[0].num_devices
    if total <= 8:
        sizes = list(range(1, total + 1))
    else:
        sizes = [s for s in (1 << k for k in range(20)) if s <= min(per_host, total)]
        hosts = total // per_host
        sizes += [
            per_host * k
            for k in range(1, hosts + 1)
            if per_host * k not in sizes and (hosts <= 4 or k & (k - 1) == 0 or k == hosts)
        ]
    options = []
    for size in sizes:
        shapes: list[tuple[int, ...]] = [()] if size == 1 else [(size,)]
        for minor in range(2, size):
            major = size // minor
            if major * minor != size or minor > per_host:
                continue
            if size <= per_host and major < minor:
                continue  # inside a host both orders cost the same
            shapes.append((major, minor))
        options += [Option(shape, size, Restriction()) for shape in shapes]
    return options


def _admissible(cluster: Cluster, option: Option) -> list[bool]:
    """Where the submesh may start: inside one host, or at a host's first device for whole hosts; or only at its
    place."""
    if option.place is not None:
        return [device == option.place[2] for device in range(cluster.num_devices)]
    flags, size = [], option.num_devices
    for device in range(cluster.num_devices):
        host = cluster.host_of(device)
        begin = sum(h.num_devices for h in cluster.hosts[:host])
        room = cluster.hosts[host].num_devices - (device - begin)
        flags.append(device + size <= cluster.num_devices and (size <= room or device == begin))
    return flags


def usable_bytes(cluster: Cluster) -> list[float]:
    """Usable bytes per device: its memory less what the framework itself takes."""
    devices = [cluster.device(d) for d in range(cluster.num_devices)]
    return [d.memory_bytes - FRAMEWORK_BYTES[d.kind] for d in devices]


# ---- when nothing fits


def infeasible(search: Search) -> InfeasibleError:
    """The error that says what is missing where, from the nearest miss of the search."""
    if not search.misses:
        return InfeasibleError(
            f"no microbatch count of global_batch {search.global_batch} suits this model "
            "(its graph needs batch multiples that none of them gives); use another global_batch"
        )
    miss = nearest(search.misses)
    where = ""
    if miss.choice is not None:
        names = [layer.name for layer in search.layering.layers[miss.choice.first_layer : miss.choice.end_layer]]
        where = f" (stage {miss.stage} holds {names[0]}{' … ' + names[-1] if len(names) > 1 else ''})"
    fits = (
        f"; {miss.needed_bytes / 2**20:,.1f} MiB per device beside the framework would fit: "
        if isfinite(miss.needed_bytes)
        else "; "
    )
    remedy = "use more devices, devices with more memory, more microbatches or a smaller batch"
    return InfeasibleError(f"no plan fits {search.cluster.name}: {miss.reason}{where}{fits}{remedy}")


def nearest(misses: Sequence[inter_op.Infeasible]) -> inter_op.Infeasible:
    """The miss by least, among real pipelines where there are any (an aggregate miss is only a floor)."""
    return min(misses, key=lambda miss: (miss.choice is None, miss.missing_bytes))
