"""The numeric problem of a run of layers on one mesh: one operator per op, parameter, source and border tensor.

The operators are

    op         its sharding strategies on the mesh
    parameter  the pairs that its consumers could want, each under every allowed sharding pattern, priced with the
               reduction of its gradient and the optimizer's traffic
    source     an input, a buffer or a constant; free, because the data is on every rank
    entry      a tensor that arrives from an earlier layer in a boundary state
    exit       a tensor that must leave in a boundary state

A boundary state has equal placements for value and cotangent, each S or R, because a message between stages carries
nothing else.

**Costs that layers share.** A *floating* op (``layers``) that more than one layer needs is computed once per stage, so
a lower bound of one layer counts nothing for it. A parameter that n layers use is updated, and its gradient reduced,
once per stage that holds some of them, so a lower bound of one layer counts the n-th part. A class of layers is priced
by one of its layers, so a fact about any layer of the class is taken for all of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch.fx import Node

from ..cost.layer_gathers import GatherUse, LayerReads
from ..cost.parameter_sharding import (
    accumulate_seconds,
    gathered_bytes,
    parameter_shardings,
    sharding_bytes,
    sharding_seconds,
    sharding_text,
)
from ..cost.pricing import MeshPricer
from ..cost.saved_tensors import saved_bytes, saved_tensors
from ..frontend.layers import Layering
from ..ir.graph import Graph, TensorType, tensor_operands
from ..ir.ops.loss import DEFERRED_SUM_FACTOR, exit_pair
from ..ir.spec import Pair, R, S, Spec, replicated
from ..plan.independent_axes import converts_over, sends_over
from ..plan.plan import ParameterSharding
from ..plan.recompute import NOTHING, Recompute
from ..rules import MeshChoice, mesh_choices, rule_for
from .restriction import NO_RESTRICTION, SPLITTABLE_KINDS, Restriction, cuts_weights
from .section_builder import Given, SectionBuilder, Wanted, keeps
from .solver.problem import Edge, Operator, Problem

__all__ = ["Section", "Sharing", "StageContext", "State", "boundary_states", "build_section"]


Choice = MeshChoice | ParameterSharding | Pair


@dataclass(frozen=True, eq=False)
class Section:
    """A numeric problem with the names that lead back to the graph. The tuples run in parallel over operators."""

    names: tuple[str, ...]
    #: "op", "parameter", "source", "entry", "exit" or "result" (leaves the graph, whole, or as addends that are summed
    #: once per step: ``loss``).
    kinds: tuple[str, ...]
    #: ``MeshChoice`` for ops, ``ParameterSharding`` for parameters, ``Pair`` for the rest.
    choices: tuple[tuple[Choice, ...], ...]
    #: [choices] seconds per microbatch.
    seconds: tuple[np.ndarray, ...]
    #: [choices] bytes that live through the whole step.
    resident: tuple[np.ndarray, ...]
    #: [choices] bytes saved for backward per microbatch in flight.
    saved: tuple[np.ndarray, ...]
    edges: tuple[Edge, ...]
    #: Per edge the pairs behind its source and target states.
    edge_states: tuple[tuple[tuple[Pair, ...], tuple[Pair, ...]], ...]
    #: [choices] bytes beside those, while the layer of the operator runs: saved tensors of a recomputed layer, and
    #: ``gathered_bytes`` of a parameter that is stored in parts. Empty where no operator has any.
    transient: tuple[np.ndarray, ...] = ()
    #: The same of the copies that edges make.
    edge_transient: tuple[np.ndarray, ...] = ()

    @cached_property
    def _labels(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(map(label, choices)) for choices in self.choices)

    def problem(self, in_flight: float) -> Problem:
        """The problem whose bytes count ``in_flight`` microbatches."""
        operators = tuple(
            Operator(f"{kind}:{name}", labels, s, r + in_flight * k)
            for name, kind, labels, s, r, k in zip(
                self.names, self.kinds, self._labels, self.seconds, self.resident, self.saved
            )
        )
        edges = tuple(
            Edge(e.name, e.producer, e.source, e.consumers, e.seconds, e.bytes * in_flight) for e in self.edges
        )
        return Problem(operators, edges)

    def pinned(self, labels: Mapping[str, str]) -> Section:
        """The section in which ops, weights and inputs have their label alone; ValueError where that is not offered."""
        rows = zip(self.names, self.kinds, self._labels)
        picks = [np.array(_pinned(name, kind, found, labels), dtype=np.intp) for name, kind, found in rows]

        def only(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
            return tuple(column[pick] for column, pick in zip(columns, picks))

        return replace(
            self,
            choices=tuple(tuple(choices[c] for c in pick) for choices, pick in zip(self.choices, picks)),
            seconds=only(self.seconds),
            resident=only(self.resident),
            saved=only(self.saved),
            transient=only(self.transient),
            edges=tuple(edge.restricted(picks) for edge in self.edges),
        )

    def index(self, kind: str) -> dict[str, int]:
        """Name → operator index of all operators of one kind."""
        return {name: i for i, (name, k) in enumerate(zip(self.names, self.kinds)) if k == kind}


def _pinned(name: str, kind: str, offered: Sequence[str], pinned: Mapping[str, str]) -> list[int]:
    """The choices of an operator, by their labels, that are as pinned; all where it is not, or is a border."""
    if name not in pinned or kind in ("entry", "exit", "result"):
        return list(range(len(offered)))
    keep = [i for i, text in enumerate(offered) if text == pinned[name]]
    if not keep:
        raise ValueError(f"{name} is pinned to {pinned[name]!r}, but may be {', '.join(sorted(set(offered)))}")
    return keep


def label(choice: Choice) -> str:
    """The text by which a plan names a choice."""
    if isinstance(choice, MeshChoice):
        return ",".join(choice.labels)
    return sharding_text(choice) if isinstance(choice, ParameterSharding) else str(choice)


def boundary_states(
    kind: TensorType, batch_dim: int | None, mesh_shape: Sequence[int], roles: Sequence[str | None] = ()
) -> list[Pair]:
    """Every pair of equal S/R placements that cuts ``kind`` evenly and that the axes' roles allow."""
    options = []
    for axis in range(len(mesh_shape)):
        role = roles[axis] if axis < len(roles) else None
        placements = [R, *(S(d) for d in range(len(kind.shape)))]
        if role == "data" and batch_dim is not None:
            placements = [S(batch_dim)]
        elif role == "tensor" and batch_dim is not None:
            placements = [p for p in placements if p != S(batch_dim)]
        options.append(placements)
    states = []
    for spec in itertools.product(*options):
        if divides(kind, spec, mesh_shape):
            states.append(Pair(spec, spec))
    return states


