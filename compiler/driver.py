"""The pass list from a graph to a plan, readable top to bottom. Every pass is named and timed
(``provenance["passes"]``).

    layouts       how tensors lie in memory, where exact ops were measured                layouts.py
    layers        cluster the graph's ops into layers and classes                         layers.py
    compose       per mesh: tables per layer class, costs of all intervals                compose.py, eliminate.py
    stages        dynamic programming over layers × devices, per microbatch count         search.py, inter_op.py
    refine        per chosen stage: the whole stage as one problem under its memory limit  assemble.py, lagrange.py
    simulate      messages between stages, and the schedule's makespan                    predict.py, simulate.py
    memory        what each stage holds at its worst, from a run without data  footprint.py
    alternatives  what the best pure data, tensor and pipeline plans would have cost      alternatives.py
"""

from __future__ import annotations

import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..costmodel.cluster import Cluster
from ..costmodel.memory import FRAMEWORK_BYTES, state_tensors
from .alternatives import find_alternatives
from .assemble import Assembled, assemble_stage
from .footprint import with_footprints
from .graph import Graph, op_name
from .layers import cluster_layers
from .layouts import note_layouts
from .plan import Plan, Prediction
from .predict import predict
from .pricing import MeshPricer
from .recompute import recompute_of
from .rules import mesh_choices, rule_for
from .schedule import executable_schedules, in_flight_formula
from .search import Candidate, Search, find_candidates, infeasible, microbatch_counts, stage_options, usable_bytes
from .strategy import InfeasibleError, Strategy, check_batch

__all__ = ["make_plan"]


def make_plan(
    graph: Graph,
    cluster: Cluster,
    global_batch: int,
    microbatches: int | None = None,
    strategy: Strategy | None = None,
    schedule: str = "1f1b",
    optimizer: str = "AdamW",
    alternatives: bool = True,
    capture_s: float = 0.0,
    progress: Callable[[str, float], None] = lambda name, fraction: None,
    recompute: str = "none",
) -> Plan:
    """The best plan for ``graph`` on ``cluster``. Raises ValueError for bad input and InfeasibleError if nothing fits.

    global_batch: samples per step over all devices. microbatches, strategy and schedule are searched where they are
    None ("1f1b" never holds more than GPipe in the same time, so the schedule has that default). capture_s: what
    capture took, for the record. progress(pass, fraction) is called along the way. recompute: "none", or "layer" to
    keep only what crosses a border between layers and run each layer's forward again for its backward.
    """
    check_batch(global_batch, microbatches)
    if schedule not in executable_schedules():
        raise ValueError(
            f"a plan is made for one of the schedules {', '.join(executable_schedules())}, but got {schedule!r}; "
            "choose one of these"
        )
    with _without_gc():
        search = Search(graph, cluster, global_batch, optimizer, schedule, progress, recompute)
        search.passes["capture"] = capture_s
        return _run_passes(search, microbatches, strategy, alternatives)


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


