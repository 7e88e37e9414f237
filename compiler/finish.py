"""From a candidate to a plan: its stages assembled, the schedule simulated, the memory counted.

Stages that are equal up to names are assembled once (``twins``). What a stage really holds is known only here; a plan
that does not fit raises, and the next candidate is tried.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..costmodel.memory import FRAMEWORK_BYTES
from .assemble import Assembled, assemble_stage
from .explore import Candidate, Search
from .footprint import with_footprints
from .graph import Graph, op_name
from .plan import Plan, Prediction
from .predict import predict
from .pricing import MeshPricer
from .recompute import recompute_of
from .rules import mesh_choices
from .schedule import in_flight_formula
from .space import usable_bytes
from .strategy import InfeasibleError
from .twins import names_between, renamed

__all__ = ["finish"]

SLACK = 1.02  # of the limit: how far the count may be above it


def finish(search: Search, best: Candidate) -> Plan:
    """The plan of a candidate. Raises InfeasibleError if a stage holds more than its devices have."""
    cluster, layering, m = search.cluster, search.layering, best.microbatches
    graph = search.graph.with_batch(search.global_batch // m)
    with search.timed("refine"):
        parts = _assembled(search, best, graph)
    stages = tuple(part.stage for part in parts)
    with search.timed("simulate"):
        step = predict(graph, cluster, layering.needs_grad, best.schedule, m, search.optimizer, parts)
    prediction = Prediction(
        step_s=step.step_s,
        bound_s=min(step.step_s, search.bound_s),
        stages=step.stages,
        flops=m * _flops(search, graph),
        replicated_flops=m * sum(part.wasted_flops for part in parts),
        sources=step.sources,
    )
    plan = Plan(
        model=search.graph.fingerprint(),
        model_ops=dict(Counter(op_name(node) for node in graph.ops())),
        cluster=json.loads(cluster.to_json()),
        global_batch=search.global_batch,
        microbatches=m,
        schedule=best.schedule,
        optimizer=search.optimizer,
        layers=tuple(layer.name for layer in layering.layers),
        stages=stages,
        transfers=step.transfers,
        prediction=prediction,
    )
    with search.timed("memory"):
        plan = with_footprints(graph, plan)
    usable = _usable(search)
    _check_memory(plan, [min(usable[s.devices[0] : s.devices[-1] + 1]) for s in stages])
    return plan


def _usable(search: Search) -> list[float]:
    return [search.share * size for size in usable_bytes(search.cluster)]


def _assembled(search: Search, best: Candidate, graph: Graph) -> list[Assembled]:
    cluster, m, num = search.cluster, best.microbatches, len(best.pipeline.stages)
    usable = _usable(search)
    parts: list[Assembled] = []
    known: dict[tuple[Any, ...], tuple[int, Assembled]] = {}
    for index, (stage, row) in enumerate(zip(best.pipeline.stages, best.rows)):
        first, end = stage.first_layer, stage.end_layer
        labels, modes, states = row.composer.choices(row.row, first, end)
        offset, shape = stage.device_offset, row.submesh.shape
        limit = min(usable[offset : offset + row.submesh.num_devices])
        flight = in_flight_formula(best.schedule, index, num, m)
        names = [layer.class_key for layer in search.layering.layers[first:end]]
        key = (tuple(names), shape, row.submesh, modes, states[0], states[-1], row.row)
        twin = known.get(key)
        if twin is not None and (part := _twin(search, graph, twin, first, offset, flight, limit)) is not None:
            parts.append(part)
            continue
        pricer = MeshPricer(cluster, offset, shape, search.optimizer, search.space.communication)
        restriction = search.restriction(row.submesh.roles)
        part = assemble_stage(
            graph,
            search.layering,
            pricer,
            m,
            (first, end),
            labels,
            restriction,
            recompute_of(graph, search.layering, dict(enumerate(modes, first)), best.schedule),
            (states[0], states[-1]),
            flight,
            limit,
            FRAMEWORK_BYTES[cluster.device(offset).kind],
        )
        known[key] = first, part
        parts.append(part)
        search.progress("refine", (index + 1) / num)
    return parts


def _twin(
    search: Search, graph: Graph, twin: tuple[int, Assembled], first: int, offset: int, flight: int, limit: float
) -> Assembled | None:
    """The stage that ``twin`` is under other names; None where it is another one or does not fit here."""
    other, part = twin
    (chunk,) = part.stage.chunks
    names = names_between(graph, search.layering, other, first, chunk.layers[1] - chunk.layers[0])
    return None if names is None else renamed(part, graph, names, first, offset)


def _flops(search: Search, graph: Graph) -> float:
    """FLOPs of one microbatch, forward and backward: of each layer class once, and of floating ops."""
    single, layering = MeshPricer(search.cluster, 0, (), search.optimizer), search.layering
    nodes = graph.by_name()

    def of(names: Iterable[str]) -> float:
        found = [nodes[name] for name in names if op_name(nodes[name]) != "getitem"]
        return sum(single.op(node, mesh_choices(node, ())[0], layering.needs_grad).flops for node in found)

    first = {layer.class_key: layer for layer in reversed(layering.layers)}
    by_class = {key: of(layer.ops) for key, layer in first.items()}
    return of(layering.floating) + sum(by_class[layer.class_key] for layer in layering.layers)


def _check_memory(plan: Plan, limits: Sequence[float]) -> None:
    """The composed estimate fitted; what the assembled stages really hold must too."""
    for index, (stage, predicted, limit) in enumerate(zip(plan.stages, plan.prediction.stages, limits)):
        used = predicted.peak_bytes - predicted.memory_bytes["framework"]
        if used > limit * SLACK:
            raise InfeasibleError(
                f"stage {index} ({len(stage.devices)} devices) needs {used / 2**30:.2f} GiB per device, "
                f"but has {limit / 2**30:.2f} GiB: "
                f"{(used - limit) / 2**20:,.0f} MiB missing; use more devices, more microbatches or a smaller batch"
            )