def divides(kind: TensorType, spec: Spec, mesh_shape: Sequence[int]) -> bool:
    """True if every dim that ``spec`` cuts comes out even."""
    shape = list(kind.shape)
    for placement, size in zip(spec, mesh_shape):
        if placement.is_shard:
            if shape[placement.dim] % size:
                return False
            shape[placement.dim] //= size
    return True


@dataclass(frozen=True, eq=False)
class StageContext:
    """The model, the mesh and the restrictions that the problem of a stage is built from."""

    #: The model at the batch extent of one microbatch.
    graph: Graph
    layering: Layering
    #: Prices on the mesh of the stage.
    pricer: MeshPricer
    microbatches: int
    restriction: Restriction = NO_RESTRICTION
    recompute: Recompute = NOTHING


def build_section(
    context: StageContext,
    ops: Sequence[Node],
    entries: Mapping[str, Sequence[Pair]],
    exits: Mapping[str, Sequence[Pair]],
) -> Section:
    """Build the section of ``ops`` (program order, getitems included) with these entry and exit tensors and their
    states."""
    return _Builder(context, list(ops), entries, exits).build()


class _Builder(SectionBuilder):
    def __init__(
        self,
        context: StageContext,
        ops: list[Node],
        entries: Mapping[str, Sequence[Pair]],
        exits: Mapping[str, Sequence[Pair]],
    ) -> None:
        graph, layering, pricer, recompute = context.graph, context.layering, context.pricer, context.recompute
        super().__init__(graph, layering, ops, context.restriction, 1, len(pricer.mesh_shape))
        self.pricer, self.mesh, self.m = pricer, pricer.mesh_shape, context.microbatches
        self.entries, self.exits, self.recompute = entries, exits, recompute
        self.held: list[np.ndarray] = []  # per row, ``Section.transient``
        self.rows: list[tuple[str, str, tuple, np.ndarray, np.ndarray, np.ndarray]] = []
        self.reads = LayerReads(ops, layering.layer_of, self.grad)
        self.saved = saved_tensors(ops, self.grad)
        kept = [op for op in ops if keeps(op.name, recompute)]
        self.plain = saved_tensors(kept, self.grad) if recompute else self.saved
        self.on_edges = self._saved_by_readers(recompute)

    def build(self) -> Section:
        tensors = self.connect(self.entries, self.exits)
        made = [self._edge(name, given, wanted) for name, (given, wanted) in tensors.items()]
        edges, states = tuple(edge for edge, _ in made), tuple(states for _, states in made)
        names, kinds, choices, seconds, resident, saved = zip(*self.rows)
        section = Section(names, kinds, choices, seconds, resident, saved, edges, states)
        if not self.recompute:
            return replace(section, transient=tuple(self.held)) if any(held.any() for held in self.held) else section
        readers = [[self.rows[i][0] for i, _ in edge.consumers if self.rows[i][1] == "op"] for edge in edges]
        kept = [self._copies_stay(edge.name, ops, self.recompute) for edge, ops in zip(edges, readers)]
        return replace(
            section,
            edges=tuple(e if k else replace(e, bytes=np.zeros_like(e.bytes)) for e, k in zip(edges, kept)),
            transient=tuple(self.held),
            edge_transient=tuple(np.zeros_like(e.bytes) if k else e.bytes for e, k in zip(edges, kept)),
        )

    # ---- operators

    def _add(
        self,
        name: str,
        kind: str,
        choices: tuple,
        seconds: np.ndarray,
        resident: np.ndarray,
        saved: np.ndarray,
        held: np.ndarray | None = None,
    ) -> int:
        held = np.zeros(len(choices)) if held is None else held
        if self.restriction.pinned and name in self.restriction.pinned:
            keep = _pinned(name, kind, [label(c) for c in choices], self.restriction.pinned)
            choices = tuple(choices[i] for i in keep)
            seconds, resident, saved, held = seconds[keep], resident[keep], saved[keep], held[keep]
        self.rows.append((name, kind, choices, seconds, resident, saved))
        self.held.append(held)
        return len(self.rows) - 1

    def _divides(self, node: Node, value: Spec) -> np.ndarray:
        return np.array([divides(node.meta["type"], value, self.mesh)])

    def _add_entry(self, name: str) -> int:
        kind, states, zero = self.nodes[name].meta["type"], self.entries[name], np.zeros(len(self.entries[name]))
        stays = self._entry_stays(name, self.plain, self.recompute)
        held = np.array([self.pricer.local_bytes(kind, pair.value) for pair in states]) if stays else zero
        return self._add(name, "entry", tuple(states), zero, zero, held)

    def _add_exit(self, name: str) -> int:
        zero = np.zeros(len(self.exits[name]))
        return self._add(name, "exit", tuple(self.exits[name]), zero, zero, zero)

    def _choices(self, node: Node) -> list[MeshChoice]:
        pinned = (self.restriction.pinned or {}).get(node.name)
        if pinned is not None:
            twin = self.layering.twins.get(node.name, node.name)
            return [self.layering.pruner.labelled(node, self.graph.batch, self.mesh, pinned, twin)]
        if node.name in self.layering.static:
            return mesh_choices(node, self.mesh, 1)
        choices = self.layering.pruner.choices(node, self.graph.batch, self.mesh)
        if self.restriction.executable_only:
            choices = [c for c in choices if c.executable] or mesh_choices(node, self.mesh, 1)
        choices = [c for c in choices if self.restriction.splits(node.name, c.labels)] or choices[:1]
        operands = tensor_operands(node)
        allowed = [c for c in choices if self._allowed(node, operands, c)] or choices[:1]
        # repeating heavy work on several devices is worse than leaving them idle
        if rule_for(node).cost_kind in SPLITTABLE_KINDS:
            for axis in range(len(self.mesh)):
                if self.restriction.roles[axis : axis + 1] != ("data",):
                    allowed = [c for c in allowed if c.labels[axis] != "whole"] or allowed
                if self.restriction.roles[axis : axis + 1] == ("tensor",):
                    allowed = [c for c in allowed if cuts_weights(node, c, axis)] or allowed
        return allowed

    def _allowed(self, node: Node, operands: Sequence[Node], choice: MeshChoice) -> bool:
        """True if the choice keeps to the roles of the axes."""
        if not any(self.restriction.roles):
            return True
        tensors = [((operand.name, 0), pair) for operand, pair in zip(operands, choice.inputs)]
        tensors += [((node.name, k), pair) for k, pair in enumerate(choice.outputs)]
        for axis, role in enumerate(self.restriction.roles):
            if role is None:
                continue
            for tensor, pair in tensors:
                batch = self.layering.batch_dims[tensor[0]][tensor[1]]
                if batch is None or tensor[0] in self.layering.static:
                    continue
                cut = pair.value[axis] == S(batch)
                if cut != (role == "data"):
                    return False
        return True

    def _add_op(self, node: Node) -> tuple[int, list[MeshChoice]]:
        choices = self._choices(node)
        # a static op runs once per stage however many layers use it, so no layer pays for it; ``stage`` does, once
        static = node.name in self.layering.static
        prices = [self.pricer.op(node, c, self.grad) for c in choices]
        seconds = np.array([0.0 if static else price.seconds for price in prices])
        if node.name in self.recompute.repeated:
            seconds += np.array([price.forward_s + price.internal_forward_s for price in prices])
        if not self.restriction.roles and self.restriction.pinned is None:
            # where no user forced the shape, a mesh on which a large op cannot be split is no option for this layer
            allowed = 0.01 * self.layering.total_flops * self.graph.batch / self.layering.batch
            seconds[[price.wasted_flops > allowed for price in prices]] = np.inf
        if node.name in self.restriction.split:
            operands = tensor_operands(node)
            fits = [self.restriction.splits(node.name, c.labels) and self._allowed(node, operands, c) for c in choices]
            seconds[~np.array(fits)] = np.inf
        if independent := self.restriction.independent_axes:
            seconds[[sends_over(node, c, independent, self.grad) for c in choices]] = np.inf
        kept, held = saved_bytes(
            node,
            choices,
            self.pricer,
            self.saved - self.on_edges.results,
            self.plain - self.on_edges.results,
            self.grad,
            self.members,
            self.recompute,
        )
        return self._add(node.name, "op", tuple(choices), seconds, np.zeros(len(choices)), kept, held), choices

    def _add_result(self, name: str, given: Given) -> Given:
        whole = replicated(self.axes)
        pairs = list(dict.fromkeys(self._leaving(name, given[1])))
        kind, zero = self.nodes[name].meta["type"], np.zeros(len(pairs))
        seconds = (
            np.array([self.pricer.convert(pair.value, whole.value, kind) for pair in pairs])
            / self.m
            * DEFERRED_SUM_FACTOR
        )
        return self._add(name, "result", tuple(pairs), seconds, zero, zero), pairs

    def _add_placeholder(self, node: Node, wanted: Wanted) -> Given:
        source, kind = node.meta["source"], node.meta["type"]
        asked = dict.fromkeys((pair for _, pairs, _ in wanted for pair in pairs), np.ones(1, dtype=bool))
        options, patterns = self._placeholder_pairs(node, asked)
        pairs = list(options)
        if source.kind == "parameter":
            i = self._add_parameter(node, pairs, patterns)
            return i, [sharding.compute for sharding in self.rows[i][2]]
        zero = resident = np.zeros(len(pairs))
        if source.kind == "buffer":
            resident = np.array([self.pricer.local_bytes(kind, pair.value) for pair in pairs])
        i = self._add(node.name, "source", tuple(pairs), zero, resident, zero)
        return i, list(self.rows[i][2])

    def _add_parameter(self, node: Node, pairs: Sequence[Pair], allowed: tuple[str, ...]) -> int:
        """Add one choice per pair and allowed sharding pattern."""
        kind, trainable, requires_grad = node.meta["type"], self._trainable(node), node.meta["source"].requires_grad
        uses = self.reads.of(node)
        key = ("parameter", kind, tuple(pairs), allowed, self.m, trainable, requires_grad, uses)
        if (columns := self.pricer.remembered.get(key)) is None:
            offered = parameter_shardings(kind, pairs, self.mesh, trainable, allowed)
            rows = [self._price_parameter(kind, sharding, trainable, requires_grad, uses) for sharding in offered]
            priced = np.ascontiguousarray(np.array(rows).reshape(-1, 3).T)
            columns = self.pricer.remembered[key] = tuple(offered), priced
        choices, (seconds, resident, held) = columns
        return self._add(node.name, "parameter", choices, seconds, resident, np.zeros(len(choices)), held)

    def _price_parameter(
        self,
        kind: TensorType,
        sharding: ParameterSharding,
        trainable: bool,
        requires_grad: bool,
        uses: tuple[GatherUse, ...],
    ) -> tuple[float, float, float]:
        """(seconds per microbatch, resident bytes, gathered bytes) of a parameter in this sharding."""
        pricer = self.pricer
        price = sharding_seconds(pricer, kind, sharding, self.m, trainable, uses)
        once = price.per_step_s + (accumulate_seconds(pricer, kind, sharding, self.m) if trainable else 0.0)
        bill = sharding_bytes(pricer, kind, sharding, requires_grad)
        held = gathered_bytes(pricer, kind, sharding, trainable and any(use.again for use in uses))
        return price.per_microbatch_s + once / self.m, sum(bill.values()), held

    # ---- edges

    def _edge(
        self, name: str, given: Given, consumers: Wanted
    ) -> tuple[Edge, tuple[tuple[Pair, ...], tuple[Pair, ...]]]:
        producer, offered = given
        kind: TensorType = self.nodes[name].meta["type"]
        sources = {pair: i for i, pair in enumerate(dict.fromkeys(offered))}
        targets = {pair: i for i, pair in enumerate(dict.fromkeys(p for _, pairs, _ in consumers for p in pairs))}
        # slices of a static tensor are few and small: layers, microbatches and ops that want one may share it
        copied = name not in self.layering.static and any(saved for *_, saved in consumers)
        grad, late, independent = name in self.grad, name in self.late, self.restriction.independent_axes
        placed = self.nodes[name].op == "placeholder" and not grad
        ahead, back = self.pricer.reshards(tuple(sources), tuple(targets), kind, grad)
        seconds = (2 if self.recompute.converts_again(name) else 1) * ahead + back
        if placed or late or independent:
            for (source, s), (target, t) in itertools.product(sources.items(), targets.items()):
                if placed and all(v.kind == "R" or v == w for v, w in zip(source.value, target.value)):
                    seconds[s, t] = 0.0
                lost = late and source != target and exit_pair(source).value != target.value
                if lost or any(converts_over(source, target, kind, grad, axis) for axis in independent):
                    seconds[s, t] = np.inf
        nbytes = np.zeros(seconds.shape)
        if copied:
            held = np.array([self.pricer.local_bytes(kind, target.value) for target in targets])
            moves = np.array([[source.value != target.value for target in targets] for source in sources], dtype=bool)
            moves = moves.reshape(seconds.shape)  # a border may have no states
            nbytes = np.where(np.isfinite(seconds), np.where(moves, 1.0, self.on_edges.read.get(name, 0.0)) * held, 0.0)
        edge = Edge(
            name,
            producer,
            np.array([sources[p] for p in offered]),
            tuple((i, np.array([targets[p] for p in pairs])) for i, pairs, _ in consumers),
            seconds,
            nbytes,
        )
        return edge, (tuple(sources), tuple(targets))