def _run_passes(search: Search, microbatches: int | None, strategy: Strategy | None, alternatives: bool) -> Plan:
    graph, cluster, global_batch = search.graph, search.cluster, search.global_batch
    begin = time.perf_counter()
    if strategy and strategy.num_devices > cluster.num_devices:
        raise ValueError(
            f"strategy {strategy} needs {strategy.num_devices} devices, but the cluster has {cluster.num_devices}"
        )
    if any(host.device.op_times for host in cluster.hosts):
        with search.timed("layouts"):
            note_layouts(graph)
    with search.timed("layers"):
        search.layering = cluster_layers(graph)
        recompute_of(graph, search.layering, search.recompute, search.schedule)  # refuses an unknown mode
    if strategy and strategy.num_stages > len(search.layering.layers):
        raise ValueError(
            f"strategy asks for {strategy.num_stages} stages, but the model falls into "
            f"{len(search.layering.layers)} layers"
        )
    counts = [microbatches] if microbatches else microbatch_counts(global_batch, strategy)
    if not counts or (strategy and (global_batch // counts[0]) % strategy.data_parts):
        size = global_batch // (microbatches or 1)
        raise ValueError(
            f"dp cuts every microbatch evenly, but got dp {strategy.data_parts if strategy else 1} "
            f"and a microbatch of {size} samples; "
            "use fewer microbatches or a larger global_batch"
        )
    plan = first_that_fits(search, find_candidates(search, counts, strategy, refine=microbatches is None))
    others: list[dict[str, Any]] = []
    if alternatives and cluster.num_devices > 1 and strategy is None:
        with search.timed("alternatives"):
            others = find_alternatives(search, plan, first_that_fits)
    notes = (*_notes(search, plan), *plan.prediction.notes)
    search.passes["total"] = time.perf_counter() - begin
    provenance = {
        "meshwright": "0.1.0",
        "torch": torch.__version__,
        "passes": {name: round(seconds, 4) for name, seconds in search.passes.items()},
        "cluster": cluster.fingerprint(),
        "strategy": None if strategy is None else strategy.to_json(),
    }
    prediction = replace(plan.prediction, alternatives=tuple(others), notes=notes)
    return replace(plan, prediction=prediction, provenance=provenance)


# ---- from a pipeline to a plan


def first_that_fits(search: Search, candidates: Sequence[Candidate]) -> Plan:
    """The plan of the fastest candidate that still fits when its stages are assembled. Raises InfeasibleError if none
    does."""
    if not candidates:
        raise infeasible(search)
    for candidate in candidates[:-1]:
        try:
            return finish(search, candidate)
        except InfeasibleError:
            continue
    return finish(search, candidates[-1])


def finish(search: Search, best: Candidate) -> Plan:
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
            composer = best.composers[stage.option].afresh(pricer=pricer)
            labels, boundary = states[index]
            device = cluster.device(stage.device_offset)
            limit = min(usable_bytes(cluster)[stage.device_offset : stage.device_offset + option.num_devices])
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
    with search.timed("simulate"):
        step = predict(graph, cluster, layering.needs_grad, search.schedule, m, search.optimizer, parts)
    single = MeshPricer(cluster, 0, (), search.optimizer)
    flops = m * sum(single.op(node, choice, layering.needs_grad).flops for node, choice in _whole_choices(graph))
    wasted = m * sum(part.wasted_flops for part in parts)
    prediction = Prediction(
        step_s=step.step_s,
        bound_s=min(step.step_s, proven(search)) if search.bounds else step.step_s,
        stages=step.stages,
        flops=flops,
        replicated_flops=wasted,
        sources=step.sources,
    )
    plan = Plan(
        model=search.graph.fingerprint(),
        model_ops=dict(Counter(op_name(node) for node in graph.ops())),
        cluster=json.loads(cluster.to_json()),
        global_batch=search.global_batch,
        microbatches=m,
        schedule=search.schedule,
        optimizer=search.optimizer,
        layers=tuple(layer.name for layer in layering.layers),
        stages=stages,
        transfers=step.transfers,
        prediction=prediction,
    )
    with search.timed("memory"):
        plan = with_footprints(graph, plan)
    _check_memory(plan, [min(usable_bytes(cluster)[s.devices[0] : s.devices[-1] + 1]) for s in stages])
    return plan


def proven(search: Search) -> float:
    """Seconds that no plan undercuts, from the bounds of the tables, which price gradients as if nothing of them hid.

    Of one stage at most the share ``overlap`` of one microbatch's backward hides, which is less than that share of t
    in Σ t + (m − 1) max t; and of all stages at most that share of what reducing every gradient could take.
    """
    overlap = max(host.device.overlap for host in search.cluster.hosts) if search.cluster.num_devices > 1 else 0.0
    hidden = overlap * _most_reduction(search) if overlap else 0.0
    return min(max(seconds * (1 - overlap / m), seconds - hidden) for m, seconds in search.bounds.items())


def _most_reduction(search: Search) -> float:
    """Seconds to sum every gradient alone and whole, over the slowest groups of any mesh."""
    sizes: Counter[int] = Counter()
    for node in search.graph.placeholders("parameter"):
        if node.meta["source"].requires_grad:  # of a shared weight several stages may hold a copy
            sizes[node.meta["type"].nbytes] += 1 + len(node.meta["source"].aliases)
    worst = 0.0
    for shape in {option.shape for option in stage_options(search.cluster, None, search.layering)}:
        pricer = MeshPricer(search.cluster, 0, shape, search.optimizer)
        groups = [(axis,) for axis in range(len(shape))] + ([tuple(range(len(shape)))] if len(shape) > 1 else [])
        for axes in groups:
            worst = max(worst, sum(count * pricer.reduce_seconds(size, axes) for size, count in sizes.items()))
    return worst


def _whole_choices(graph: Graph) -> Iterator[tuple[Any, Any]]:
    for node in graph.ops():
        if op_name(node) != "getitem":
            yield node, mesh_choices(node, ())[0]


def _check_memory(plan: Plan, limits: Sequence[float]) -> None:
    """The composed estimate fitted; what the assembled stages really hold must too."""
    for index, (stage, predicted, limit) in enumerate(zip(plan.stages, plan.prediction.stages, limits)):
        used = predicted.peak_bytes - predicted.memory_bytes["framework"]
        if used > limit * 1.02:
            over = used - limit
            raise InfeasibleError(
                f"stage {index} ({len(stage.devices)} devices) needs {used / 2**30:.2f} GiB per device, "
                f"but has {limit / 2**30:.2f} GiB: "
                f"{over / 2**20:,.0f} MiB missing; use more devices, more microbatches or a smaller batch"
            )


def _notes(search: Search, plan: Plan) -> list[str]:
    unknown = Counter(
        op_name(n) for n in search.graph.ops() if op_name(n) != "getitem" and getattr(rule_for(n), "is_fallback", False)
    )
    notes = [f"no rule for {name} ({count}×): replicated" for name, count in unknown.items()]
    notes += [text for text in (state_tensors(plan.optimizer)[1],) if text]
    idle = plan.num_devices - sum(len(stage.devices) for stage in plan.stages)
    if idle:
        notes.append(f"{idle} of {plan.num_devices} devices stay idle")
    if search.cluster.oversubscription > 1:
        notes.append(
            f"oversubscribed: {search.cluster.oversubscription:g} ranks share each core, "
            "so compute is priced that much slower"
        )
    return notes
