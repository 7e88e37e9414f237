"""A plan for the evaluation graph of a model whose training plan stands: parameters stay where they are, nothing is
searched twice.

The evaluation graph is another graph (no loss, no dropout, running statistics), so it has choices of its own. Each op
goes to the first stage that has its parameters and comes no earlier than its operands; each stage is then solved as one
problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...costmodel.cluster import Cluster
from ..cost.pricing import MeshPricer
from ..frontend.layers import Layering, cluster_layers
from ..intra_op.restriction import Restriction
from ..intra_op.section import StageContext, boundary_states, build_section
from ..intra_op.stage import describe_stage, solve_section
from ..ir.graph import Graph, op_name, output_of
from ..ir.spec import Pair, R
from ..plan.plan import Plan, Transfer, parameter_stages

__all__ = ["plan_evaluation"]


def plan_evaluation(graph: Graph, plan: Plan, cluster: Cluster, buffers: Mapping[str, Mapping[int, Pair]]) -> Plan:
    """The training ``plan`` with chunks for ``graph`` (at the batch extent to evaluate) in one microbatch.

    buffers: name → stage → where the training plan keeps it.
    """
    layering = cluster_layers(graph)
    homes = _homes(graph, plan, layering)
    stages = []
    nodes = graph.by_name()
    for index, stage in enumerate(plan.stages):
        ops = [node for node in graph.ops() if index in homes[node.name]]
        members = {node.name for node in ops}
        entering = {
            operand.name
            for node in ops
            for operand in node.all_input_nodes
            if operand.op != "placeholder" and operand.name not in members
        }
        leaving = [
            node.name
            for node in ops
            if node.name not in layering.floating
            and any(home > index for user in node.users if user.name in homes for home in homes[user.name])
            and not isinstance(node.meta["type"], tuple)
        ]
        pinned = {}
        for node in graph.placeholders("parameter", "buffer"):
            source = node.meta["source"]
            residency = stage.homes.get(source.name)
            whole = Pair((R,) * len(stage.mesh_shape), (R,) * len(stage.mesh_shape))
            stored = (
                buffers.get(source.name, {}).get(index, whole)
                if residency is None
                else Pair(residency.stored, whole.value)
            )
            pinned[node.name] = str(Pair(stored.value, whole.value))
        pricer = MeshPricer(cluster, stage.devices[0], stage.mesh_shape, plan.optimizer)
        context = StageContext(graph, layering, pricer, 1, Restriction(pinned=pinned))
        section = build_section(
            context,
            ops,
            {name: boundary_states(nodes[name].meta["type"], None, stage.mesh_shape) for name in sorted(entering)},
            {name: boundary_states(nodes[name].meta["type"], None, stage.mesh_shape) for name in leaving},
        )
        chosen = solve_section(section, 1)
        stages.append(describe_stage(context, (0, 0), section, chosen, 1, 0.0).stage)
    senders = {name: s for s, stage in enumerate(stages) for name in stage.chunks[0].sends}
    transfers = tuple(Transfer(name, senders[name], s) for s, st in enumerate(stages) for name in st.chunks[0].receives)
    return replace(
        plan,
        model=graph.fingerprint(),
        stages=tuple(stages),
        transfers=transfers,
        global_batch=graph.batch,
        microbatches=1,
    )


def _homes(graph: Graph, plan: Plan, layering: Layering) -> dict[str, set[int]]:
    """Op → the stages that run it: one for ops that depend on parameters, as many as need it for floating ones."""
    holders = parameter_stages(plan.stages)
    floating = set(layering.floating)
    homes: dict[str, set[int]] = {}
    for node in graph.ops():
        if node.name in floating:
            homes[node.name] = set()
            continue
        if op_name(node) == "getitem":
            homes[node.name] = set(homes[output_of(node)[0].name])
            continue
        at = max((h for operand in node.all_input_nodes for h in homes.get(operand.name, ())), default=0)
        for operand in node.all_input_nodes:
            if operand.op == "placeholder" and operand.meta["source"].kind == "parameter":
                where = holders.get(operand.meta["source"].name, (at,))
                at = next((s for s in where if s >= at), max(at, where[-1]))
        homes[node.name] = {at}
    last = len(plan.stages) - 1
    for result in graph.results:
        if result.node in floating:
            homes[result.node].add(last)
    for node in reversed(graph.ops()):
        for operand in node.all_input_nodes:
            if operand.name in floating:
                homes[operand.name] |= homes[node.name]
    return homes
