"""One stage of a plan as one problem, what its choices hold while they run, and the stage that they make: the prices of
what was chosen, summed by cause. ``whole_stage`` chooses.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .eliminate import TooWide, eliminate
from .graph import Graph, tensor_operands, types_of
from .intra_op import Infeasible, Problem
from .lagrange import solve
from .layers import Layering
from .plan import Chunk, Residency, Stage, StagePrediction, Wire
from .pricing import MeshPricer, partial_axes
from .problem import Section, build_section
from .recompute import NOTHING, Recompute
from .reshard import FREE, steps_between
from .residency import residency_bytes
from .restriction import Restriction
from .rules import MeshChoice
from .spec import Pair, Spec
from .stage_price import price_stage
from .variants import State

__all__ = ["Assembled", "describe_stage", "solve_section", "stage_section", "transient_bytes"]


@dataclass(frozen=True)
class Assembled:
    """A stage with its prediction, and what only ``predict`` needs: seconds per step by where the price comes from,
    FLOPs done by several."""

    stage: Stage
    prediction: StagePrediction
    sources: Mapping[str, float]
    wasted_flops: float


def stage_section(
    graph: Graph,
    layering: Layering,
    pricer: MeshPricer,
    microbatches: int,
    layers: tuple[int, int],
    states: tuple[State, State],
    restriction: Restriction,
    recompute: Recompute,
) -> Section:
    """Layers [first, end) as one section whose borders are in these states."""
    first, end = layers
    ops = layering.ops_of(graph, first, end)
    used = {operand.name for node in ops for operand in node.all_input_nodes}
    entering, leaving = layering.crossing[first], layering.crossing[end]
    results = {result.node for result in graph.results if result.kind in ("loss", "output")}
    entries = {
        name: [pair]
        for name, pair in zip(entering, states[0])
        if name in used or (name in results and name not in leaving)
    }
    exits = {name: [pair] for name, pair in zip(leaving, states[1]) if name not in entering}
    return build_section(graph, layering, ops, pricer, microbatches, entries, exits, restriction, recompute)


def transient_bytes(section: Section, chosen: Sequence[int], layering: Layering) -> float:
    """The most that any one layer holds, while it runs, beside the bytes kept: what is recomputed, gathered values."""
    if not section.transient:
        return 0.0
    layer_of = layering.layer_of
    held: defaultdict[int | None, float] = defaultdict(float)
    read_in = {section.names[edge.producer]: section.names[edge.consumers[0][0]] for edge in section.edges}
    for name, size, pick in zip(section.names, section.transient, chosen):
        held[layer_of.get(name, layer_of.get(read_in.get(name, "")))] += float(size[pick])
    for edge, size in zip(section.edges, section.edge_transient):
        given = edge.source[chosen[edge.producer]]
        at = layer_of.get(edge.name, layer_of.get(section.names[edge.consumers[0][0]]))
        for target in {int(wanted[chosen[consumer]]) for consumer, wanted in edge.consumers}:
            held[at] += float(size[given, target])
    return max(held.values(), default=0.0)


def solve_section(section: Section, in_flight: float) -> tuple[int, ...]:
    """The fastest choice per operator; of equally fast ones the leanest."""
    problem: Problem = section.problem(in_flight)
    try:
        return eliminate(problem, byte_weight=1e-30).assignment()
    except TooWide:
        found = solve(problem)
        assert not isinstance(found, Infeasible)
        return found.choice


def describe_stage(
    graph: Graph,
    pricer: MeshPricer,
    layering: Layering,
    layers: tuple[int, int],
    section: Section,
    chosen: Sequence[int],
    in_flight: int,
    framework: float,
    microbatches: int,
    recompute: Recompute = NOTHING,
    wire: Sequence[Wire] = (),
) -> Assembled:
    """The stage that these choices make, with everything that its prices say. wire: ways of gradients that stand."""
    nodes, grad = graph.by_name(), layering.needs_grad
    price = price_stage(graph, pricer, layering, section, chosen, microbatches, recompute, wire)
    memory = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "temporary", "framework"), 0.0)
    memory["framework"] = framework
    collectives: Counter[str] = Counter()
    ops: dict[str, tuple[str, ...]] = {}
    parameters: dict[str, Residency] = {}
    sources: dict[str, Pair] = {}
    receives: dict[str, Pair] = {}
    sends: dict[str, Spec] = {}
    largest = 0.0
    for name, kind, choices, saved, pick in zip(section.names, section.kinds, section.choices, section.saved, chosen):
        choice, node = choices[pick], nodes[name]
        memory["activations"] += in_flight * float(saved[pick])
        if isinstance(choice, MeshChoice):
            ops[name] = choice.labels
            for _, message in choice.internal:
                if message.is_sent(node, grad):
                    collectives[f"{message.phase} {message.kind}"] += message.count
                if message.phase == "forward" and name in recompute.repeated:
                    collectives[f"backward {message.kind}"] += message.count
            touched = sum(pricer.local_bytes(t, p.value) for t, p in zip(types_of(node), choice.outputs))
            touched += sum(
                pricer.operand_bytes(o, p.value)
                for o, p in zip(tensor_operands(node), choice.inputs)
                if o.op != "placeholder"
            )
            largest = max(largest, touched)
        elif isinstance(choice, Residency):
            source, tensor = node.meta["source"], node.meta["type"]
            for cause, size in residency_bytes(pricer, tensor, choice, source.requires_grad).items():
                memory[cause] += size
            parameters[source.name] = choice
        elif kind == "source":
            sources[name] = choice
            if node.meta["source"].kind == "buffer":
                memory["parameters"] += pricer.local_bytes(node.meta["type"], choice.value)
        elif kind == "entry":
            receives[name] = choice
        elif kind == "exit":
            sends[name] = choice.value
    for edge, (source_pairs, target_pairs) in zip(section.edges, section.edge_states):
        given = edge.source[chosen[edge.producer]]
        needs = edge.name in grad
        for target in {int(wanted[chosen[consumer]]) for consumer, wanted in edge.consumers}:
            pair, want = source_pairs[given], target_pairs[target]
            memory["activations"] += in_flight * float(edge.bytes[given, target])
            if pair == want:
                continue
            steps = [("forward", steps_between(pair.value, want.value))]
            if recompute.converts_again(edge.name):
                steps.append(("backward", steps[0][1]))
            if needs:
                steps.append(("backward", steps_between(want.cotangent, pair.cotangent)))
            for phase, path in steps:
                for step in path:
                    if step.kind not in FREE:
                        collectives[f"{phase} {step.kind.removesuffix('_max')}"] += 1
    for one in price.gathers:
        collectives["forward all_gather"] += 1
        collectives["backward all_gather"] += one.again
        collectives["backward reduce_scatter"] += bool(one.sums)
    memory["activations"] += transient_bytes(section, chosen, layering)
    memory["temporary"] = 2 * largest
    order = {node.name: i for i, node in enumerate(graph)}
    chunk = Chunk(
        layers=layers,
        ops={name: ops[name] for name in sorted(ops, key=order.__getitem__)},
        parameters=parameters,
        sources={name: sources[name] for name in sorted(sources, key=order.__getitem__)},
        receives={name: receives[name] for name in sorted(receives, key=order.__getitem__)},
        sends={name: sends[name] for name in sorted(sends, key=order.__getitem__)},
        recompute=recompute.modes_of(layers),
    )
    first_device = pricer.offset
    devices = tuple(range(first_device, first_device + pricer.num_devices))
    wires = _wires(section, chosen, graph, pricer, grad, price.ways)
    stage = Stage(devices, pricer.mesh_shape, (chunk,), wires)
    prediction = StagePrediction(
        price.forward_s,
        price.backward_s,
        price.step_s,
        dict(price.seconds),
        dict(memory),
        dict(sorted((+collectives).items())),
    )
    return Assembled(stage, prediction, price.sources, price.wasted_flops)


def _wires(
    section: Section,
    chosen: Sequence[int],
    graph: Graph,
    pricer: MeshPricer,
    grad: frozenset[str],
    ways: Mapping[tuple[int, ...], tuple[str, str]],
) -> tuple[Wire, ...]:
    """How the gradients travel, by the axes over which they are sums; where ``ways`` does not say, as the backend does
    it by itself, exactly."""
    nodes, sizes = graph.by_name(), defaultdict[tuple[int, ...], float](float)
    for name, choices, pick in zip(section.names, section.choices, chosen):
        choice, node = choices[pick], nodes[name]
        if not isinstance(choice, Residency) or not node.meta["source"].requires_grad or name not in grad:
            continue
        if axes := partial_axes(choice.compute, pricer.mesh_shape):
            sizes[axes] += pricer.local_bytes(node.meta["type"], choice.compute.value)
    return tuple(Wire(axes, *ways.get(axes, ("backend", "none")), sizes[axes]) for axes in sorted(sizes))
