"""One stage of a plan from the labels that composition chose: the whole stage as one problem, solved again with memory
as a constraint.

Composition decides layer by layer between boundary states; here the stage's tensors, tied parameters and floating ops
are seen at once. First every op keeps its label and the rest (parameters, inputs, floating ops) is eliminated around
it. Then, where it may help, the stage is solved freely under the memory limit.

**Reductions.** In the problem a gradient costs its share of a full bucket: seconds that add up, and no more than it
really takes. Small stages fill no bucket, so that a message per group of axes is paid for nearly nothing else. Where
the real price (``price_stage``) is above the problem's, the stage is solved again without gradients that are summed
over one of the groups that its choice has, whole or in blocks, as long as this helps. Of all choices that fit, the one
with the least real price stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .assemble import Assembled, describe_stage, solve_section, stage_section, transient_bytes
from .graph import Graph
from .intra_op import Infeasible, evaluate
from .lagrange import solve
from .layers import Layering
from .plan import Residency, Wire
from .presolve import restrict
from .pricing import MeshPricer, partial_axes
from .problem import Restriction, Section
from .recompute import Recompute
from .stage_price import price_stage
from .variants import State

__all__ = ["assemble_stage"]

FREE_SOLVE_OPERATORS = 150  # beyond this many operators the composed choice stands as it is
FREE_SOLVE_S = 10.0
ALIKE = 1e-4  # of the seconds of a stage: how far its real price may be above the problem's
_Sum = tuple[bool, tuple[int, ...]]  # whether gradients are summed in blocks, and over which axes
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
    composed = section(_but_sharing(labels, graph, layering, layers))
    best = composed, stage.within(composed)
    if len(composed.names) <= FREE_SOLVE_OPERATORS and pricer.num_devices > 1:
        best = stage.improved(best, section(None))
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

        def offer(without: Sequence[_Sum]) -> bool:
            """Whether a choice without these reductions is better than all there are."""
            best = min(priced)
            chosen = self._solved(free, without, self._held(*first))
            if chosen is None:
                return False
            found.append((free, chosen))
            priced.append(self._price(found[-1]))
            return priced[-1] < best

        offer(())
        banned: list[_Sum] = []
        while True:
            best = found[priced.index(min(priced))]
            seconds = evaluate(best[0].problem(self.in_flight), best[1])[0]
            if min(priced)[1] <= seconds * (1 + ALIKE):
                return best
            better = [axes for axes in dict.fromkeys(_reduced(self.pricer, *best)) if offer([*banned, axes])]
            if not better:
                return found[priced.index(min(priced))]
            banned.append(better[-1])

    def _solved(self, section: Section, without: Sequence[_Sum], held: float) -> tuple[int, ...] | None:
        """The fastest choice by the problem in which no gradient is summed so, nor gathered in every microbatch (whose
        real price is that of full buckets) instead; None if none fits. held: bytes beside those of the problem."""

        def stays(one: object) -> bool:
            often = isinstance(one, Residency) and one.gather == "microbatch"
            return not without or not (often or _summed(self.pricer, one) in without)

        alive = [np.array([k for k, one in enumerate(choices) if stays(one)]) for choices in section.choices]
        if not all(map(len, alive)):
            return None
        problem = section.problem(self.in_flight)
        found = solve(restrict(problem, alive) if without else problem, self.limit_bytes - held, FREE_SOLVE_S)
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


def _summed(pricer: MeshPricer, choice: object) -> _Sum | None:
    """How a parameter's gradient is summed in a bucket; None where it is in none."""
    if not isinstance(choice, Residency) or choice.gather == "microbatch":
        return None
    axes = choice.scattered_axes or partial_axes(choice.compute, pricer.mesh_shape)
    return (bool(choice.scattered_axes), axes) if axes else None


def _reduced(pricer: MeshPricer, section: Section, chosen: Sequence[int]) -> Iterator[_Sum]:
    for choices, pick in zip(section.choices, chosen):
        if (axes := _summed(pricer, choices[pick])) is not None:
            yield axes
