"""One stage of a plan from the labels that composition chose: the whole stage as one problem, solved again with memory
as a constraint.

Composition decides layer by layer between boundary states; here the stage's tensors, tied parameters and floating ops
are seen at once. First every op keeps its label and the rest (parameters, inputs, floating ops) is eliminated around
it. Then, where it may help, the stage is solved freely under the memory limit.

**Messages of parameters.** In the problem a gradient costs its share of a full bucket, and a weight that is gathered
layer by layer its share of the layer's largest message: seconds that add up, and no more than they really take. Small
stages fill no bucket, so that a message per group of axes is paid for nearly nothing else. Where the real price
(``price_stage``) is above the problem's, the stage is solved again without one kind of message that its choice has,
over one group of axes, as long as this helps. Of all choices that fit, the one with the least real price stands. Larger
stages whose layers gather weights keep the labels of their ops meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .assemble import Assembled, describe_stage, solve_section, stage_section, transient_bytes
from .graph import Graph
from .intra_op import TOLERANCE, Infeasible, evaluate
from .lagrange import solve
from .layers import Layering
from .plan import Residency, Wire
from .presolve import restrict
from .pricing import MeshPricer, partial_axes
from .problem import Section
from .recompute import Recompute
from .restriction import Restriction
from .stage_price import price_stage
from .variants import State

__all__ = ["assemble_stage"]

FREE_SOLVE_OPERATORS = 150  # beyond this many operators the composed choice stands as it is
FREE_SOLVE_S = 10.0
MANY_OPERATORS = 600  # beyond this many a choice that is proven to be near the best is good enough
NEAR = 0.01
ALIKE = 1e-4  # of the seconds of a stage: how far its real price may be above the problem's
_Sent = tuple[str, tuple[int, ...]]  # what of parameters is sent: "gradients", "blocks" or "layers", over which axes
_Chosen = tuple[Section, tuple[int, ...]]


def assemble_stage(
    graph: Graph,
    layering: Layering,
    pricer: MeshPricer,
    microbatches: int,
    layers: tuple[int, int],
    labels: Mapping[str, str],
    restriction: Restriction,
    recompute: Recompute,
    states: tuple[State, State],
    in_flight: int,
    limit_bytes: float,
    framework: float,
    wire: Sequence[Wire] = (),
) -> Assembled:
    """The stage of ``layers`` [first, end) whose ops and weights carry ``labels``, with its borders in these states.
    wire: ways of gradients that stand."""

    def section(pinned: Mapping[str, str] | None) -> Section:
        mine = replace(restriction, pinned=pinned)
        return stage_section(graph, layering, pricer, microbatches, layers, states, mine, recompute)

    stage = _Stage(graph, layering, pricer, microbatches, recompute, wire, in_flight, limit_bytes)
    nodes = graph.by_name()
    composed = section(_but_sharing(labels, graph, layering, layers))
    best = composed, stage.within(composed)
    if len(composed.names) <= FREE_SOLVE_OPERATORS and pricer.num_devices > 1:
        best = stage.improved(best, section(None))
    elif any(what == "layers" for what, _ in _sends(pricer, *best)):
        ops = {name: text for name, text in labels.items() if nodes[name].op != "placeholder"}
        best = stage.improved(best, section(ops))
    return describe_stage(graph, pricer, layering, layers, *best, in_flight, framework, microbatches, recompute, wire)


def _but_sharing(
    labels: Mapping[str, str], graph: Graph, layering: Layering, layers: tuple[int, int]
) -> Mapping[str, str]:
    """The labels that stand: not those of layers that share a weight with others, nor of their neighbours. Tables price
    a part of it in each of them, in a state of its own; here it is in one, and what does not suit all of them is
    converted once per microbatch."""
    free, (first, end) = set[str](), layers
    for node, using in layering.shared_weights(graph):
        free.add(node.name)
        near = {k for layer in using if first <= layer < end for k in (layer - 1, layer, layer + 1)}
        free.update(op for k in near if first <= k < end for op in layering.layers[k].ops)
    return labels if len(free) > FREE_SOLVE_OPERATORS else {k: v for k, v in labels.items() if k not in free}


@dataclass(frozen=True, eq=False)
class _Stage:
    """What choices of a stage are judged by."""

    graph: Graph
    layering: Layering
    pricer: MeshPricer
    microbatches: int
    recompute: Recompute
    wire: Sequence[Wire]
    in_flight: int
    limit_bytes: float

    def within(self, section: Section) -> tuple[int, ...]:
        """The fastest choice per operator that fits; the fastest of all where none does."""
        chosen = solve_section(section, self.in_flight)
        if self._over((section, chosen)) <= 0.0 or len(section.names) > FREE_SOLVE_OPERATORS:
            return chosen
        return self._solved(section, (), self._held(section, chosen)) or chosen

    def improved(self, first: _Chosen, free: Section) -> _Chosen:
        """The best of ``first`` and the choices of the same stage with its labels left open."""
        found, priced = [first], [self._price(first)]

        def offer(without: Sequence[_Sent]) -> bool:
            """Whether a choice without these messages is better than all there are."""
            best = min(priced)
            chosen = self._solved(free, without, self._held(*first))
            if chosen is None:
                return False
            found.append((free, chosen))
            priced.append(self._price(found[-1]))
            return priced[-1] < best

        offer(())
        banned: list[_Sent] = []
        while True:
            best = found[priced.index(min(priced))]
            seconds = evaluate(best[0].problem(self.in_flight), best[1])[0]
            if min(priced)[1] <= seconds * (1 + ALIKE):
                return best
            better = [sent for sent in dict.fromkeys(_sends(self.pricer, *best)) if offer([*banned, sent])]
            if not better:
                return found[priced.index(min(priced))]
            banned.append(better[-1])

    def _solved(self, section: Section, without: Sequence[_Sent], held: float) -> tuple[int, ...] | None:
        """The fastest choice by the problem that sends none of this; None if none fits. held: bytes beside those of the
        problem."""
        alive = [
            np.array([k for k, one in enumerate(choices) if _sent(self.pricer, one) not in without])
            for choices in section.choices
        ]
        if not all(map(len, alive)):
            return None
        problem = section.problem(self.in_flight)
        near = NEAR if len(section.names) > MANY_OPERATORS else TOLERANCE
        mine = restrict(problem, alive) if without else problem
        found = solve(mine, self.limit_bytes - held, FREE_SOLVE_S, near=near)
        if isinstance(found, Infeasible):
            return None
        return tuple(int(some[k]) for some, k in zip(alive, found.choice))

    def _price(self, one: _Chosen) -> tuple[float, float]:
        """(bytes over the limit, seconds per microbatch, those of the end of the step in even parts)."""
        m, (section, chosen) = self.microbatches, one
        price = price_stage(self.graph, self.pricer, self.layering, section, chosen, m, self.recompute, self.wire)
        host_s = price.seconds["host"]
        return max(0.0, self._over(one)), price.forward_s + price.backward_s - host_s + price.step_s / m

    def _over(self, one: _Chosen) -> float:
        """Bytes above the limit."""
        section, chosen = one
        return evaluate(section.problem(self.in_flight), chosen)[1] + self._held(section, chosen) - self.limit_bytes

    def _held(self, section: Section, chosen: Sequence[int]) -> float:
        return transient_bytes(section, chosen, self.layering)


def _sent(pricer: MeshPricer, choice: object) -> _Sent | None:
    """What is sent of a parameter: its gradient whole, blocks of it and of its value in buckets, or both with its
    layer; None if nothing is."""
    if not isinstance(choice, Residency):
        return None
    if axes := choice.scattered_axes:
        return "layers" if choice.gather == "microbatch" else "blocks", axes
    axes = partial_axes(choice.compute, pricer.mesh_shape)
    return ("gradients", axes) if axes else None


def _sends(pricer: MeshPricer, section: Section, chosen: Sequence[int]) -> Iterator[_Sent]:
    for choices, pick in zip(section.choices, chosen):
        if (sent := _sent(pricer, choices[pick])) is not None:
            yield sent
