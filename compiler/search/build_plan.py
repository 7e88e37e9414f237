"""Build a plan from a candidate: solve its stages, simulate the schedule, count the memory.

The memory that a stage really holds is known only here. A plan that does not fit raises, and the next candidate is
tried.

Stages that are equal up to the names of their nodes are solved once; the others are copies with other names. Two runs
of layers are equal in this sense if their layers have equal classes one by one: then their ops correspond in order, and
so do the operands of these ops, down to floating ops, weights and inputs. A weight that both runs use keeps its name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from ...costmodel.memory import FRAMEWORK_BYTES, usable_bytes
from ..errors import OverfullError
from ..frontend.layers import Layering
from ..intra_op.section import StageContext
from ..intra_op.stage import SolvedStage, solve_stage
from ..ir.graph import Graph, op_name
from ..memory.stage import with_stage_memories
from ..pipeline.families import in_flight_formula
from ..plan.plan import Chunk, GradientReduction, Plan, Prediction, StagePrediction
from ..plan.recompute import recompute_of
from ..text import bytes_text
from .predict import merge_chunks, microbatch_flops, predict
from .state import Candidate, SearchState, batch_bytes

__all__ = [
    "BuiltStages",
    "build_plan",
    "estimated_bytes",
    "excess_bytes",
    "match_names",
    "plan_of_stages",
    "rename_stage",
    "solve_stages",
    "stage_context",
    "stage_limits",
    "with_measured_memory",
    "within_memory",
]  # fmt: skip


#: everything that stages have in common → (first layer, bytes that it may hold, solved stage) of those that were solved
BuiltStages = dict[tuple[Any, ...], list[tuple[int, float, SolvedStage]]]


def build_plan(
    search: SearchState, best: Candidate, limits_bytes: Sequence[float] = (), built: BuiltStages | None = None
) -> Plan:
    """The plan of a candidate, with the memory that the cost model estimates.

    limits_bytes: the estimated bytes that each stage may hold; inf, or no limits at all: the memory of its devices.
    built: stages of this candidate from before, which is added to.
    """
    graph = search.graph.with_batch(search.global_batch // best.microbatches)
    with search.timed("refine"):
        parts = solve_stages(search, best, graph, limits_bytes, built)
    return plan_of_stages(search, best, parts)


def plan_of_stages(search: SearchState, best: Candidate, parts: Sequence[SolvedStage]) -> Plan:
    """The plan of a candidate with these stages, with the memory that the cost model estimates."""
    cluster, layering, m = search.cluster, search.layering, best.microbatches
    graph = search.graph.with_batch(search.global_batch // m)
    stages = tuple(part.stage for part in parts)
    with search.timed("simulate"):
        step = predict(
            graph, cluster, layering.needs_grad, best.schedule, m, search.optimizer, parts,
            search.space.communication.activations,
        )  # fmt: skip
    if m not in search.flops:
        search.flops[m] = m * microbatch_flops(graph, cluster, layering)
    prediction = Prediction(
        step_s=step.step_s,
        bound_s=min(step.step_s, search.bound_s),
        stages=step.stages,
        flops=search.flops[m],
        replicated_flops=m * sum(part.wasted_flops for part in parts),
        sources=step.sources,
    )
    return Plan(
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
        precision=search.graph.precision,
        codes=search.space.communication.codes,
    )


#: what stages that are solved again leave free, of their limit, as what is not estimated differs then, too
SPARE = 0.003


def within_memory(search: SearchState, plan: Plan, best: Candidate) -> Plan:
    """The plan of a candidate with the memory that its stages really hold. Raises OverfullError if that is too much."""
    by_rules = [estimated_bytes(one) for one in plan.prediction.stages]
    plan = with_measured_memory(search, plan)
    over = excess_bytes(search, plan)
    full = [index for index, size in enumerate(over) if size > 0.0]
    if not full:
        return plan
    limits = stage_limits(search, plan)
    used = [one.peak_bytes - one.memory_bytes["framework"] for one in plan.prediction.stages]
    believed, batch = best.pipeline.peak_bytes, batch_bytes(search)
    worst = max(full, key=over.__getitem__)
    more = [size + SPARE * limit for size, limit in zip(over, limits)]
    alone = best.pipeline.chunks == 1  # of several chunks the rules add up what passes
    # a stage that was solved again fills what the tables left free: less of that, then less than the tables' choice
    leaner = [max(held - extra, known if known < held else 0.0) for held, extra, known in zip(by_rules, more, believed)]
    beside = [  # which tables are to blame for
        limit + extra - max(known + batch, held if alone else 0.0)
        for limit, extra, known, held in zip(limits, more, believed, by_rules)
    ]
    raise OverfullError(
        f"stage {worst} ({len(plan.stages[worst].devices)} devices) needs {bytes_text(used[worst])} per device, "
        f"but has {bytes_text(limits[worst])}: {bytes_text(used[worst] - limits[worst])} missing; "
        "use more devices, more microbatches or a smaller batch",
        [(plan.stages[index].mesh_shape, level, beside[index]) for index in full for level in best.rows[index].levels],
        [size if over[index] > 0.0 else inf for index, size in enumerate(leaner)] if alone else (),
    )


def estimated_bytes(stage: StagePrediction) -> float:
    """The bytes of a stage's estimate that count towards its limit."""
    return stage.peak_bytes - stage.memory_bytes["framework"] - stage.memory_bytes["temporary"]


