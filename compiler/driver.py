"""The pass list from a graph to a plan, readable top to bottom. Every pass is named and timed (``provenance["passes"]``).

    layers      cluster the graph's ops into layers and classes                       layers.py
    compose     per mesh: tables per layer class, costs of all intervals               compose.py, eliminate.py
    stages      dynamic programming over layers × devices                              inter_op.py
    refine      per chosen stage: the whole stage as one problem, memory as a constraint   intra_op.py
    simulate    the schedule's makespan with the stages' own times                     schedule.py
    alternatives  what the best pure data, tensor and pipeline plans would have cost
"""

from __future__ import annotations

import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import numpy as np
import torch

from ..costmodel.cluster import Cluster
from ..costmodel.memory import FRAMEWORK_BYTES, state_tensors
from . import inter_op
from .assemble import Assembled, assemble_stage
from .compose import Composer, Intervals
from .graph import Graph, op_name
from .layers import Layering, cluster_layers
from .plan import Plan, Prediction, Transfer
from .pricing import MeshPricer
from .problem import Restriction
from .rules import mesh_choices, rule_for
from .schedule import generate, in_flight_formula, simulate

__all__ = ["InfeasibleError", "Strategy", "make_plan", "parse_strategy"]


class InfeasibleError(ValueError):
    """No plan fits: the message names the stage, the bytes missing and what would fit."""


@dataclass(frozen=True)
class Strategy:
    """A forced shape: ``pp`` stages of ``dp`` × ``tp`` devices each."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def num_devices(self) -> int:
        """Devices that the shape uses."""
        return self.pp * self.dp * self.tp

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The logical mesh of each stage, without axes of size 1."""
        return tuple(size for size in (self.dp, self.tp) if size > 1)

    @property
    def roles(self) -> tuple[str, ...]:
        """What each axis of ``mesh_shape`` is for."""
        return tuple(role for role, size in (("data", self.dp), ("tensor", self.tp)) if size > 1)


def parse_strategy(value: Strategy | Mapping[str, int] | str | None) -> Strategy | None:
    """``{"pp": 2, "tp": 2}`` or ``"pp2,tp2"`` → Strategy. Raises ValueError on unknown keys or sizes below 1."""
    if value is None or isinstance(value, Strategy):
        return value
    rule = "a strategy gives a size ≥ 1 for some of pp, dp and tp"
    if isinstance(value, str):
        pairs: dict[str, Any] = {}
        for word in filter(None, value.replace(" ", "").split(",")):
            if word[:2] not in ("pp", "dp", "tp") or not word[2:].lstrip("=").isdigit():
                raise ValueError(f"{rule}, as in 'pp2,tp2', but got {word!r} in {value!r}")
            pairs[word[:2]] = int(word[2:].lstrip("="))
        value = pairs
    unknown = set(value) - {"pp", "dp", "tp"}
    if unknown or any(not isinstance(size, int) or size < 1 for size in value.values()):
        raise ValueError(f"{rule}, as in {{'pp': 2, 'tp': 2}}, but got {dict(value)}")
    return Strategy(**value)


@dataclass(frozen=True)
class _Option:
    """A way to use some devices for a stage."""

    shape: tuple[int, ...]
    num_devices: int
    restriction: Restriction
    byte_weight: float = 0.0


@dataclass
class _Candidate:
    """The best pipeline found for one microbatch count."""

    microbatches: int
    pipeline: inter_op.Pipeline
    composers: list[Composer]
    options: list[_Option]


@dataclass
class _Search:
    """Everything that the passes share."""

    graph: Graph
    cluster: Cluster
    global_batch: int
    optimizer: str
    schedule: str
    layering: Layering
    progress: Callable[[str, float], None]
    passes: dict[str, float] = field(default_factory=dict)
    misses: list[inter_op.Infeasible] = field(default_factory=list)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.passes[name] = self.passes.get(name, 0.0) + time.perf_counter() - start


