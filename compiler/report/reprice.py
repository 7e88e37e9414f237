"""Repricing: the same decisions of a plan with the prices of another cluster.

Every op keeps its labels, every parameter, input and boundary its placement; only the prediction is new. Recalibration,
edited plans and benchmarks use this; nothing is searched.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from ...costmodel.cluster import Cluster
from ...costmodel.memory import FRAMEWORK_BYTES, state_tensors, usable_bytes
from ..cost.gradient_communication import Communication
from ..cost.gradient_reduction import lossy_notes
from ..cost.parameter_sharding import sharding_text
from ..cost.pricing import MeshPricer
from ..frontend.layers import Layering, cluster_layers
from ..frontend.mixed_precision import in_precision
from ..frontend.strides import note_layouts
from ..intra_op.restriction import Restriction
from ..intra_op.section import Section, StageContext, build_section
from ..intra_op.stage import SolvedStage, describe_stage
from ..ir.graph import Graph, op_name, output_of
from ..ir.spec import Pair
from ..memory.stage import with_stage_memories
from ..pipeline.families import in_flight_formula
from ..pipeline.regular import in_flight_by_chunk
from ..plan.plan import Chunk, Plan, Prediction
from ..plan.recompute import Recompute, modes_in, recompute_of
from ..plan.validation import notes as asynchronous_notes
from ..plan.validation import precision_notes
from ..search.predict import merge_chunks, microbatch_flops, predict
from ..text import bytes_text

__all__ = ["memory_faults", "pinned_section", "reprice"]

#: notes that follow from decisions and prices, and are written anew
_RENEWED = re.compile(
    r"^memory of stage|are compressed by|stay idle$|^computed in |changes the optimisation|^irregular: |"
    r"^does not fit: |^the search ended early|^edited: |^the state of optimizer|^whether the prices"
)


def reprice(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    """``plan`` with the prediction that ``cluster`` gives for it, and that cluster in it. ``graph``: the captured
    model, at any batch extent.

    The alternatives are of the search on the old prices and fall away, and so does the bound (``bound_s`` is 0) where
    the decisions were edited or the cluster is another one. Raises ValueError if the cluster has another number of
    devices than the plan, or if the plan's decisions do not fit the graph (``validation.require_valid`` says more).
    """
    if cluster.num_devices != plan.num_devices:
        raise ValueError(
            f"a plan is priced on as many devices as it is for, but got a cluster of {cluster.num_devices} and a plan "
            f"for {plan.num_devices}; pass a cluster of that size"
        )
    graph = in_precision(graph, plan.precision)
    small = graph.with_batch(plan.microbatch_size)
    if any(host.device.op_times for host in cluster.hosts):
        note_layouts(small)
    layering = cluster_layers(graph)
    recompute = recompute_of(graph, layering, modes_in(plan.stages), plan.schedule)
    parts = [_stage(plan, index, small, layering, recompute, cluster) for index in range(len(plan.stages))]
    step = predict(
        small, cluster, layering.needs_grad, plan.schedule, plan.microbatches, plan.optimizer, parts,
        plan.code("activations"),
    )  # fmt: skip
    kept = [note for note in plan.prediction.notes if not _RENEWED.search(note)]
    anew = [*lossy_notes(plan.stages, plan.codes), *precision_notes(plan), *asynchronous_notes(plan)]
    anew += filter(None, (state_tensors(plan.optimizer)[1],))
    described = json.loads(cluster.to_json())
    same = plan.seal is not None and plan.price_state == "current" and described == plan.cluster
    prediction = Prediction(
        step_s=step.step_s,
        bound_s=min(plan.prediction.bound_s, step.step_s) if same else 0.0,
        stages=step.stages,
        flops=plan.microbatches * microbatch_flops(small, cluster, layering),
        replicated_flops=plan.microbatches * sum(part.wasted_flops for part in parts),
        notes=plan.prediction.notes if same else tuple(dict.fromkeys((*anew, *kept))),
        sources=step.sources,
    )
    provenance = {**plan.provenance, "cluster": cluster.fingerprint()}
    priced = replace(
        plan,
        cluster=described,
        transfers=step.transfers,
        prediction=prediction,
        provenance=provenance,
    )
    return with_stage_memories(small, priced).sealed()


def memory_faults(plan: Plan) -> list[str]:
    """A sentence for each stage that holds more than its devices have."""
    usable, found = usable_bytes(Cluster.from_json(json.dumps(plan.cluster))), []
    for index, (stage, predicted) in enumerate(zip(plan.stages, plan.prediction.stages)):
        used = predicted.peak_bytes - predicted.memory_bytes["framework"]
        limit = min(usable[device] for device in stage.devices)
        if used > limit:
            found.append(f"stage {index} needs {bytes_text(used)} per device, but has {bytes_text(max(0, limit))}")
    return found


def _stage(
    plan: Plan, index: int, graph: Graph, layering: Layering, recompute: Recompute, cluster: Cluster
) -> SolvedStage:
    """Stage ``index`` priced with everything pinned to what the plan says."""
    stage = plan.stages[index]
    codes = Communication(weights=plan.code("weights")).priced_for(graph)
    pricer = MeshPricer(cluster, stage.devices[0], stage.mesh_shape, plan.optimizer, codes, mixed=graph.mixed)
    p, v = len(plan.stages), len(stage.chunks)
    flight = in_flight_formula(plan.schedule, index, p, plan.microbatches, plan.chunks_asked) if v == 1 else 1
    parts = []
    for part in stage.chunks:
        context = StageContext(graph, layering, pricer, plan.microbatches, recompute=recompute)
        section = pinned_section(part, context)
        framework = FRAMEWORK_BYTES[cluster.device(stage.devices[0]).kind]
        chosen = [0] * len(section.names)
        parts.append(describe_stage(context, part.layers, section, chosen, flight, framework, stage.wire))
    if v > 1:  # what is in flight of each chunk when the stage holds most
        times = in_flight_by_chunk(plan.schedule, p, plan.microbatches, v)[index]
        worst = times[(times @ [part.saved_bytes for part in parts]).argmax()]
        parts = [part.with_in_flight(int(held)) for part, held in zip(parts, worst)]
    priced = merge_chunks(parts)
    return replace(priced, stage=replace(stage, wire=stage.wire or priced.stage.wire))


def pinned_section(part: Chunk, context: StageContext) -> Section:
    """A chunk as a section in which everything has one choice."""
    graph = context.graph
    nodes = graph.by_name()
    parameters = {
        node.name: sharding_text(part.parameters[node.meta["source"].name])
        for node in graph.placeholders("parameter")
        if node.meta["source"].name in part.parameters
    }
    pinned = {name: ",".join(labels) for name, labels in part.ops.items()} | parameters
    pinned |= {name: str(pair) for name, pair in part.sources.items()}
    if unknown := sorted(set(part.ops) - set(nodes)):
        raise ValueError(
            f"the plan names ops that the model's graph does not have: {', '.join(unknown[:5])}; plan again"
        )
    ops = [
        node
        for node in graph.ops()
        if (output_of(node)[0].name if op_name(node) == "getitem" else node.name) in part.ops
    ]
    section = build_section(
        replace(context, restriction=Restriction(pinned=pinned)),
        ops,
        {name: [pair] for name, pair in part.receives.items()},
        {name: [Pair(spec, spec)] for name, spec in part.sends.items()},
    )
    if loose := [name for name, choices in zip(section.names, section.choices) if len(choices) != 1]:
        raise ValueError(
            "a plan that is priced decides everything, but got one that leaves open, or decides as no rule offers it, "
            f"{', '.join(loose[:5])}; correct the plan"
        )
    return section
