"""Validation of a plan: the one place that knows whether a plan may be used, and the one place with the words for it.

``validate`` lists the faults, a sentence each, and ``require_valid`` raises ValueError with them. They look at

the document    batch, devices, meshes, transfers; a person may have edited it
the model       its fingerprint, then every name and every label, as far as they can be compared
the cluster     ``Cluster.difference``
the runtime     decisions that it cannot execute yet; a plan with one of them is a prediction only

The runtime cannot execute parameters in a custom sharding, ops whose sharding strategy has no local program
(``AxisChoice.executable``; only the graph knows them), and an asynchronous schedule with anything that it cannot
version.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from torch.fx import Node

from ...costmodel.cluster import Cluster
from ...costmodel.codecs import CODECS
from ...costmodel.collectives import REDUCTIONS
from ..frontend.mixed_precision import in_precision
from ..ir.graph import Graph, op_name
from ..pipeline.families import PIPEDREAM, lag_steps, stashed_versions, virtual_order
from ..rules import pairs_choice
from .plan import RECOMPUTE_MODES, Chunk, Plan, Stage, Transfer
from .tensor_codecs import carrier_faults

__all__ = ["is_asynchronous", "notes", "precision_notes", "require_valid", "runtime_faults", "validate"]


MAX_FAULTS = 8  # faults of one kind that are spelled out; the others are counted


def validate(
    plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None, *, runnable: bool = False
) -> list[str]:
    """The faults of ``plan``, a sentence each; empty if it can be used. Raises nothing for a faulty plan.

    graph: the captured model, at any batch extent. cluster: the hardware to train on. runnable: also list what the
    runtime cannot execute.
    """
    return [fault for _, faults in _faults_by_rule(plan, graph, cluster, runnable) for fault in faults]


def require_valid(
    plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None, *, runnable: bool = False
) -> None:
    """Raise ValueError with the faults of the first rule that ``plan`` breaks; the arguments are those of
    ``validate``."""
    for (rule, remedy), faults in _faults_by_rule(plan, graph, cluster, runnable):
        if faults:
            raise ValueError(f"{rule}: {'; '.join(_limited(faults))}; {remedy}")


#: what is wrong, and what to do about it
_DOCUMENT = ("the plan does not hold", "plan again, or correct the plan")
_OTHER_MODEL = ("this plan is for another model", "plan again, or pass the model that it was made for")
_MODEL = ("this plan does not hold for the model", "plan again, or correct the plan")
_CLUSTER = ("this plan is for another cluster", "plan again for this one")
_RUNTIME = ("the runtime cannot execute this plan", "plan again without")


def _faults_by_rule(
    plan: Plan, graph: Graph | None, cluster: Cluster | None, runnable: bool
) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """Each rule with its remedy and the faults against it, one rule at a time: who raises at the first fault does not
    pay for the others."""
    faults = list(_document_faults(plan))
    sound = not faults
    yield _DOCUMENT, faults
    if graph is not None:
        faults = _other_model(plan, graph)
        yield _OTHER_MODEL, faults
        broken = _model_faults(plan, graph, same_model=not faults)
        sound = sound and not faults and not broken
        yield _MODEL, broken
    if cluster is not None:
        yield _CLUSTER, _cluster_faults(plan, cluster)
    if runnable:
        # labels that no rule offers have no strategy that could be asked for its program
        yield _RUNTIME, runtime_faults(plan, graph if sound else None)


def _limited(faults: Iterator[str] | list[str]) -> list[str]:
    listed = list(faults)
    return listed if len(listed) <= MAX_FAULTS else [*listed[:MAX_FAULTS], f"{len(listed) - MAX_FAULTS} more"]


# ---- the document by itself


def _document_faults(plan: Plan) -> Iterator[str]:
    """Contradictions inside of the document."""
    yield from carrier_faults(plan.codes)
    if plan.microbatches < 1 or plan.global_batch % plan.microbatches:
        yield f"global_batch {plan.global_batch} is not divisible by microbatches {plan.microbatches}"
    yield from _layer_faults(plan)
    if len(plan.prediction.stages) != len(plan.stages):
        yield f"the prediction has {len(plan.prediction.stages)} stages, the plan {len(plan.stages)}"
    stage_of: dict[int, int] = {}
    for index, (stage, predicted) in enumerate(zip(plan.stages, plan.prediction.stages)):
        if len(predicted.chunk_s) not in ((0, 1) if len(stage.chunks) == 1 else (len(stage.chunks),)):
            yield f"stage {index}: the prediction has {len(predicted.chunk_s)} chunks, the stage {len(stage.chunks)}"
        if "framework" not in predicted.memory_bytes:
            yield f"stage {index}: the prediction's memory_bytes lack 'framework'"
    for index, stage in enumerate(plan.stages):
        for fault in _stage_faults(stage):
            yield f"stage {index}: {fault}"
        for device in stage.devices:
            if device in stage_of:
                yield f"device {device} is in stages {stage_of[device]} and {index}"
            if not 0 <= device < plan.num_devices:
                yield f"stage {index}: device {device} is not in the cluster of {plan.num_devices}"
            stage_of[device] = index
    for transfer in plan.transfers:
        yield from _transfer_faults(transfer, plan.stages)


def _layer_faults(plan: Plan) -> Iterator[str]:
    """Chunks that do not follow each other as the schedule has them, or leave layers out."""
    if not plan.stages or not all(stage.chunks for stage in plan.stages):
        yield "a plan has stages of one chunk or more each"
        return
    counts = {len(stage.chunks) for stage in plan.stages}
    if len(counts) > 1:
        yield f"stages have equally many chunks, but got {', '.join(map(str, sorted(counts)))}"
        return
    try:
        order = virtual_order(plan.schedule, len(plan.stages), plan.num_chunks)
    except ValueError as error:
        yield str(error)
        return
    end = 0
    for stage, chunk in order:
        first, last = plan.stages[stage].chunks[chunk].layers
        if first != end or last <= first:
            yield f"stage {stage}, chunk {chunk} has layers [{first}, {last}), but its layers begin at {end}"
            return
        end = last
    if end != len(plan.layers):
        yield f"the stages have layers [0, {end}), the plan names {len(plan.layers)}"


def _stage_faults(stage: Stage) -> Iterator[str]:
    """Contradictions inside of one stage."""
    axes = len(stage.mesh_shape)
    if list(stage.devices) != list(range(min(stage.devices, default=0), max(stage.devices, default=-1) + 1)):
        yield f"devices are consecutive and rise, but got {list(stage.devices)}"
    if prod(stage.mesh_shape) != len(stage.devices):
        yield f"mesh shape {list(stage.mesh_shape)} is not {len(stage.devices)} devices"
    for chunk in stage.chunks:
        for name, labels in chunk.ops.items():
            if len(labels) != axes:
                yield f"op {name} has labels for {len(labels)} axes, the mesh has {axes}"
        first, end = chunk.layers
        if chunk.recompute and len(chunk.recompute) != end - first:
            yield f"recompute has {len(chunk.recompute)} modes for the {end - first} layers [{first}, {end})"
        for mode in dict.fromkeys(chunk.recompute):
            if mode not in RECOMPUTE_MODES:
                yield f"recompute {mode!r} is none of {', '.join(RECOMPUTE_MODES)}"
        pairs = {**chunk.sources, **chunk.receives, **{n: home.compute for n, home in chunk.parameters.items()}}
        specs = {**{name: pair.value for name, pair in pairs.items()}, **chunk.sends}
        for name, spec in specs.items():
            if len(spec) != axes:
                yield f"{name} has a spec of {len(spec)} axes, the mesh has {axes}"
        for name, home in chunk.parameters.items():
            for use, spec in (("stored", home.stored), ("gradient", home.gradient), ("optimizer", home.optimizer)):
                if len(spec) != axes:
                    yield f"parameter {name} has a {use} spec of {len(spec)} axes, the mesh has {axes}"
    for wire in stage.wire:
        if not all(0 <= axis < axes for axis in wire.axes):
            yield f"gradients are reduced over mesh axes {list(wire.axes)}, but the mesh has {axes} axes"
        if wire.algorithm not in ("backend", *REDUCTIONS) or wire.compressor not in CODECS:
            names = f"{', '.join(REDUCTIONS)} or backend, and codecs {', '.join(CODECS)}"
            yield f"gradients are reduced by {wire.algorithm!r} with codec {wire.compressor!r}; algorithms are {names}"


def _transfer_faults(transfer: Transfer, stages: Sequence[Stage]) -> Iterator[str]:
    """Ends of one transfer that do not exist, or do not send and receive its tensor."""
    source, target, several = transfer.source, transfer.target, any(len(stage.chunks) > 1 for stage in stages)
    exist = 0 <= min(source, target) <= max(source, target) < len(stages)
    if not exist or (source >= target if not several else source == target):
        yield f"transfer of {transfer.node} goes from stage {source} to {target}"
        return
    ends = ((source, transfer.source_chunk, "send"), (target, transfer.target_chunk, "receive"))
    for index, number, verb in ends:
        chunks = stages[index].chunks
        if not 0 <= number < len(chunks):
            yield f"transfer of {transfer.node}: stage {index} has no chunk {number}"
        elif transfer.node not in (chunks[number].sends if verb == "send" else chunks[number].receives):
            yield f"stage {index} does not {verb} {transfer.node}"


# ---- the model


def _model_faults(plan: Plan, graph: Graph, *, same_model: bool) -> list[str]:
    """Ops, parameters and tensors that only one of the two has, and labels that no rule offers. The data flow and the
    labels are read only where all names agree."""
    if plan.precision != graph.precision:
        try:
            graph = in_precision(graph, plan.precision)
        except ValueError as error:
            return [str(error)]
    faults = _limited(_unknown_names(plan, graph))
    if same_model and not faults:
        faults += _limited(itertools.chain(_broken_flow(plan, graph), _buffers_in_several_chunks(plan, graph)))
    if same_model and not faults and plan.microbatches >= 1 and plan.global_batch % plan.microbatches == 0:
        try:
            small = graph.with_batch(plan.microbatch_size)
        except ValueError as error:
            return [f"microbatches of {plan.microbatch_size}: {error}"]
        faults += _limited(_refused_labels(plan, small))
    return faults


def _other_model(plan: Plan, graph: Graph) -> list[str]:
    if plan.model == graph.fingerprint():
        return []
    given = Counter(op_name(node) for node in graph.ops())
    difference = _op_difference(plan.model_ops, given)
    return [f"the plan is of model {plan.model}, but got {graph.fingerprint()}: {difference}"]


def _op_difference(planned: Mapping[str, int], given: Mapping[str, int]) -> str:
    """The ops that only one of the two has, with counts."""
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
    """Tensors that a stage reads but neither makes nor receives, or should pass on but nobody brings or makes."""
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


def _buffers_in_several_chunks(plan: Plan, graph: Graph) -> Iterator[str]:
    """Buffers that one chunk reads and another one updates."""
    chunk_of = {op: (index, number) for index, number, chunk in _chunks(plan) for op in chunk.ops}
    made = {result.name: _producer(graph.node(result.node)) for result in graph.results if result.kind == "buffer"}
    for node in graph.placeholders("buffer"):
        name = node.meta["source"].name
        if name in made:
            places = {chunk_of[op] for op in (made[name], *(user.name for user in node.users)) if op in chunk_of}
            if len(places) > 1:
                stages = " and ".join(str(index) for index, _ in sorted(places))
                yield f"stages {stages} read or update buffer {name}, which one alone may"


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


def _cluster_faults(plan: Plan, cluster: Cluster) -> list[str]:
    """The differences between the plan's cluster ("-" lines) and ``cluster`` ("+" lines)."""
    planned = Cluster.from_json(json.dumps(plan.cluster))
    return [f"the cluster differs: {line}" for line in planned.difference(cluster)]