def make_plan(
    graph: Graph,
    cluster: Cluster,
    global_batch: int,
    microbatches: int | None = None,
    strategy: Strategy | None = None,
    schedule: str = "1f1b",
    optimizer: str = "AdamW",
    alternatives: bool = True,
    progress: Callable[[str, float], None] = lambda name, fraction: None,
) -> Plan:
    """The best plan for ``graph`` on ``cluster``. Raises ValueError for bad input and InfeasibleError if nothing fits.

    global_batch: samples per step over all devices. microbatches, strategy and schedule are searched where they are None ("1f1b" never
    holds more than GPipe in the same time, so the schedule has that default). progress(pass, fraction) is called along the way.
    """
    check_batch(global_batch, microbatches)
    with _without_gc():
        return _make_plan(graph, cluster, global_batch, microbatches, strategy, schedule, optimizer, alternatives, progress)


@contextmanager
def _without_gc() -> Iterator[None]:
    """The search makes millions of small acyclic objects, through which the collector would sweep again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _make_plan(
    graph: Graph,
    cluster: Cluster,
    global_batch: int,
    microbatches: int | None,
    strategy: Strategy | None,
    schedule: str,
    optimizer: str,
    alternatives: bool,
    progress: Callable[[str, float], None],
) -> Plan:
    begin = time.perf_counter()
    if strategy and strategy.num_devices > cluster.num_devices:
        raise ValueError(f"strategy {strategy} needs {strategy.num_devices} devices, but the cluster has {cluster.num_devices}")
    search = _Search(graph, cluster, global_batch, optimizer, schedule, None, progress)  # type: ignore[arg-type]
    with search.timed("layers"):
        search.layering = cluster_layers(graph)
    if strategy and strategy.pp > len(search.layering.layers):
        raise ValueError(f"strategy asks for {strategy.pp} stages, but the model falls into {len(search.layering.layers)} layers")
    counts = [microbatches] if microbatches else _microbatch_counts(global_batch, strategy)
    if not counts or (strategy and (global_batch // counts[0]) % strategy.dp):
        size = global_batch // (microbatches or 1)
        raise ValueError(
            f"dp cuts every microbatch evenly, but got dp {strategy.dp if strategy else 1} and a microbatch of {size} samples; "
            "use fewer microbatches or a larger global_batch"
        )
    plan = _first_that_fits(search, _candidates(search, counts, strategy, refine=microbatches is None))
    others: list[dict[str, Any]] = []
    if alternatives and cluster.num_devices > 1 and strategy is None:
        with search.timed("alternatives"):
            others = _alternatives(search, plan)
    notes = tuple(_notes(search, plan))
    search.passes["total"] = time.perf_counter() - begin
    provenance = {
        "meshwright": "0.1.0",
        "torch": torch.__version__,
        "passes": {name: round(seconds, 4) for name, seconds in search.passes.items()},
        "cluster": cluster.fingerprint(),
        "strategy": None if strategy is None else {"pp": strategy.pp, "dp": strategy.dp, "tp": strategy.tp},
    }
    prediction = replace(plan.prediction, alternatives=tuple(others), notes=notes)
    return replace(plan, prediction=prediction, provenance=provenance)


def check_batch(global_batch: int, microbatches: int | None) -> None:
    """ValueError unless the batch is positive and divides into the microbatches."""
    if global_batch < 1:
        raise ValueError(f"global_batch is a positive number of samples, but got {global_batch}")
    if microbatches is not None and (microbatches < 1 or global_batch % microbatches):
        fitting = _divisors(global_batch)
        near = min(fitting, key=lambda m: abs(m - microbatches))
        raise ValueError(
            f"the batch must divide into the microbatches, but got global_batch {global_batch} and {microbatches} microbatches; "
            f"use {near}, for instance"
        )


# ---- the search


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _microbatch_counts(global_batch: int, strategy: Strategy | None) -> list[int]:
    """Divisors of the batch that the strategy can use, thinned to about six; ``_best`` then looks at the neighbours of the best."""
    divisors = _usable(global_batch, strategy)
    return divisors[:: max(1, (len(divisors) + 5) // 6)]


def _usable(global_batch: int, strategy: Strategy | None) -> list[int]:
    divisors = _divisors(global_batch)
    if strategy is not None:
        divisors = [m for m in divisors if (global_batch // m) % strategy.dp == 0]
        # a pipeline with fewer microbatches than stages only idles
        divisors = [m for m in divisors if m >= strategy.pp] or divisors[-1:]
    return divisors


def _candidates(search: _Search, counts: Sequence[int], strategy: Strategy | None, refine: bool) -> list[_Candidate]:
    """A pipeline for each of these microbatch counts (and the neighbours of the best), fastest first."""
    tried: dict[int, _Candidate | None] = {}

    def attempt(m: int) -> None:
        if m not in tried:
            search.progress("search", len(tried) / (len(counts) + 2))
            tried[m] = _search_at(search, m, strategy)

    def ranked() -> list[_Candidate]:
        return sorted((c for c in tried.values() if c is not None), key=lambda c: c.pipeline.objective_s)

    for m in counts:
        attempt(m)
    if refine:
        divisors, found = _usable(search.global_batch, strategy), ranked()
        at = divisors.index(found[0].microbatches) if found else len(divisors) - 1
        for m in {divisors[max(0, at - 1)], divisors[min(len(divisors) - 1, at + 1)]}:
            attempt(m)
    return ranked()


def _first_that_fits(search: _Search, candidates: Sequence[_Candidate]) -> Plan:
    """The plan of the fastest candidate that still fits when its stages are assembled. Raises InfeasibleError if none does."""
    if not candidates:
        raise _infeasible(search)
    for candidate in candidates[:-1]:
        try:
            return _finish(search, candidate)
        except InfeasibleError:
            continue
    return _finish(search, candidates[-1])


def _search_at(search: _Search, m: int, strategy: Strategy | None) -> _Candidate | None:
    """The best pipeline with ``m`` microbatches; None if nothing fits (the miss is noted)."""
    try:
        graph = search.graph.with_batch(search.global_batch // m)
    except ValueError:
        return None
    plain = _options(search.cluster, strategy)
    options = list(plain)
    if (missing := _aggregate_miss(search, graph, m)) > 0:
        short, limit = missing / search.cluster.num_devices, sum(_limits(search.cluster)) / search.cluster.num_devices
        reason = (
            f"with {m} microbatches even one stage on all {search.cluster.num_devices} devices needs {limit + short:,.0f} bytes per "
            f"device where the limit is {limit:,.0f}: {short:,.0f} bytes are missing"
        )
        search.misses.append(inter_op.Infeasible(reason, short, needed_bytes=limit + short))
        return None
    composers = [_composer(search, graph, m, option) for option in options]
    with search.timed("compose"):
        costs = [composer.intervals() for composer in composers]
    found = _stages(search, m, options, costs, strategy)
    if isinstance(found, inter_op.Pipeline):
        free = _stages(search, m, options, costs, strategy, limited=False)
        if isinstance(free, inter_op.Pipeline) and found.objective_s <= free.objective_s * 1.001:
            return _Candidate(m, found, composers, options)
    # memory binds: price bytes at several levels, so that leaner shardings of the same meshes stand for choice
    limit = min(_limits(search.cluster))
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
    return _Candidate(m, found, composers, options)


def _aggregate_miss(search: _Search, graph: Graph, m: int) -> float:
    """Bytes by which one copy of everything (weights, gradients, states, one microbatch's activations) exceeds all devices together.

    Whatever the plan, each of these bytes lies on some device; where they do not fit, no mesh needs to be tried."""
    with search.timed("compose"):
        costs = _composer(search, graph, m, _Option((), 1, Restriction())).intervals()
    return float(costs.resident[0, -1] + costs.saved[0, -1]) - sum(_limits(search.cluster))


def _composer(search: _Search, graph: Graph, m: int, option: _Option) -> Composer:
    pricer = MeshPricer(search.cluster, 0, option.shape, search.optimizer)
    in_flight = float(min(m, 4))
    return Composer(graph, search.layering, pricer, m, option.restriction, option.byte_weight, in_flight)


def _stages(
    search: _Search,
    m: int,
    options: Sequence[_Option],
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
            seconds=np.stack([c.seconds for c in costs]),
            resident_bytes=np.stack([c.resident for c in costs]),
            saved_bytes=np.stack([c.saved for c in costs]),
            transient_bytes=np.stack([c.transient for c in costs]),
            admissible=np.array([_admissible(cluster, o.num_devices) for o in options]),
            limit_bytes=np.array(_limits(cluster)) if limited else np.full(cluster.num_devices, 1e30),
        )
        return inter_op.solve(
            table,
            m,
            schedule=search.schedule,
            num_stages=strategy.pp if strategy else None,
        )


def _options(cluster: Cluster, strategy: Strategy | None) -> list[_Option]:
    """Every submesh size and logical shape that a stage may have, or the one that the strategy forces."""
    if strategy is not None:
        n = strategy.dp * strategy.tp
        return [_Option(strategy.mesh_shape, n, Restriction(strategy.roles))]
    total = cluster.num_devices
    per_host = cluster.hosts[0].num_devices
    if total <= 8:
        sizes = list(range(1, total + 1))
    else:
        sizes = [s for s in (1 << k for k in range(20)) if s <= min(per_host, total)]
        hosts = total // per_host
        sizes += [per_host * k for k in range(1, hosts + 1) if per_host * k not in sizes and (hosts <= 4 or k & (k - 1) == 0 or k == hosts)]
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
        options += [_Option(shape, size, Restriction()) for shape in shapes]
    return options


def _admissible(cluster: Cluster, size: int) -> list[bool]:
    """Where a submesh of ``size`` devices may start: inside one host, or at a host's first device for whole hosts."""
    flags = []
    for device in range(cluster.num_devices):
        host = cluster.host_of(device)
        begin = sum(h.num_devices for h in cluster.hosts[:host])
        room = cluster.hosts[host].num_devices - (device - begin)
        flags.append(device + size <= cluster.num_devices and (size <= room or device == begin))
    return flags


def _limits(cluster: Cluster) -> list[float]:
    """Usable bytes per device: its memory less what the framework itself takes."""
    devices = [cluster.device(d) for d in range(cluster.num_devices)]
    return [d.memory_bytes - FRAMEWORK_BYTES[d.kind] for d in devices]


# ---- from a pipeline to a plan


def _finish(search: _Search, best: _Candidate) -> Plan:
    cluster, layering, m = search.cluster, search.layering, best.microbatches
    graph = search.graph.with_batch(search.global_batch // m)
    pipeline = best.pipeline
    num = len(pipeline.stages)
    with search.timed("refine"):
        parts: list[Assembled] = []
        states = [best.composers[s.option].choices(s.first_layer, s.end_layer) for s in pipeline.stages]
        for index, stage in enumerate(pipeline.stages):
            option = best.options[stage.option]
            pricer = MeshPricer(cluster, stage.device_offset, option.shape, search.optimizer)
            composer = replace(best.composers[stage.option], pricer=pricer, _tables={}, _states={}, _entries={}, _sections={})
            labels, boundary = states[index]
            device = cluster.device(stage.device_offset)
            limit = min(_limits(cluster)[stage.device_offset : stage.device_offset + option.num_devices])
            flight = in_flight_formula(search.schedule, index, num, m)
            parts.append(
                assemble_stage(
                    composer,
                    (stage.first_layer, stage.end_layer),
                    labels,
                    boundary[0],
                    boundary[-1],
                    flight,
                    limit,
                    FRAMEWORK_BYTES[device.kind],
                )
            )
            search.progress("refine", (index + 1) / num)
    stages = tuple(part.stage for part in parts)
    transfers = _transfers(stages)
    with search.timed("simulate"):
        step_s = simulated_step(search.schedule, m, parts, transfers, cluster, graph)
    _check_memory(parts, [min(_limits(cluster)[s.devices[0] : s.devices[-1] + 1]) for s in stages], cluster)
    single = MeshPricer(cluster, 0, (), search.optimizer)
    flops = m * sum(
        single.op(node, choice, layering.needs_grad).flops for node, choice in _whole_choices(graph)
    )
    wasted = m * sum(part.wasted_flops for part in parts)
    prediction = Prediction(
        step_s=step_s,
        bound_s=min(step_s, pipeline.bound_s),
        stages=tuple(part.prediction for part in parts),
        flops=flops,
        replicated_flops=wasted,
    )
    return Plan(
        model=search.graph.fingerprint(),
        model_ops=dict(Counter(op_name(node) for node in graph.ops())),
        cluster=json.loads(cluster.to_json()),
        global_batch=search.global_batch,
        microbatches=m,
        schedule=search.schedule,
        optimizer=search.optimizer,
        layers=tuple(layer.name for layer in layering.layers),
        stages=stages,
        transfers=transfers,
        prediction=prediction,
    )


def _whole_choices(graph: Graph) -> Iterator[tuple[Any, Any]]:
    for node in graph.ops():
        if op_name(node) != "getitem":
            yield node, mesh_choices(node, ())[0]


def _transfers(stages: Sequence[Any]) -> tuple[Transfer, ...]:
    """Every tensor from the stage that makes it to each that uses it."""
    made = {name: s for s, stage in enumerate(stages) for chunk in stage.chunks for name in chunk.sends}
    return tuple(
        Transfer(name, made[name], s) for s, stage in enumerate(stages) for chunk in stage.chunks for name in chunk.receives
    )


def simulated_step(
    schedule: str, m: int, parts: Sequence[Assembled], transfers: Sequence[Transfer], cluster: Cluster, graph: Graph
) -> float:
    """The makespan of the schedule with these stages' times."""
    forward = [part.prediction.forward_s for part in parts]
    backward = [part.prediction.backward_s for part in parts]
    after = [part.prediction.step_s for part in parts]
    seconds: dict[tuple[int, int], float] = {}
    for transfer in transfers:
        edge = (transfer.source, transfer.target)
        seconds[edge] = seconds.get(edge, 0.0) + parts[transfer.target].received_s[transfer.node]
    return simulate(generate(schedule, len(parts), m), forward, backward, seconds, after).makespan_s


def _check_memory(parts: Sequence[Assembled], limits: Sequence[float], cluster: Cluster) -> None:
    """The composed estimate fitted; the assembled stage must too (temporaries included)."""
    for index, (part, limit) in enumerate(zip(parts, limits)):
        used = part.prediction.peak_bytes - part.prediction.memory_bytes["framework"]
        if used > limit * 1.02:
            over = used - limit
            raise InfeasibleError(
                f"stage {index} ({len(part.stage.devices)} devices) needs {used / 2**30:.2f} GiB per device, but has {limit / 2**30:.2f} GiB: "
                f"{over / 2**20:,.0f} MiB missing; use more devices, more microbatches or a smaller batch"
            )


def _infeasible(search: _Search) -> InfeasibleError:
    if not search.misses:
        return InfeasibleError(
            f"no microbatch count of global_batch {search.global_batch} suits this model (its graph needs batch multiples that none "
            "of them gives); use another global_batch"
        )
    miss = _nearest(search.misses)
    where = ""
    if miss.choice is not None:
        names = [layer.name for layer in search.layering.layers[miss.choice.first_layer : miss.choice.end_layer]]
        where = f" (stage {miss.stage} holds {names[0]}{' … ' + names[-1] if len(names) > 1 else ''})"
    fits = f"; {miss.needed_bytes / 2**20:,.1f} MiB per device beside the framework would fit: " if isfinite(miss.needed_bytes) else "; "
    remedy = "use more devices, devices with more memory, more microbatches or a smaller batch"
    return InfeasibleError(f"no plan fits {search.cluster.name}: {miss.reason}{where}{fits}{remedy}")


def _nearest(misses: Sequence[inter_op.Infeasible]) -> inter_op.Infeasible:
    """The miss by least, among real pipelines where there are any (an aggregate miss is only a floor)."""
    return min(misses, key=lambda miss: (miss.choice is None, miss.missing_bytes))


# ---- what else there was


def _alternatives(search: _Search, plan: Plan) -> list[dict[str, Any]]:
    """The best plan of each pure kind: name, step_s (None if infeasible) and why it lost."""
    total = search.cluster.num_devices
    kinds = {"data": Strategy(dp=total), "tensor": Strategy(tp=total), "pipeline": Strategy(pp=total)}
    out = []
    for name, strategy in kinds.items():
        row: dict[str, Any] = {"name": name, "step_s": None, "why": ""}
        if strategy.pp > len(search.layering.layers):
            row["why"] = f"the model has {len(search.layering.layers)} layers, fewer than {total} stages"
            out.append(row)
            continue
        inner = replace(search, passes={}, misses=[])
        usable = _usable(search.global_batch, strategy)
        counts = sorted({m for m in usable if m == plan.microbatches} | set(_microbatch_counts(search.global_batch, strategy)[:4]))
        try:
            found = _candidates(inner, counts, strategy, refine=False)
            if found:
                other = _first_that_fits(inner, found)
                row |= {"step_s": other.prediction.step_s, "microbatches": other.microbatches, "why": _why(plan, other)}
            elif inner.misses:
                row["why"] = f"does not fit: {_nearest(inner.misses).missing_bytes / 2**30:.2f} GiB per device missing"
            else:
                row["why"] = f"no microbatch of global batch {search.global_batch} falls into {strategy.dp} equal parts"
        except ValueError as error:
            row["why"] = str(error)
        out.append(row)
    return out


def _why(plan: Plan, other: Plan) -> str:
    """The cause that grew most against the plan, in seconds per step."""
    if other.prediction.step_s <= plan.prediction.step_s * 1.001:
        return "as good: it is what was chosen" if other.prediction.step_s > plan.prediction.step_s * 0.999 else "better in simulation"

    def causes(p: Plan) -> dict[str, float]:
        slowest = max(p.prediction.stages, key=lambda s: (s.forward_s + s.backward_s) * p.microbatches + s.step_s)
        once = ("gradient", "optimizer")
        found = {k: v * (1 if k in once else p.microbatches) for k, v in slowest.seconds.items()}
        found["pipeline bubble"] = max(0.0, p.prediction.step_s - sum(found.values()))
        return found

    mine, theirs = causes(plan), causes(other)
    grown = max(theirs, key=lambda k: theirs[k] - mine.get(k, 0.0))
    return f"{grown} takes {_ms(theirs[grown])} a step against {_ms(mine.get(grown, 0.0))}"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _notes(search: _Search, plan: Plan) -> list[str]:
    unknown = Counter(
        op_name(n) for n in search.graph.ops() if op_name(n) != "getitem" and getattr(rule_for(n), "is_fallback", False)
    )
    notes = [f"no rule for {name} ({count}×): replicated" for name, count in unknown.items()]
    notes += [text for text in (state_tensors(plan.optimizer)[1],) if text]
    idle = plan.num_devices - sum(len(stage.devices) for stage in plan.stages)
    if idle:
        notes.append(f"{idle} of {plan.num_devices} devices stay idle")
    if search.cluster.oversubscription > 1:
        notes.append(f"oversubscribed: {search.cluster.oversubscription:g} ranks share each core, so compute is priced that much slower")
    return notes
