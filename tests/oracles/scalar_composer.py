"""Stage costs for every run of layers, one mesh and microbatch count at a time: the oracle of ``interval_tables``.

For a layer and a mesh let M[s, s'] be the cheapest way to run it with its entering tensors in boundary state s and its
leaving ones in s' (``elimination``). A run of layers then costs the min-plus product of its tables, and all intervals
that end at layer j follow from those that end at j-1 by one vector-matrix product. Memory travels along: every entry of
a table knows the bytes of its own assignment, found by walking the elimination back for all entries at once.

A boundary with several tensors has a state per combination that a person would write: on each mesh axis either all of
them are whole, or all that have a batch cut it, or one of them is cut along one other dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from meshwright.compiler.cost.pricing import MeshPricer
from meshwright.compiler.frontend.layers import Layering
from meshwright.compiler.intra_op.restriction import Restriction
from meshwright.compiler.intra_op.section import Section, StageContext, build_section, divides
from meshwright.compiler.intra_op.solver.elimination import ReducedTable, eliminate
from meshwright.compiler.intra_op.solver.problem import Edge, Operator, Problem
from meshwright.compiler.ir.graph import Graph, op_name, types_of
from meshwright.compiler.ir.spec import Pair, Placement, R, S
from meshwright.compiler.plan.recompute import NOTHING, Recompute

__all__ = ["Composer", "Intervals", "LayerTable"]

State = tuple[Pair, ...]  # one pair per tensor of a boundary
MAX_CELLS = 20_000_000  # of one elimination table
TIE = 1e-22  # seconds per byte: of equally fast choices the leaner one; 0.1 ns for a terabyte


@dataclass(frozen=True, eq=False)
class LayerTable:
    """One layer class on one mesh: cost, seconds, resident, saved and transient bytes [in states, out states], and the
    way to the choices. transient: what is saved only while this layer is recomputed."""

    cost: np.ndarray
    resident: np.ndarray
    saved: np.ndarray
    transient: np.ndarray
    section: Section
    table: ReducedTable
    kept: tuple[tuple[str, str], ...]  # (kind, tensor) per axis of the table
    layer: int  # whose names the section and ``kept`` use


@dataclass(frozen=True, eq=False)
class Intervals:
    """All runs [i, j) of layers on one mesh: arrays [L, L+1], inf below the diagonal."""

    seconds: np.ndarray
    resident: np.ndarray
    saved: np.ndarray
    transient: np.ndarray


def _copies(edges: Sequence[Edge], nbytes: Sequence[np.ndarray], chosen: Sequence[np.ndarray]) -> np.ndarray:
    """Bytes (``nbytes`` by edge) of the resharded copies kept for the backward, once per (tensor, target state), for
    many assignments."""
    total = np.zeros(np.broadcast_shapes(*(c.shape for c in chosen)))
    for edge, size in zip(edges, nbytes):
        if not size.any():
            continue
        source = edge.source[chosen[edge.producer]]
        wanted = [target[chosen[consumer]] for consumer, target in edge.consumers]
        for state in range(size.shape[1]):
            asked = np.any([want == state for want in wanted], axis=0)
            total += np.where(asked, size[source, state], 0.0)
    return total


@dataclass
class Composer:
    """Layer tables and intervals of one graph (at one microbatch extent) on one mesh."""

    graph: Graph
    layering: Layering
    pricer: MeshPricer
    microbatches: int
    restriction: Restriction = field(default_factory=Restriction)
    byte_weight: float = 0.0  # seconds per byte (λ)
    in_flight: float = 1.0  # microbatches whose saved bytes λ counts
    recompute: Recompute = NOTHING
    _tables: dict[str, LayerTable] = field(default_factory=dict)
    _states: dict[tuple, list[State]] = field(default_factory=dict)
    _entries: dict[tuple, np.ndarray] = field(default_factory=dict)
    _exits: dict[tuple, np.ndarray] = field(default_factory=dict)
    _sections: dict[str, tuple[int, Section]] = field(
        default_factory=dict
    )  # by layer class: a layer and its section; λ does not touch them, so leaner copies share them

    def afresh(self, pricer: MeshPricer | None = None, restriction: Restriction | None = None) -> Composer:
        """The same search with another pricer or restriction, and nothing cached."""
        return Composer(
            self.graph,
            self.layering,
            pricer or self.pricer,
            self.microbatches,
            restriction or self.restriction,
            self.byte_weight,
            self.in_flight,
            self.recompute,
        )

    # ---- boundary states

    def states(self, boundary: int) -> list[State]:
        """The states of the tensors that cross before layer ``boundary``."""
        key = self._border(boundary)
        if key not in self._states:
            self._states[key] = self._enumerate(self.layering.crossing[boundary])
        return self._states[key]

    def _border(self, boundary: int) -> tuple:
        """What states and their prices depend on."""
        nodes, tensors = self.graph.by_name(), self.layering.crossing[boundary]
        grad = self.layering.needs_grad
        return tuple((nodes[t].meta["type"], self.layering.batch_dims[t][0], t in grad) for t in tensors)

    def _enumerate(self, tensors: Sequence[str]) -> list[State]:
        if not tensors:
            return [()]
        nodes = self.graph.by_name()
        kinds = [nodes[name].meta["type"] for name in tensors]
        batch = [self.layering.batch_dims[name][0] for name in tensors]
        whole: list[Placement] = [R] * len(tensors)
        by_axis = []
        for axis in range(len(self.pricer.mesh_shape)):
            role = self.restriction.roles[axis] if axis < len(self.restriction.roles) else None
            data = [R if b is None else S(b) for b in batch]
            modes = [whole, data]
            for t, kind in enumerate(kinds):
                modes += [[*whole[:t], S(d), *whole[t + 1 :]] for d in range(len(kind.shape)) if d != batch[t]]
            if role == "data":
                modes = [data]
            elif role == "tensor":
                modes.remove(data) if data != whole else None
            by_axis.append(modes)
        found: dict[State, None] = {}
        for combination in itertools.product(*by_axis):
            specs = [tuple(mode[t] for mode in combination) for t in range(len(tensors))]
            if all(divides(kind, spec, self.pricer.mesh_shape) for kind, spec in zip(kinds, specs)):
                found[tuple(Pair(spec, spec) for spec in specs)] = None
        return list(found)

    # ---- tables

    def table(self, layer: int) -> LayerTable:
        """The table of a layer's class."""
        key = self.layering.layers[layer].class_key
        if key not in self._tables:
            self._tables[key] = self._build(layer)
        return self._tables[key]

    def section(self, first: int, end: int, into: Sequence[State], out: Sequence[State]) -> Section:
        """Layers [first, end) as a section whose boundary tensors may be in these states."""
        ops = self.layering.ops_of(self.graph, first, end)
        used = {operand.name for node in ops for operand in node.all_input_nodes}
        leaving = self.layering.crossing[end]
        entering = self.layering.crossing[first]
        entries = {
            name: list(dict.fromkeys(state[t] for state in into))
            for t, name in enumerate(entering)
            if name in used
            or (name in {r.node for r in self.graph.results if r.kind in ("loss", "output")} and name not in leaving)
        }
        exits = {name: list(dict.fromkeys(s[t] for s in out)) for t, name in enumerate(leaving) if name not in entering}
        context = StageContext(
            self.graph, self.layering, self.pricer, self.microbatches, self.restriction, self.recompute
        )
        return build_section(context, ops, entries, exits)

    def _build(self, layer: int) -> LayerTable:
        key = self.layering.layers[layer].class_key
        if key not in self._sections:
            self._sections[key] = layer, self.section(layer, layer + 1, self.states(layer), self.states(layer + 1))
        layer, section = self._sections[key]
        into, out = self.states(layer), self.states(layer + 1)
        entry, leave = section.index("entry"), section.index("exit")
        entering, leaving = self.layering.crossing[layer], self.layering.crossing[layer + 1]
        kept = [("entry", name) for name in entering if name in entry]
        kept += [("exit", name) for name in leaving if name in leave and name not in entering]
        keep = [(entry if kind == "entry" else leave)[name] for kind, name in kept]
        table = eliminate(self._weighted(section), keep, max_table=MAX_CELLS)
        cells, compatible = self._index(section, kept, keep, entering, leaving, into, out)
        possible = compatible & np.isfinite(table.cost[cells])
        chosen = table.assignments(cells)
        resident = sum((r[c] for r, c in zip(section.resident, chosen)), np.zeros(()))
        copies = _copies(section.edges, [edge.bytes for edge in section.edges], chosen)
        saved = sum((k[c] for k, c in zip(section.saved, chosen)), np.zeros(())) + copies
        transient = sum((k[c] for k, c in zip(section.transient, chosen)), np.zeros(possible.shape))
        transient = transient + _copies(section.edges, section.edge_transient, chosen)
        return LayerTable(
            np.where(possible, table.cost[cells], np.inf),
            np.where(possible, resident, 0.0),
            np.where(possible, saved, 0.0),
            np.where(possible, transient, 0.0),
            section,
            table,
            tuple(kept),
            layer,
        )

    def _weighted(self, section: Section) -> Problem:
        """The section with bytes priced into its seconds: by λ, or just enough to break ties."""
        a = self.byte_weight + TIE
        b = a * self.in_flight
        problem = section.problem(0.0)
        operators = tuple(
            Operator(op.name, op.labels, s + a * r + b * k, np.zeros(len(s)))
            for op, s, r, k in zip(problem.operators, section.seconds, section.resident, section.saved)
        )
        edges = tuple(
            replace(e, seconds=e.seconds + b * kept.bytes, bytes=np.zeros_like(e.seconds))
            for e, kept in zip(problem.edges, section.edges)
        )
        return Problem(operators, edges)

    @staticmethod
    def _index(
        section: Section,
        kept: Sequence[tuple[str, str]],
        keep: Sequence[int],
        entering: Sequence[str],
        leaving: Sequence[str],
        into: Sequence[State],
        out: Sequence[State],
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """(index arrays into the table, mask of compatible states), both [in states, out states]."""
        compatible = np.ones((len(into), len(out)), dtype=bool)
        for t, name in enumerate(entering):
            if name in leaving:
                u = list(leaving).index(name)
                compatible &= np.array([[a[t] == b[u] for b in out] for a in into])
        arrays = []
        for (kind, name), operator in zip(kept, keep):
            position = {pair: i for i, pair in enumerate(section.choices[operator])}
            if kind == "entry":
                t = list(entering).index(name)
                column = np.array([position[state[t]] for state in into])
                arrays.append(np.broadcast_to(column[:, None], compatible.shape))
            else:
                t = list(leaving).index(name)
                row = np.array([position[state[t]] for state in out])
                arrays.append(np.broadcast_to(row[None, :], compatible.shape))
        return tuple(arrays), compatible

    def transient_bytes(self) -> np.ndarray:
        """[layers] the largest op's operands and outputs, twice (value and cotangent), cut evenly over the mesh: a
        floor of the peak
        beside what is kept."""
        nodes = self.graph.by_name()
        found: dict[str, float] = {}
        for layer in self.layering.layers:
            if layer.class_key not in found:
                sizes = [
                    sum(t.nbytes for t in types_of(node))
                    + sum(types_of(o)[0].nbytes for o in node.all_input_nodes if o.op != "placeholder")
                    for node in map(nodes.__getitem__, layer.ops)
                    if op_name(node) != "getitem"
                ]
                found[layer.class_key] = max(sizes) / self.pricer.num_devices
        return np.array([found[layer.class_key] for layer in self.layering.layers])

    # ---- intervals

    def entry_seconds(self, boundary: int) -> np.ndarray:
        """[states] seconds of a stage that begins here beside its ops: its actions themselves, receiving the crossing
        tensors in each state."""
        key = self._border(boundary)
        if key not in self._entries:
            self._entries[key] = self._price_entry(boundary)
        return self._entries[key]

    def _price_entry(self, boundary: int) -> np.ndarray:
        states = self.states(boundary)
        nodes = self.graph.by_name()
        out = np.full(len(states), 2 * self.pricer.device.action_s)  # a stage's two actions, beside their ops
        for t, name in enumerate(self.layering.crossing[boundary]):
            kind = nodes[name].meta["type"]
            for i, state in enumerate(states):
                out[i] += self.pricer.transfer_seconds(self.pricer.local_bytes(kind, state[t].value), True)
        return out

    def exit_seconds(self, boundary: int) -> np.ndarray:
        """[states] seconds until the cotangents of the crossing tensors have come back in each state."""
        key = self._border(boundary)
        if key not in self._exits:
            self._exits[key] = np.zeros(len(self.states(boundary)))
            for t, name in enumerate(self.layering.crossing[boundary]):
                if name in self.layering.needs_grad:
                    kind = self.graph.by_name()[name].meta["type"]
                    sizes = [self.pricer.local_bytes(kind, state[t].cotangent) for state in self.states(boundary)]
                    self._exits[key] += [self.pricer.transfer_seconds(size) for size in sizes]
        return self._exits[key]

    def intervals(self) -> Intervals:
        """Cost and bytes of every interval, each with its best boundary states."""
        num = len(self.layering.layers)
        result = [np.full((num, num + 1), np.inf), *(np.zeros((num, num + 1)) for _ in range(3))]
        rows: list[list[np.ndarray]] = []
        for end in range(num):
            start = self.entry_seconds(end)
            rows.append([start, *(np.zeros_like(start) for _ in range(3))])
            table = self.table(end)
            cost, resident, saved, held = (np.stack([row[q] for row in rows]) for q in range(4))
            total = cost[:, :, None] + table.cost[None]
            best = total.argmin(axis=1)  # [starts, out states]
            lines = np.arange(len(rows))[:, None]
            columns = np.arange(total.shape[2])[None, :]
            new = [
                total.min(axis=1),
                resident[lines, best] + table.resident[best, columns],
                saved[lines, best] + table.saved[best, columns],
                np.maximum(held[lines, best], table.transient[best, columns]),
            ]
            rows = [[new[q][i] for q in range(4)] for i in range(len(rows))]
            new[0] = new[0] + self.exit_seconds(end + 1)
            exit_state = new[0].argmin(axis=1)
            for q in range(4):
                result[q][: end + 1, end + 1] = new[q][np.arange(len(rows)), exit_state]
        # λ has done its work in the choice; what an interval takes are its plain seconds
        seconds = result[0] - self.byte_weight * np.where(
            np.isfinite(result[0]), result[1] + self.in_flight * result[2], 0.0
        )
        peak, transient = self.transient_bytes(), np.zeros((num, num + 1))
        for first in range(num):
            transient[first, first + 1 :] = np.maximum.accumulate(peak[first:])
        return Intervals(seconds, result[1], result[2], transient + result[3])

    def path(self, first: int, end: int) -> list[int]:
        """The boundary states (indices) of the best way through layers [first, end): end - first + 1 of them."""
        cost = self.entry_seconds(first)
        back = []
        for layer in range(first, end):
            total = cost[:, None] + self.table(layer).cost
            back.append(total.argmin(axis=0))
            cost = total.min(axis=0)
        state = int((cost + self.exit_seconds(end)).argmin())
        states = [state]
        for best in reversed(back):
            state = int(best[state])
            states.append(state)
        return states[::-1]

    def choices(self, first: int, end: int) -> tuple[dict[str, str], list[State]]:
        """({op or parameter node → label}, boundary states) of the best way; layers of one class share a table by
        position."""
        path = self.path(first, end)
        layers = self.layering.layers
        labels: dict[str, str] = {}
        for layer, into, out in zip(range(first, end), path, path[1:]):
            table = self.table(layer)
            chosen = self._assignment(table, (self.states(layer)[into], self.states(layer + 1)[out]))
            translate = dict(zip(layers[table.layer].ops, layers[layer].ops, strict=True))
            labels.update((translate[name], text) for name, text in chosen.items() if name in translate)
        return labels, [self.states(first + k)[s] for k, s in enumerate(path)]

    def _assignment(self, table: LayerTable, states: tuple[State, State]) -> dict[str, str]:
        """Op → labels, by the names of the layer that the table was built from."""
        entering, leaving = self.layering.crossing[table.layer], self.layering.crossing[table.layer + 1]
        kept = []
        for (kind, name), operator in zip(table.kept, table.table.keep):
            pair = states[0][entering.index(name)] if kind == "entry" else states[1][leaving.index(name)]
            kept.append(table.section.choices[operator].index(pair))
        chosen = table.table.assignment(kept)
        out = {}
        for name, kind, choices, i in zip(table.section.names, table.section.kinds, table.section.choices, chosen):
            if kind == "op":
                out[name] = ",".join(choices[i].labels)  # type: ignore[union-attr]
        return out