# ---- the runtime


def runtime_faults(plan: Plan, graph: Graph | None = None) -> list[str]:
    """A line for each kind of decision that the runtime cannot execute yet; empty if it can execute the plan. graph:
    the captured model, without which ops are not looked at."""
    lines = list(_custom_shardings(plan))
    if graph is not None:
        lines += _ops_without_program(plan, graph)
    return [*lines, *_asynchronous_faults(plan)]


def _custom_shardings(plan: Plan) -> Iterator[str]:
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for _, _, chunk in _chunks(plan):
        for name, home in chunk.parameters.items():
            names_of[home.pattern].append(name)
    if names := names_of["custom"]:
        yield f"parameters in a custom sharding ({len(names)}: {names[0]}{', …' if len(names) > 1 else ''})"


def _ops_without_program(plan: Plan, graph: Graph) -> Iterator[str]:
    small, counts = graph.with_batch(plan.microbatch_size), Counter[str]()
    nodes = small.by_name()
    for index, _, chunk in _chunks(plan):
        for op, labels in chunk.ops.items():
            if op in nodes and not pairs_choice(nodes[op], labels, plan.stages[index].mesh_shape).executable:
                counts[f"{op} cut by {','.join(labels)}"] += 1
    shown = list(counts)[:4]
    if counts:
        yield f"ops without a program: {', '.join(shown)}" + (f" and {len(counts) - 4} more" if len(counts) > 4 else "")


def is_asynchronous(plan: Plan) -> bool:
    """True if training steps overlap; a pipeline of one stage has nothing to overlap."""
    return plan.schedule == PIPEDREAM and len(plan.stages) > 1


def notes(plan: Plan) -> list[str]:
    """A line for a plan whose schedule changes the optimisation."""
    if not is_asynchronous(plan):
        return []
    p, m = len(plan.stages), plan.microbatches
    lag = lag_steps(p, m)
    copies = ", ".join(str(stashed_versions(s, p, m)) for s in range(p))
    return [
        f"schedule {PIPEDREAM} changes the optimisation: steps overlap, and gradients are of weights that are up to "
        f"{lag} update{'s' if lag > 1 else ''} old (stages keep {copies} old versions of their weights); "
        "flush() drains the pipeline"
    ]


def _asynchronous_faults(plan: Plan) -> Iterator[str]:
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
