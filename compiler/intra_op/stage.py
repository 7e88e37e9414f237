"""The solver of one stage of a plan: it solves the whole stage as one problem and describes the result.

The interval tables choose strategies layer by layer between boundary states. Here all tensors, tied parameters and
floating ops of the stage are seen at once. First every op keeps the label that the tables chose, and the rest
(parameters, inputs, floating ops) is solved around it. In a small graph all choices are then solved freely under the
memory limit.

**Messages of parameters.** In the problem a gradient costs its share of a full bucket, and a weight that is gathered
layer by layer costs its share of the layer's largest message. These seconds add up, and they are lower bounds. A small
stage fills no bucket, so its messages really take longer. Where the real price (``price_stage``) is above that of the
problem, a stage that is not large is solved again without one kind of message over one group of axes, as long as this
helps. The choice with the least real price wins among those that fit. Stages whose ops keep their labels are solved
again only if their layers gather weights, or if they shard gradients on devices that overlap. There the real price may
also be below the problem's: sums of whole gradients hide behind the backward, so that one more trial shards nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ..cost.parameter_sharding import sharding_bytes
from ..cost.pricing import MeshPricer, partial_axes
from ..errors import TooWide
from ..frontend.layers import Layering
from ..ir.graph import Graph, tensor_operands, types_of
from ..ir.reshard import LOCAL_STEPS, steps_between
from ..ir.spec import Pair, Spec
from ..plan.plan import Chunk, GradientReduction, ParameterSharding, Stage, StagePrediction
from ..rules import MeshChoice
from .section import Section, StageContext, State, build_section
from .solver.elimination import eliminate
from .solver.lagrange import solve
from .solver.problem import TOLERANCE, InfeasibleAssignment, Problem, evaluate, restrict
from .stage_cost import price_stage

__all__ = ["SolvedStage", "describe_stage", "solve_section", "solve_stage", "stage_section", "transient_bytes"]


@dataclass(frozen=True)
class SolvedStage:
    """A stage with its prediction."""

    stage: Stage
    prediction: StagePrediction
    #: Seconds per step by the origin of the price.
    sources: Mapping[str, float]
    #: FLOPs that several devices repeat.
    wasted_flops: float
    #: Microbatches in flight, and the bytes that each of them keeps.
    in_flight: int = 1
    saved_bytes: float = 0.0

    def with_in_flight(self, in_flight: int) -> SolvedStage:
        """The stage with so many microbatches in flight."""
        more = (in_flight - self.in_flight) * self.saved_bytes
        memory = self.prediction.memory_bytes
        memory = {**memory, "activations": memory["activations"] + more}
        return replace(self, prediction=replace(self.prediction, memory_bytes=memory), in_flight=in_flight)


def stage_section(context: StageContext, layers: tuple[int, int], states: tuple[State, State]) -> Section:
    """Build layers [first, end) as one section whose borders are in these states."""
    graph, layering = context.graph, context.layering
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
    return build_section(replace(context, layering=layering.of_stages), ops, entries, exits)


def transient_bytes(section: Section, chosen: Sequence[int], layering: Layering) -> float:
    """The most bytes that any layer holds while it runs, beside those kept: recomputed tensors and gathered weights."""
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


def solve_section(section: Section, in_flight: float, narrow: bool = False) -> tuple[int, ...]:
    """The fastest choice per operator; of equally fast ones the leanest. Raises TooWide where ``narrow`` and an integer
    program would have to find it."""
    problem: Problem = section.problem(in_flight)
    seconds = sum(float(op.seconds.min()) for op in problem.operators if np.isfinite(op.seconds).any())
    every = [op.bytes for op in problem.operators] + [edge.bytes for edge in problem.edges]
    size = sum(float(one.max(initial=0.0)) for one in every)
    try:  # all bytes together are worth a difference of seconds that no solver sees
        return eliminate(problem, byte_weight=TOLERANCE * seconds / max(size, 1.0)).assignment()
    except TooWide:
        if narrow:
            raise
        solution = solve(problem)
        assert not isinstance(solution, InfeasibleAssignment)
        return solution.choice


def describe_stage(
    context: StageContext,
    layers: tuple[int, int],
    section: Section,
    chosen: Sequence[int],
    in_flight: int,
    framework: float,
    reductions: Sequence[GradientReduction] = (),
) -> SolvedStage:
    """Return the stage that these choices make, with its prediction.

    chosen: an index per operator of ``section``; in_flight: microbatches whose activations are held at once;
    framework: bytes of the framework itself; reductions: gradient reductions whose algorithm and codec are fixed.
    """
    graph, pricer, recompute = context.graph, context.pricer, context.recompute
    nodes, grad = graph.by_name(), context.layering.needs_grad
    price = price_stage(context, section, chosen, reductions)
    memory = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "temporary", "framework"), 0.0)
    memory["framework"] = framework
    collectives: Counter[str] = Counter()
    ops: dict[str, tuple[str, ...]] = {}
    parameters: dict[str, ParameterSharding] = {}
    sources: dict[str, Pair] = {}
    receives: dict[str, Pair] = {}
    sends: dict[str, Spec] = {}
    largest = saved_bytes = 0.0
    for name, kind, choices, saved, pick in zip(section.names, section.kinds, section.choices, section.saved, chosen):
        choice, node = choices[pick], nodes[name]
        saved_bytes += float(saved[pick])
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
        elif isinstance(choice, ParameterSharding):
            source, tensor = node.meta["source"], node.meta["type"]
            for cause, size in sharding_bytes(pricer, tensor, choice, source.requires_grad).items():
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
            saved_bytes += float(edge.bytes[given, target])
            if pair == want:
                continue
            steps = [("forward", steps_between(pair.value, want.value))]
            if recompute.converts_again(edge.name):
                steps.append(("backward", steps[0][1]))
            if needs:
                steps.append(("backward", steps_between(want.cotangent, pair.cotangent)))
            for phase, path in steps:
                for step in path:
                    if step.kind not in LOCAL_STEPS:
                        collectives[f"{phase} {step.kind.removesuffix('_max')}"] += 1
    for one in price.gathers:
        collectives["forward all_gather"] += 1
        collectives["backward all_gather"] += one.again
        collectives["backward reduce_scatter"] += bool(one.sums)
    memory["activations"] = in_flight * saved_bytes + transient_bytes(section, chosen, context.layering)
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
    reductions_chosen = _gradient_reductions(section, chosen, graph, pricer, grad, price.ways)
    stage = Stage(devices, pricer.mesh_shape, (chunk,), reductions_chosen)
    prediction = StagePrediction(
        price.forward_s,
        price.backward_s,
        price.step_s,
        dict(price.seconds),
        dict(memory),
        dict(sorted((+collectives).items())),
    )
    return SolvedStage(stage, prediction, price.sources, price.wasted_flops, in_flight, saved_bytes)


def _gradient_reductions(
    section: Section,
    chosen: Sequence[int],
    graph: Graph,
    pricer: MeshPricer,
    grad: frozenset[str],
    ways: Mapping[tuple[int, ...], tuple[str, str]],
) -> tuple[GradientReduction, ...]:
    """The gradient reductions of a stage by their mesh axes. Axes without a route in ``ways`` use the backend alone,
    exactly."""
    nodes, sizes = graph.by_name(), defaultdict[tuple[int, ...], float](float)
    for name, choices, pick in zip(section.names, section.choices, chosen):
        choice, node = choices[pick], nodes[name]
        if not isinstance(choice, ParameterSharding) or not node.meta["source"].requires_grad or name not in grad:
            continue
        if axes := partial_axes(choice.compute, pricer.mesh_shape):
            sizes[axes] += pricer.local_bytes(node.meta["type"], choice.compute.value)
    return tuple(GradientReduction(axes, *ways.get(axes, ("backend", "none")), sizes[axes]) for axes in sorted(sizes))


#: Stages with more operators keep the labels that the tables chose, and are not solved again without a message.
FREE_SOLVE_OPERATORS = 150
FREE_SOLVE_S = 1.0
#: Stages with more operators are solved to within ``LARGE_STAGE_GAP`` of the optimum.
LARGE_STAGE_OPERATORS = 600
LARGE_STAGE_GAP = 0.01
#: A stage is not solved again if its real price is above the problem's by no more than this fraction.
PRICE_TOLERANCE = 1e-4
_Message = tuple[str, tuple[int, ...]]  # what of parameters is sent: "gradients", "blocks" or "layers", over which axes
_Chosen = tuple[Section, tuple[int, ...]]


def solve_stage(
    context: StageContext,
    layers: tuple[int, int],
    states: tuple[State, State],
    labels: Mapping[str, str],
    in_flight: int,
    limit_bytes: float,
    framework: float,
    reductions: Sequence[GradientReduction] = (),
    free: bool = False,
) -> SolvedStage:
    """Solve the stage of ``layers`` [first, end) with its borders in these states.

    labels: the composed choice of ops and weights; free: a stage of few operators need not keep it; the other arguments
    as in ``describe_stage``.
    """
    graph, layering, pricer = context.graph, context.layering, context.pricer

    def section(pinned: Mapping[str, str], offered: Mapping[str, str]) -> Section:
        restriction = replace(context.restriction, pinned=pinned or None, offered=offered)
        return stage_section(replace(context, restriction=restriction), layers, states)

    stage = _Stage(context, reductions, in_flight, limit_bytes)
    nodes = graph.by_name()
    ops = {name: text for name, text in labels.items() if nodes[name].op != "placeholder"}
    wide = section(ops, {name: text for name, text in labels.items() if name not in ops})
    kept = wide.pinned(labels)
    best = kept, stage.solve(kept)
    around = _labels_without_shared_weights(labels, graph, layering, layers)
    if len(around) < len(labels):
        composed = section(around, {})
        with suppress(TooWide):  # an integer program takes seconds, and was seen to gain 0.4 % at the most
            best = min((composed, stage.solve(composed, narrow=True)), best, key=stage.price)
    retried = ("layers", "blocks") if pricer.device.overlap else ("layers",)
    if free and len(wide.names) <= FREE_SOLVE_OPERATORS and pricer.num_devices > 1:
        best = stage.improve(best, section({}, {}))
    elif any(what in retried for what, _ in _messages_of_choice(pricer, *best)):
        best = stage.improve(best, wide)
    return describe_stage(context, layers, *best, in_flight, framework, reductions)


def _labels_without_shared_weights(
    labels: Mapping[str, str], graph: Graph, layering: Layering, layers: tuple[int, int]
) -> Mapping[str, str]:
    """The labels without those of layers that share a weight with others, and of their neighbours.

    The tables price a part of the shared weight in each of its layers, in a state of its own. A stage holds it in one
    state, and converts it once per microbatch for layers that read another. The problem counts that, but prices
    gradients from below, so the choices of the tables may still be better.
    """
    free, (first, end) = set[str](), layers
    for node, using in layering.shared_weights(graph):
        free.add(node.name)
        near = {k for layer in using if first <= layer < end for k in (layer - 1, layer, layer + 1)}
        free.update(op for k in near if first <= k < end for op in layering.layers[k].ops)
    return labels if len(free) > FREE_SOLVE_OPERATORS else {k: v for k, v in labels.items() if k not in free}


@dataclass(frozen=True, eq=False)
class _Stage:
    """The search for the best choices of one stage, judged by their real price and their memory."""

    context: StageContext
    reductions: Sequence[GradientReduction]
    in_flight: int
    limit_bytes: float

    def solve(self, section: Section, narrow: bool = False) -> tuple[int, ...]:
        """The fastest choice per operator that fits; the fastest of all where none does. narrow: as in
        ``solve_section``."""
        chosen = solve_section(section, self.in_flight, narrow)
        if self._excess_bytes((section, chosen)) <= 0.0 or len(section.names) > FREE_SOLVE_OPERATORS:
            return chosen
        return self._solve_without(section, (), self._transient(section, chosen), self._gap(section)) or chosen

    def improve(self, first: _Chosen, free: Section) -> _Chosen:
        """The best of ``first`` and the choices of the same stage with its labels left open."""
        candidates, prices = [first], [self.price(first)]

        def offer(without: Sequence[_Message]) -> bool:
            """Solve without these messages, and return whether the choice is better than all before."""
            best = min(prices)
            beat_s = best[1] if best[0] <= 0.0 else np.inf
            # a ban is a trial: Lagrange's choice will do, and no integer program is solved for it
            near = np.inf if without else self._gap(free)
            chosen = self._solve_without(free, without, self._transient(*first), near, beat_s)
            if chosen is None:
                return False
            candidates.append((free, chosen))
            prices.append(self.price(candidates[-1]))
            return prices[-1] < best

        offer(())
        if self.context.pricer.device.overlap:  # sums of whole gradients may hide, which no problem knows
            every = {_message_of(self.context.pricer, one) for choices in free.choices for one in choices}
            if sharded := sorted(sent for sent in every if sent is not None and sent[0] != "gradients"):
                offer(sharded)
        if len(free.names) > FREE_SOLVE_OPERATORS:
            return candidates[prices.index(min(prices))]
        # Messages are banned greedily: each round keeps the ban that helped last, until no further ban helps.
        banned: list[_Message] = []
        while True:
            before = min(prices)
            best = candidates[prices.index(before)]
            seconds = evaluate(best[0].problem(self.in_flight), best[1])[0]
            # but for what hides the problem is a lower bound, so a real price that meets it is not improved
            if before[1] <= seconds * (1 + PRICE_TOLERANCE):
                return best
            better = [
                sent
                for sent in dict.fromkeys(_messages_of_choice(self.context.pricer, *best))
                if offer([*banned, sent])
            ]
            if not better:
                return best
            banned.append(better[-1])

    def _gap(self, section: Section) -> float:
        return LARGE_STAGE_GAP if len(section.names) > LARGE_STAGE_OPERATORS else TOLERANCE

    def _solve_without(
        self, section: Section, without: Sequence[_Message], held: float, near: float, beat_s: float = np.inf
    ) -> tuple[int, ...] | None:
        """The fastest choice by the problem that sends none of this, or one as ``near`` as ``solve`` has it, or any
        that fits if none is faster than ``beat_s``; None if none fits, or none was found in time. held: bytes beside
        those of the problem."""
        alive = [
            np.array([k for k, one in enumerate(choices) if _message_of(self.context.pricer, one) not in without])
            for choices in section.choices
        ]
        if not all(map(len, alive)):
            return None
        problem = section.problem(self.in_flight)
        restricted = restrict(problem, alive) if without else problem
        try:
            solution = solve(restricted, self.limit_bytes - held, FREE_SOLVE_S, near=near, beat_s=beat_s)
        except TimeoutError:  # too wide for elimination, and the integer program found nothing in time
            return None
        if isinstance(solution, InfeasibleAssignment):
            return None
        return tuple(int(some[k]) for some, k in zip(alive, solution.choice))

    def price(self, candidate: _Chosen) -> tuple[float, float]:
        """(bytes over the limit, seconds per microbatch, those of the end of the step in even parts)."""
        m, (section, chosen) = self.context.microbatches, candidate
        price = price_stage(self.context, section, chosen, self.reductions)
        host_s = price.seconds["host"]
        return max(0.0, self._excess_bytes(candidate)), price.forward_s + price.backward_s - host_s + price.step_s / m

    def _excess_bytes(self, candidate: _Chosen) -> float:
        """Bytes above the limit."""
        section, chosen = candidate
        return (
            evaluate(section.problem(self.in_flight), chosen)[1] + self._transient(section, chosen) - self.limit_bytes
        )

    def _transient(self, section: Section, chosen: Sequence[int]) -> float:
        return transient_bytes(section, chosen, self.context.layering)


def _message_of(pricer: MeshPricer, choice: object) -> _Message | None:
    """The messages of a parameter: its whole gradient, blocks of gradient and value in buckets, or both with its layer;
    None if it sends nothing."""
    if not isinstance(choice, ParameterSharding):
        return None
    if axes := choice.scattered_axes:
        return "layers" if choice.gather == "microbatch" else "blocks", axes
    axes = partial_axes(choice.compute, pricer.mesh_shape)
    return ("gradients", axes) if axes else None


def _messages_of_choice(pricer: MeshPricer, section: Section, chosen: Sequence[int]) -> Iterator[_Message]:
    for choices, pick in zip(section.choices, chosen):
        if (sent := _message_of(pricer, choices[pick])) is not None:
            yield sent