def with_measured_memory(search: SearchState, plan: Plan) -> Plan:
    """The plan with the memory that its stages really hold."""
    graph = search.graph.with_batch(search.global_batch // plan.microbatches)
    with search.timed("memory"):
        return with_stage_memories(graph, plan, 1 if search.small else search.workers)


def stage_limits(search: SearchState, plan: Plan) -> list[float]:
    """Bytes that each stage's devices have."""
    usable = _usable(search)
    return [min(usable[stage.devices[0] : stage.devices[-1] + 1]) for stage in plan.stages]


def excess_bytes(search: SearchState, plan: Plan) -> list[float]:
    """The bytes by which each stage is above its limit; not positive where it fits."""
    used = [one.peak_bytes - one.memory_bytes["framework"] for one in plan.prediction.stages]
    return [size - limit for size, limit in zip(used, stage_limits(search, plan))]


def _usable(search: SearchState) -> list[float]:
    return [search.memory_share * size for size in usable_bytes(search.cluster)]


def solve_stages(
    search: SearchState,
    best: Candidate,
    graph: Graph,
    limits_bytes: Sequence[float] = (),
    built: BuiltStages | None = None,
) -> list[SolvedStage]:
    """The solved stages of ``build_plan``; the chunks of one stage are merged. graph: that of a microbatch."""
    known = {} if built is None else built
    cluster, m, num = search.cluster, best.microbatches, len(best.pipeline.peak_bytes)
    chunks = best.pipeline.chunks
    asked = chunks if chunks > 1 else None
    home = best.pipeline.homes(best.schedule)
    usable = _usable(search)
    parts: list[SolvedStage] = []
    for index, (stage, row) in enumerate(zip(best.pipeline.stages, best.rows)):
        first, end = stage.first_layer, stage.end_layer
        labels, modes, states = row.choices(first, end)
        offset, shape = stage.device_offset, row.submesh.shape
        whole = min(*usable[offset : offset + row.submesh.num_devices], best.pipeline.limit_bytes[home[index]])
        less = limits_bytes[home[index]] if limits_bytes else inf
        limit = less if less < inf else whole
        flight = in_flight_formula(best.schedule, home[index], num, m, asked)
        if asked:  # the chunk's part of what its stage holds when that is most
            flight = best.pipeline.chunk_in_flight[index]
            every = [size for size, group in zip(best.pipeline.chunk_bytes, home) if group == home[index]]
            limit *= best.pipeline.chunk_bytes[index] / sum(every)
        wire: tuple[GradientReduction, ...] = ()  # chunks of one stage sum their gradients alike
        if asked and not search.space.communication.sums_exactly:
            wire = tuple(w for part, group in zip(parts, home) if group == home[index] for w in part.stage.wire)
        names = [layer.class_key for layer in search.layering.layers[first:end]]
        ways = tuple((one.axes, one.algorithm, one.compressor) for one in wire)
        key = (
            tuple(names),
            shape,
            row.submesh,
            modes,
            states[0],
            states[-1],
            row.row,
            row.then and (row.then[0] - first, row.then[1]),
            ways,
            less,
        )
        twins = [_twin(search, graph, one, first, offset, flight, limit) for one in known.get(key, ())]
        fitting = [one for one in twins if one is not None]
        if fitting:
            parts.append(min(fitting, key=lambda one: one.prediction.forward_s + one.prediction.backward_s))
            continue
        context = stage_context(search, best, graph, index, modes)
        question = (
            *(first, end, row.submesh, m, flight, ways, states[0], states[-1]),
            *(context.recompute.modes, context.recompute.plain, frozenset(labels.items())),
        )
        answers = search.solved_stages.setdefault(question, [])
        part = _answer(answers, limit)
        if part is None:
            part = solve_stage(
                context,
                (first, end),
                (states[0], states[-1]),
                labels,
                flight,
                limit,
                FRAMEWORK_BYTES[cluster.device(offset).kind],
                wire,
                search.small,
            )
            answers.append((limit, part))
        devices = tuple(range(offset, offset + row.submesh.num_devices))
        part = replace(part, stage=replace(part.stage, devices=devices))
        known.setdefault(key, []).append((first, limit, part))
        parts.append(part)
        search.progress("refine", (index + 1) / len(home))
    grouped: list[list[SolvedStage]] = [[] for _ in range(num)]
    for group, part in zip(home, parts):
        grouped[group].append(part)
    return [merge_chunks(some) for some in grouped]


def stage_context(search: SearchState, best: Candidate, graph: Graph, index: int, modes: Sequence[str]) -> StageContext:
    """The context of the chunk at ``index`` of a candidate. graph: that of a microbatch; modes: of its layers."""
    stage, row = best.pipeline.stages[index], best.rows[index]
    recompute = recompute_of(graph, search.layering, dict(enumerate(modes, stage.first_layer)), best.schedule)
    pricer = search.pricer(stage.device_offset, row.submesh.shape)
    restriction = search.restriction(row.submesh.roles)
    return StageContext(graph, search.layering, pricer, best.microbatches, restriction, recompute)


def _answer(answers: Sequence[tuple[float, SolvedStage]], limit: float) -> SolvedStage | None:
    """An answer to the same question under ``limit`` bytes, from (limit, answer) of before; None if none is known.

    The fastest stage under a higher limit is also that under a lower one if it fits there. If nothing fits under a
    higher limit, nothing does under a lower one, and the leanest stage is the answer to both.
    """
    for before, part in answers:
        held = estimated_bytes(part.prediction)
        if limit == before or (limit < before and (held <= limit or held > before)):
            return part
    return None


def _twin(
    search: SearchState,
    graph: Graph,
    twin: tuple[int, float, SolvedStage],
    first: int,
    offset: int,
    flight: int,
    limit: float,
) -> SolvedStage | None:
    """A copy of the solved stage ``twin`` on other layers; None if these differ, or if the copy does not fit there but
    another solution may."""
    other, before, solved = twin
    (chunk,) = solved.stage.chunks
    part = solved.with_in_flight(flight)
    if estimated_bytes(part.prediction) > limit:
        hopeless = estimated_bytes(solved.prediction) > before  # nothing fits there, and here there is no more room
        if not hopeless or flight < solved.in_flight or limit > before:
            return None
    names = match_names(graph, search.layering, other, first, chunk.layers[1] - chunk.layers[0])
    return None if names is None else rename_stage(part, graph, names, first, offset)


def match_names(graph: Graph, layering: Layering, first: int, other: int, num_layers: int) -> dict[str, str] | None:
    """A map from each node of layers [first, first + num_layers) to its counterpart in those from ``other`` on. None if
    some node has two counterparts: a weight that layers share in one run only."""
    nodes, floating = graph.by_name(), set(layering.floating)
    names: dict[str, str] = {}
    for k in range(num_layers):
        here, there = layering.layers[first + k], layering.layers[other + k]
        if here.class_key != there.class_key:
            return None
        waiting = list(zip(here.ops, there.ops, strict=True))
        while waiting:
            mine, theirs = waiting.pop()
            if names.setdefault(mine, theirs) != theirs:
                return None
            operands = zip(nodes[mine].all_input_nodes, nodes[theirs].all_input_nodes, strict=True)
            for one, another in operands:
                if names.setdefault(one.name, another.name) != another.name:
                    return None
                if one.name in floating:
                    waiting.append((one.name, another.name))
    return names if len(set(names.values())) == len(names) else None


def rename_stage(
    part: SolvedStage, graph: Graph, names: Mapping[str, str], first_layer: int, first_device: int
) -> SolvedStage:
    """Return the stage with other nodes, layers and devices."""
    nodes = graph.by_name()
    (chunk,) = part.stage.chunks
    sources = {
        nodes[a].meta["source"].name: nodes[b].meta["source"].name
        for a, b in names.items()
        if nodes[a].op == "placeholder"
    }
    length = chunk.layers[1] - chunk.layers[0]
    order = {node.name: index for index, node in enumerate(graph)}

    def sort(table: Mapping[str, object]) -> dict[str, object]:
        moved = {names[name]: value for name, value in table.items()}
        return {name: moved[name] for name in sorted(moved, key=order.__getitem__)}

    other: Chunk = replace(
        chunk,
        layers=(first_layer, first_layer + length),
        ops=sort(chunk.ops),  # type: ignore[arg-type]
        parameters={sources[name]: value for name, value in chunk.parameters.items()},
        sources=sort(chunk.sources),  # type: ignore[arg-type]
        receives=sort(chunk.receives),  # type: ignore[arg-type]
        sends=sort(chunk.sends),  # type: ignore[arg-type]
    )
    devices = tuple(range(first_device, first_device + len(part.stage.devices)))
    return replace(part, stage=replace(part.stage, devices=devices, chunks=(other,)))