class Sharing:
    """Counts of the layers that use each tensor of ``graph`` that belongs to none."""

    def __init__(self, graph: Graph, layering: Layering) -> None:
        nodes, floating = graph.by_name(), set(layering.floating)
        uses: Counter[str] = Counter()
        by_class: dict[str, list[list[str]]] = {}
        for layer in layering.layers:
            names: dict[str, None] = {}  # in order of use, which is the same in all layers of a class
            stack = [nodes[name] for name in reversed(layer.ops)]
            while stack:
                for operand in stack.pop().all_input_nodes:
                    if operand.op == "placeholder" or operand.name in floating:
                        if operand.name not in names and operand.op != "placeholder":
                            stack.append(operand)
                        names.setdefault(operand.name)
            uses.update(names.keys())
            by_class.setdefault(layer.class_key, []).append(list(names))
        self._uses = dict(uses)
        for members in by_class.values():
            for alike in zip(*members):
                largest = max(uses[name] for name in alike)
                for name in alike:
                    self._uses[name] = max(self._uses[name], largest)
        self._floating = floating

    def uses(self, name: str) -> int:
        """The number of layers that use a tensor, or one in the same place of an equal layer."""
        return self._uses.get(name, 1)

    def floats(self, name: str) -> bool:
        """True if this is a floating op that several layers need."""
        return name in self._floating and self.uses(name) > 1

    def floor_of(self, node: Node) -> float:
        """The part of the conversions of a tensor that a layer is sure to pay."""
        if node.op == "placeholder":
            return 1.0 / self.uses(node.name)
        return 0.0 if self.floats(node.name) else 1.0


State = tuple[Pair, ...]  # one pair per tensor of a border
