"""Does a plan still hold: by itself, for this model, on this cluster? Every fault is one sentence for people.

by itself     ``Plan.check``: batch, devices, meshes, transfers
model         the fingerprint, then every name and every label, if they can be compared at all
cluster       ``Cluster.difference``

Which decisions of a plan the runtime cannot carry out yet; such a plan is a prediction only.

residency       parameters in specs of no pattern
ops             labels whose choice has no program (``AxisChoice.executable``); only the graph tells
schedule        an asynchronous one with what it cannot version (``validation.faults``)
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from torch.fx import Node

from ...costmodel.cluster import Cluster
from ..frontend.mixed_precision import in_precision
from ..ir.graph import Graph, op_name
from ..pipeline.families import PIPEDREAM, lag_steps, stashed_versions
from ..rules import pairs_choice
from .plan import Chunk, Plan

__all__ = [
    "check_plan", "cluster_faults", "faults", "is_asynchronous", "model_faults", "not_executable", "notes",
    "precision_notes", "require", "require_executable",
]  # fmt: skip


SHOWN = 8  # faults of one sort that are told one by one


def check_plan(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None) -> list[str]:
    """What no longer holds, a sentence each; empty if the plan can be used. Raises nothing for a faulty plan.

    graph: the captured model, at any batch extent. cluster: the hardware to train on.
    """
    faults = plan.check()
    if graph is not None:
        faults += model_faults(plan, graph)
    if cluster is not None:
        faults += cluster_faults(plan, cluster)
    return faults


def require(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None) -> None:
    """Raise ValueError with the differences unless the plan holds for this model and cluster."""
    for rule, faults in (
        ("the plan does not hold", plan.check()),
        ("this plan is for another model", [] if graph is None else _other_model(plan, graph)),
        ("this plan does not hold for the model", [] if graph is None else model_faults(plan, graph)),
        ("this plan is for another cluster", [] if cluster is None else cluster_faults(plan, cluster)),
    ):
        if faults:
            raise ValueError(f"{rule}: {'; '.join(_limited(faults))}; plan again, or correct the plan")


# ---- the model


def model_faults(plan: Plan, graph: Graph) -> list[str]:
    """Where the plan and the graph disagree: another model, ops and parameters that do not exist or are missing, labels
    that no rule offers."""
    faults = _other_model(plan, graph)
    if plan.precision != graph.precision:
        try:
            graph = in_precision(graph, plan.precision)
        except ValueError as error:
            return [*faults, str(error)]
    faults += _limited(_unknown_names(plan, graph))
    if not faults:
        faults += _limited(_broken_flow(plan, graph))
    if not faults and plan.microbatches >= 1 and plan.global_batch % plan.microbatches == 0:
        try:
            small = graph.with_batch(plan.microbatch_size)
        except ValueError as error:
            return [f"microbatches of {plan.microbatch_size}: {error}"]
        faults += _limited(_refused_labels(plan, small))
    return faults


def _other_model(plan: Plan, graph: Graph) -> list[str]:
    if plan.model == graph.fingerprint():
        return []
    here = Counter(op_name(node) for node in graph.ops())
    return [f"the plan is of model {plan.model}, but got {graph.fingerprint()}: {_op_difference(plan.model_ops, here)}"]


def _op_difference(planned: Mapping[str, int], given: Mapping[str, int]) -> str:
    """Which ops only one of the two has, with counts."""
    more = {op: count - given.get(op, 0) for op, count in planned.items() if count > given.get(op, 0)}
    less = {op: count - planned.get(op, 0) for op, count in given.items() if count > planned.get(op, 0)}
    sides = [("only in the plan", more), ("only in the model", less)]
    texts = [
        f"{side}: " + ", ".join(_limited([f"{count} × {op}" for op, count in sorted(ops.items(), key=lambda x: -x[1])]))
        for side, ops in sides
        if ops
    ]
    return "; ".join(texts) or "the same ops, but other shapes, constants or connections"


def _chunks(plan: Plan) -> Iterator[tuple[int, int, Chunk]]:
    """(stage, number of the chunk there, chunk)."""
    for index, stage in enumerate(plan.stages):
        for number, chunk in enumerate(stage.chunks):
            yield index, number, chunk


def _unknown_names(plan: Plan, graph: Graph) -> Iterator[str]:
    """Names in the plan that the graph lacks, and ops and parameters of the graph that the plan lacks."""
    nodes = graph.by_name()
    ops = {node.name for node in graph.ops() if op_name(node) != "getitem"}
    parameters = {node.meta["source"].name for node in graph.placeholders("parameter")}
    planned_ops: set[str] = set()
    planned_parameters: set[str] = set()
    for index, _, chunk in _chunks(plan):
        planned_ops |= set(chunk.ops)
        planned_parameters |= set(chunk.parameters)
        yield from (f"stage {index} names op {op}, which the model does not have" for op in chunk.ops if op not in ops)
        for name in chunk.parameters:
            if name not in parameters:
                yield f"stage {index} names parameter {name}, which the model does not have"
        for name in (*chunk.sources, *chunk.receives, *chunk.sends):
            if name not in nodes:
                yield f"stage {index} names tensor {name}, which the model does not have"
    used = {
        operand.name for node in graph.ops() if node.name in planned_ops for operand in node.all_input_nodes
    }  # an op that nothing uses may be left out of a plan
    needed = {result.node for result in graph.results} | used
    yield from (f"op {op} of the model is in no stage" for op in sorted((ops & needed) - planned_ops))
    for node in graph.placeholders("parameter"):
        if node.name in used and node.meta["source"].name not in planned_parameters:
            yield f"parameter {node.meta['source'].name} of the model is in no stage"


def _broken_flow(plan: Plan, graph: Graph) -> Iterator[str]:
    """What a stage reads but neither makes nor receives; what it is to receive or send, but nobody brings or makes."""
    nodes = graph.by_name()
    brought = {(transfer.node, transfer.target, transfer.target_chunk) for transfer in plan.transfers}
    for index, stage in enumerate(plan.stages):  # and what another chunk of the stage makes is there
        numbers = range(len(stage.chunks))
        brought |= {(name, index, number) for part in stage.chunks for name in part.sends for number in numbers}
    for index, number, chunk in _chunks(plan):
        for op in chunk.ops:
            for operand in nodes[op].all_input_nodes:
                if operand.op == "placeholder":
                    source = operand.meta["source"]
                    if source.kind == "parameter" and source.name not in chunk.parameters:
                        yield f"stage {index}: op {op} reads parameter {source.name}, which the stage does not hold"
                elif operand.name not in chunk.receives and _producer(operand) not in chunk.ops:
                    yield f"stage {index}: op {op} reads {operand.name}, which the stage neither makes nor receives"
        for name in chunk.receives:
            if (name, index, number) not in brought:
                yield f"stage {index} receives {name}, but no transfer brings it"
        for name in chunk.sends:
            if nodes[name].op != "placeholder" and _producer(nodes[name]) not in chunk.ops:
                yield f"stage {index} sends {name}, which it does not make"


def _producer(node: Node) -> str:
    """The op that makes the tensor: for one of several outputs, the op that has them."""
    return str(node.args[0]) if op_name(node) == "getitem" else node.name


def _refused_labels(plan: Plan, small: Graph) -> Iterator[str]:
    nodes = small.by_name()
    for index, _, chunk in _chunks(plan):
        shape = plan.stages[index].mesh_shape
        for op, labels in chunk.ops.items():
            try:
                pairs_choice(nodes[op], labels, shape)
            except ValueError as error:
                yield f"stage {index}: {error}"


# ---- the cluster


def cluster_faults(plan: Plan, cluster: Cluster) -> list[str]:
    """How ``cluster`` differs from the one of the plan: "-" lines are the plan's, "+" lines are this one's."""
    planned = Cluster.from_json(json.dumps(plan.cluster))
    return [f"the cluster differs: {line}" for line in planned.difference(cluster)]


def _limited(faults: Iterator[str] | list[str]) -> list[str]:
    every = list(faults)
    return every if len(every) <= SHOWN else [*every[:SHOWN], f"{len(every) - SHOWN} more"]


def not_executable(plan: Plan, graph: Graph | None = None) -> list[str]:
    """A line for each kind of decision that the runtime cannot run yet; empty if it can run the plan. graph: the
    captured model, for ops."""
    lines = list(_residency(plan))
    if graph is not None:
        lines += _labels(plan, graph)
    return [*lines, *faults(plan)]


def require_executable(plan: Plan, graph: Graph | None = None) -> None:
    """Raise ValueError with all of ``not_executable``, if there is any."""
    if lines := not_executable(plan, graph):
        raise ValueError(
            f"this runtime runs what it has a program for, but got a plan with {'; '.join(lines)}; plan again without"
        )


def _residency(plan: Plan) -> Iterator[str]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for stage in plan.stages:
        for chunk in stage.chunks:
            for name, home in chunk.parameters.items():
                found[home.pattern].append(name)
    for pattern, names in sorted(found.items()):
        if pattern == "custom":
            yield f"parameters in {pattern} ({len(names)}: {names[0]}{', …' if len(names) > 1 else ''})"


def _labels(plan: Plan, graph: Graph) -> Iterator[str]:
    small, counts = graph.with_batch(plan.microbatch_size), Counter[str]()
    nodes = small.by_name()
    for stage in plan.stages:
        for chunk in stage.chunks:
            for op, labels in chunk.ops.items():
                if op in nodes and not pairs_choice(nodes[op], labels, stage.mesh_shape).executable:
                    counts[f"{op} cut by {','.join(labels)}"] += 1
    shown = list(counts)[:4]
    if counts:
        yield f"ops without a program: {', '.join(shown)}" + (f" and {len(counts) - 4} more" if len(counts) > 4 else "")


def is_asynchronous(plan: Plan) -> bool:
    """Whether steps overlap; a pipeline of one stage has nothing to overlap."""
    return plan.schedule == PIPEDREAM and len(plan.stages) > 1


def notes(plan: Plan) -> list[str]:
    """What a person must know of the plan."""
    if not is_asynchronous(plan):
        return []
    p, m = len(plan.stages), plan.microbatches
    most = lag_steps(p, m)
    copies = ", ".join(str(stashed_versions(s, p, m)) for s in range(p))
    return [
        f"schedule {PIPEDREAM} changes the optimisation: steps overlap, and gradients are of weights that are up to "
        f"{most} update{'s' if most > 1 else ''} old (stages keep {copies} old versions of their weights); "
        "flush() drains the pipeline"
    ]


def faults(plan: Plan) -> Iterator[str]:
    """Decisions that no asynchronous pipeline can run with, a line each."""
    if not is_asynchronous(plan):
        return
    holders: dict[str, set[int]] = {}
    for index, stage in enumerate(plan.stages):
        for chunk in stage.chunks:
            for name in chunk.parameters:
                holders.setdefault(name, set()).add(index)
    homes = [(n, home) for stage in plan.stages for chunk in stage.chunks for n, home in chunk.parameters.items()]
    tied = next((name for name, stages in holders.items() if len(stages) > 1), None)
    if tied is not None:
        where = " and ".join(map(str, sorted(holders[tied])))
        yield f"schedule {PIPEDREAM} and the weight {tied!r} on stages {where}, whose versions would differ"
    if sharded := next((name for name, home in homes if home.pattern != "replicated"), None):
        yield f"schedule {PIPEDREAM} and sharded parameters ({sharded}), of which it would have to stash every version"
    if plan.precision != "model":
        yield f"schedule {PIPEDREAM} in precision {plan.precision}"
    if coded := next((w.compressor for stage in plan.stages for w in stage.wire if w.compressor != "none"), None):
        yield f"schedule {PIPEDREAM} and gradients compressed by {coded}"
    if plan.num_chunks > 1:
        yield f"schedule {PIPEDREAM} with several chunks per stage"


def precision_notes(plan: Plan) -> list[str]:
    """A line for a plan that is not computed in the model's own types."""
    if plan.precision == "model":
        return []
    return [
        f"computed in {plan.precision} with fp32 master weights, sums of gradients and optimizer states: numerics "
        "differ from the model's own types"
    ]
