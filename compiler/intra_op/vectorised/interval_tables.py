"""Stage costs of every interval of layers, for many rows at once: cases (mesh, microbatches) under memory multipliers.

The cost of an interval is the min-plus product of its layers' tables (``layer_tables``) from a state of its first
border to a state of its last one. It depends on the sequence of layer classes and borders alone, so intervals with
equal sequences are one *run*: a GPT of 98 layers has 4,851 intervals and some 500 runs. All runs that end with one
layer are extended together. Runs are numbered by

    id(i, j + 1) = cons(id(i, j), class of layer j, border j + 1)

**The cost of an interval.** With seconds p per microbatch and s per step (divided by the microbatches), the two
actions a of a stage, and the transfer x of the tensors that cross its borders, forward and back,

    cost = min over border states of   objective(p + s, bytes) + a + x
    floor_s = min over border states of   objective(p + s, bytes) + a            (its own minimum: nothing follows x)

so floor_s is a lower bound on the seconds of a microbatch where the multipliers are 0, and else on the Lagrangian; of
layers that were too wide to be solved exactly it takes their lower bounds (``LayerTemplate.floors``).
pace_s (actions included), step_s, transfer_s and the bytes are those of the choices behind cost.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any

import numpy as np

from ...cost.saved_tensors import is_saved, saved_tensors, storage_roots
from ...ir.graph import op_name, tensor_operands, types_of
from ...plan.tensor_codecs import wire_share
from ...workers import run_all
from ..restriction import Restriction
from ..section import State
from ..solver.vectorised_elimination import Running, in_chunks
from .cases import Cases
from .layer_tables import LayerTables, LayerTemplate, Level, Weights
from .problem import CaseSection
from .row_cache import RowCache, column_digests, row_key
from .section import build_case_section, pricer_of

__all__ = ["Composition", "IntervalComposer", "IntervalTables", "LayerRun", "Row", "Taken", "floors_of", "runs_of"]


Build = Callable[[Cases, int, Sequence[State], Sequence[State], Restriction, Sequence[str]], CaseSection]
_SLICE = 256  # rows that are composed at a time …
_KEPT_CELLS = 2**25  # … or fewer, whose runs it can keep
_BLOCK_CELLS = 2**15  # of the runs that are extended together
FORKED_CELLS = 2**25  # of eliminations that are worth a fork: some hundredths of a second
_Found = dict[tuple[str, "Row"], tuple[LayerTables, int]]  # by class and row, the tables and the row's place in them


@dataclass(frozen=True, eq=False)
class IntervalTables:
    """All intervals [i, j) of layers, for some rows: arrays [runs, rows], and which run an interval is.

    run: int [L, L + 1], −1 below the diagonal. Impossible runs have inf cost and floor_s, and 0 otherwise.
    """

    rows: tuple[Row, ...]
    run: np.ndarray
    cost: np.ndarray
    floor_s: np.ndarray
    pace_s: np.ndarray
    step_s: np.ndarray
    transfer_s: np.ndarray
    resident: np.ndarray
    saved: np.ndarray
    transient: np.ndarray
    entry_s: np.ndarray  # the part of transfer_s that is received at the first border

    @staticmethod
    def joined(parts: Sequence[IntervalTables], order: Sequence[int]) -> IntervalTables:
        """The rows of all parts; order: where each of them belongs."""
        back = np.argsort(order)
        names = [one.name for one in fields(IntervalTables)][2:]
        arrays = [np.concatenate([getattr(part, name) for part in parts], axis=1).take(back, axis=1) for name in names]
        rows = [row for part in parts for row in part.rows]
        return IntervalTables(tuple(rows[k] for k in back), parts[0].run, *arrays)

    def of(self, name: str, rows: Sequence[int] | slice = slice(None)) -> np.ndarray:
        """The array of this name as [rows, L, L + 1], for some rows (positions in ``rows``) or all of them."""
        values = getattr(self, name).T[rows]
        below = np.inf if name in ("cost", "floor_s") else 0.0
        padded = np.concatenate([values, np.full((len(values), 1), below)], axis=1)
        return np.asarray(padded.take(self.run, axis=1, mode="wrap"))  # −1 is the padding


@dataclass(eq=False)
class IntervalComposer:
    """Tables and intervals of one model for the cases of ``cases``, at any of ``levels``.

    modes: recompute modes that each layer may choose from; build: makes a layer's section for all cases.
    """

    cases: Cases
    restriction: Restriction
    levels: Sequence[Level]
    modes: Sequence[str]
    build: Build = build_case_section
    #: Per case another one with equal prices but for messages, whose tables serve for both; () if there is none.
    alike: Sequence[int] = ()
    #: Rows that other searches computed.
    kept: RowCache | None = None
    #: Processes that may make tables at once.
    workers: int = 1
    _templates: dict[str, LayerTemplate] = field(default_factory=dict)
    _found: _Found = field(default_factory=dict)
    _borders: dict[Any, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    _peaks: dict[str, np.ndarray] = field(default_factory=dict)
    _sent: dict[Any, np.ndarray] = field(default_factory=dict)
    _phases: dict[str, np.ndarray] = field(default_factory=dict)

    # ---- tables

    def states(self, boundary: int) -> tuple[tuple[State, ...], np.ndarray]:
        """The states of a border in any case, and bool [cases, states] in which."""
        return self.cases.states(boundary, self.restriction.roles)

    def template(self, layer: int) -> LayerTemplate:
        """The template of a layer's class."""
        key = self.cases.layering.layers[layer].class_key
        if key not in self._templates:
            self._templates[key] = self._template(layer)
        return self._templates[key]

    def _template(self, layer: int) -> LayerTemplate:
        (into, has_into), (out, has_out) = self.states(layer), self.states(layer + 1)
        modes = self.restriction.modes.get(self.cases.layering.layers[layer].class_key, self.modes)
        section = self.build(self.cases, layer, into, out, self.restriction, modes)
        crossing = self.cases.layering.crossing
        entering, leaving = crossing[layer], crossing[layer + 1]
        possible = np.ones((len(into), len(out)), dtype=bool)
        for t, name in enumerate(entering):
            if name in leaving:
                u = leaving.index(name)
                possible &= np.array([[a[t] == b[u] for b in out] for a in into]).reshape(possible.shape)
        entry, leave = section.index("entry"), section.index("exit")
        arriving = {
            entry[name]: _positions(section, entry[name], into, t) for t, name in enumerate(entering) if name in entry
        }
        going = {
            leave[name]: _positions(section, leave[name], out, t)
            for t, name in enumerate(leaving)
            if name in leave and name not in entering
        }
        mask = possible[..., None] & has_into.T[:, None] & has_out.T[None]
        return LayerTemplate.of(section, layer, modes, arriving, going, mask)

    def tables(self, rows: Sequence[Row]) -> dict[str, LayerTables]:
        """Per layer class the tables of these rows."""
        own = list(dict.fromkeys(map(self._own, rows)))
        return {self._alike[0][k]: self._made(k, own) for k in self._distinct[0]}

    def _made(self, layer: int, rows: Sequence[Row]) -> LayerTables:
        """The tables of a layer's class for these rows of cases that stand for themselves; ``choices`` knows them."""
        tables, key = self.template(layer).tables(self._weights(rows)), self._alike[0][layer]
        self._found.update({(key, row): (tables, place) for place, row in enumerate(rows)})
        return tables

    def _weights(self, rows: Sequence[Row]) -> Weights:
        return Weights.of([(case, self.levels[level]) for case, level in rows])

    def _own(self, row: Row) -> Row:
        """The row whose tables stand for a row's own."""
        return (self.alike[row[0]] if len(self.alike) else row[0]), row[1]

    # ---- borders

    def border_seconds(self, boundary: int, near: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(entry, exit) seconds [states, cases]: receiving the tensors that cross here in each state, and getting their
        cotangents back. Without a stage's actions. near: only what the layer in front makes and the layer behind
        reads, which no pipeline sends past a stage."""
        some = self._near[boundary] if near else tuple(range(len(self.cases.layering.crossing[boundary])))
        key = self.cases.border_key(boundary), some
        if key not in self._borders:
            self._borders[key] = self._price_border(boundary, some)
        return self._borders[key]

    @cached_property
    def _near(self) -> list[tuple[int, ...]]:
        return self.cases.layering.between_neighbours(self.cases.source)

    def _price_border(self, boundary: int, tensors: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        cases = self.cases
        states, _ = self.states(boundary)
        entry, leave = (np.zeros((len(states), cases.num)) for _ in range(2))
        nodes, grad = cases.source.by_name(), cases.layering.needs_grad
        for t in tensors:
            name = cases.layering.crossing[boundary][t]
            kind = nodes[name].meta["type"]
            whole = cases.shapes(kind).prod(axis=1)[cases.extent_of] * float(kind.dtype.itemsize)
            whole *= wire_share(cases.communication.activations, kind)
            for i, state in enumerate(states):
                entry[i] += self._transfer(whole, state[t].value, True)
                if name in grad:
                    leave[i] += self._transfer(whole, state[t].cotangent, False)
        return entry, leave

    def _transfer(self, whole: np.ndarray, spec: Any, before: bool) -> np.ndarray:
        """[cases] seconds to send a tensor of these whole bytes to each device, cut as ``spec`` says."""
        mask = sum(1 << axis for axis, placement in enumerate(spec) if placement.is_shard)
        key = "transfer", mask, before, whole.tobytes()
        cache = self.cases.cache
        if key not in cache:
            sizes = whole / self.cases.divisor[:, mask]
            pricers = [self.cases.pricer(v) for v in range(self.cases.num)]
            cache[key] = np.array([p.transfer_seconds(size, before) for p, size in zip(pricers, sizes.tolist())])
        return np.asarray(cache[key])

    @cached_property
    def actions(self) -> np.ndarray:
        """[cases] seconds of a stage's two actions, beside their ops."""
        return np.array([2 * self.cases.pricer(v).device.action_s for v in range(self.cases.num)])

    def peak_bytes(self, layer: int) -> np.ndarray:
        """[cases] the gradients of the operands and outputs of the largest op, cut evenly over the mesh: an estimate
        of the peak beside what is kept."""
        key = self.cases.layering.layers[layer].class_key
        if key not in self._peaks:
            nodes = self.cases.source.by_name()
            sizes = []
            for node in map(nodes.__getitem__, self.cases.layering.layers[layer].ops):
                if op_name(node) == "getitem":
                    continue
                kinds = [*types_of(node)]
                kinds += [types_of(o)[0] for o in node.all_input_nodes if o.op != "placeholder"]
                sizes.append(sum(self.cases.shapes(kind).prod(axis=1) * float(kind.dtype.itemsize) for kind in kinds))
            largest = np.max(sizes, axis=0)[self.cases.extent_of]
            self._peaks[key] = largest / self.cases.num_devices
        return self._peaks[key]

    def sent_bytes(self, boundary: int) -> np.ndarray:
        """[cases] the least bytes of what a stage that ends here makes for the next one and does not save for itself:
        its last layer's results, which it holds until their gradients arrive."""
        key = (self.cases.layering.layers[boundary - 1].class_key, self.cases.border_key(boundary))
        if key not in self._sent:
            self._sent[key] = self._least_sent(boundary)
        return self._sent[key]

    def _least_sent(self, boundary: int) -> np.ndarray:
        cases, (states, possible) = self.cases, self.states(boundary)
        before, here = (cases.layering.crossing[k] for k in (boundary - 1, boundary))
        ops, grad = cases.ops(boundary - 1), cases.layering.needs_grad
        kept, roots, nodes = saved_tensors(ops, grad), storage_roots(ops), {node.name: node for node in ops}
        held = np.zeros(possible.shape)
        for t, name in enumerate(here):
            root = nodes.get(roots.get(name, name))
            if name not in before and name in grad and root is not None and not is_saved(kept, root, 0):
                specs = [state[t].value for state in states]
                held += pricer_of(cases).local_bytes(nodes[name].meta["type"], specs)
        least = np.where(possible, held, np.inf).min(axis=1, initial=np.inf)
        return np.where(np.isfinite(least), least, 0.0)

    def phase_seconds(self, layer: int) -> np.ndarray:
        """[2, cases] the least seconds of a microbatch's forward and of its backward, however the ops are sharded."""
        key = self.cases.layering.layers[layer].class_key
        if key not in self._phases:
            template = self.template(layer)
            self._phases[key] = _least_phases(template.section if template.whole is None else template.whole[0])
        return self._phases[key]

    # ---- intervals

    def floors(self, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
        """Return (floor_s [runs, rows], the run of every interval): ``floor_s`` as ``intervals`` has it, alone."""
        runs, index = self._runs
        return self._recalled(rows, lambda row: self._key(row, False), (len(runs),), self._floors), index

    def _floors(self, rows: Sequence[Row]) -> np.ndarray:
        """[runs, rows]."""
        runs, _ = self._runs
        actions = self.actions[[case for case, _ in rows]]
        tables = self._by_class(self._layer_floors, rows)

        def work(part: slice) -> np.ndarray:
            return floors_of(runs, {key: table[..., part] for key, table in tables.items()}, actions[part])

        parts = in_chunks(work, len(rows), _SLICE)
        return np.concatenate(parts, axis=1)

    def intervals(self, rows: Sequence[Row]) -> IntervalTables:
        """Cost, seconds and bytes of every interval for these rows, each with its best border states and modes."""
        free = [self.levels[level].unpriced for _, level in rows]  # these need one mode only
        if len(set(free)) > 1:
            order = sorted(range(len(rows)), key=free.__getitem__)
            parts = [self.intervals([rows[k] for k in order if free[k] == kind]) for kind in (False, True)]
            return IntervalTables.joined(parts, order)
        runs, index = self._runs
        arrays = self._recalled(rows, lambda row: self._key(row, True), (9, len(runs)), self._composed)
        return IntervalTables(tuple(rows), index, *arrays)

    def _composed(self, rows: Sequence[Row]) -> np.ndarray:
        """[9, runs, rows]: the arrays of ``IntervalTables`` for rows that are all free, or none."""
        own = {row: place for place, row in enumerate(dict.fromkeys(map(self._own, rows)))}
        tables = self._by_class(self._layer_values, list(own))
        wide = [k for k in self._distinct[0] if self.template(k).lower is not None]
        below = {self._alike[0][k]: self._layer_floors(k, list(own)) for k in wide}
        at = np.array([own[self._own(row)] for row in rows], dtype=np.intp)

        def layers(part: slice) -> dict[str, Taken]:
            taken = {key: values.take(at[part], axis=-1) for key, values in tables.items()}
            least = {key: table.take(at[part], axis=-1) for key, table in below.items()}
            return {key: (values[0], values[1:], least.get(key, values[0])) for key, values in taken.items()}

        runs, _ = self._runs
        case = np.array([row[0] for row in rows], dtype=np.intp)
        borders = {b: self.border_seconds(b) for b in range(len(self.cases.layering.crossing))}
        actions = self.actions
        peaks = {layer.class_key: self.peak_bytes(k) for k, layer in enumerate(self.cases.layering.layers)}

        def work(part: slice) -> np.ndarray:
            return Composition(runs, layers(part), borders, actions, peaks, case[part]).run()

        states = max(len(seconds) for seconds, _ in borders.values())
        most = min(_SLICE, max(1, _KEPT_CELLS // (8 * states * self._most_kept)))
        parts = in_chunks(work, len(rows), most)
        return np.concatenate(parts, axis=2)

    def _by_class(self, make: Callable[[int, Sequence[Row]], np.ndarray], rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """``make`` for the first layer of every class: dealt out to processes where that is worth a fork."""
        work = {k: self.template(k).work * len(rows) for k in self._distinct[0]}
        parts: list[list[int]] = [[] for _ in range(self.workers)]
        for k in sorted(work, key=lambda k: -work[k]):
            min(parts, key=lambda part: sum(work[one] for one in part)).append(k)
        if sum(work.values()) - max(sum(work[k] for k in part) for part in parts) < FORKED_CELLS:
            parts = [self._distinct[0]]

        def some(part: Sequence[int]) -> tuple[dict[int, np.ndarray], _Found, Sequence[Any]]:
            known, before = len(self._found), 0 if self.kept is None else len(self.kept.made)
            values = {k: make(k, rows) for k in part}
            made = () if self.kept is None else self.kept.made[before:]
            return values, dict(islice(self._found.items(), known, None)), made

        templates = [one for k in self._distinct[0] for one in self.template(k).family]
        common = [*templates, *(one.recipe for one in templates)]
        own, *others = run_all([partial(some, part) for part in parts if part], common)
        values = dict(own[0])
        for answers, found, made in others:
            values |= answers
            self._found.update(found)
            if self.kept is not None:
                self.kept.add(made)
        return {self._alike[0][k]: values[k] for k in self._distinct[0]}

    def _layer_floors(self, layer: int, rows: Sequence[Row]) -> np.ndarray:
        """[in states, out states, rows] ``LayerTemplate.floors`` of a layer's class."""
        template = self.template(layer)
        return self._recalled(
            rows,
            lambda row: self._layer_key(b"floors", layer, row),
            template.possible.shape[:2],
            lambda some: template.floors(self._weights(some)),
        )

    def _layer_values(self, layer: int, rows: Sequence[Row]) -> np.ndarray:
        """[6, in states, out states, rows] ``LayerTables.values`` of a layer's class."""
        return self._recalled(
            rows,
            lambda row: self._layer_key(b"tables", layer, row),
            (6, *self.template(layer).possible.shape[:2]),
            lambda some: self._made(layer, some).values,
        )

    # ---- rows of other searches

    def _recalled(
        self,
        rows: Sequence[Row],
        key: Callable[[Row], bytes],
        shape: tuple[int, ...],
        make: Callable[[Sequence[Row]], np.ndarray],
    ) -> np.ndarray:
        """[*shape, rows]: the result of ``make``, from the row cache where an equal row was computed before."""
        if self.kept is None:
            return make(rows)
        return self.kept.recall([key(row) for row in rows], shape, lambda some: make([rows[k] for k in some]))

    def _layer_key(self, what: bytes, layer: int, row: Row) -> bytes:
        return row_key(what, [self._columns[layer][row[0]]], self.levels[row[1]], 0.0, [])

    def _key(self, row: Row, whole: bool) -> bytes:
        """The key of a row. whole: of its intervals, with messages and peaks; else of its floors."""
        case, level = row
        source = self._own(row)[0] if whole else case
        layers, borders = self._distinct
        others: list[np.ndarray] = []
        if whole:
            others += [seconds[:, case] for b in borders for seconds in self.border_seconds(b)]
            others += [self.peak_bytes(k)[[case]] for k in layers]
        columns = [column[source] for column in self._columns.values()]
        return row_key(self._sequence, columns, self.levels[level], float(self.actions[case]), others)

    @cached_property
    def _columns(self) -> dict[int, list[bytes]]:
        """The column digests of all cases, by the first layer of a class."""
        return {k: column_digests(self.template(k)) for k in self._distinct[0]}

    @cached_property
    def _sequence(self) -> bytes:
        """A key of the sequence of layer classes and borders."""
        return repr([[keys.index(one) for one in keys] for keys in self._alike]).encode()

    @cached_property
    def _distinct(self) -> list[list[int]]:
        """The first layer of every class, and the first border of every kind."""
        return [[k for k, one in enumerate(keys) if keys.index(one) == k] for keys in self._alike]

    @cached_property
    def _alike(self) -> tuple[list[str], list[Any]]:
        """The classes of the layers, and what the borders depend on."""
        layers = self.cases.layering.layers
        return [layer.class_key for layer in layers], [self.cases.border_key(b) for b in range(len(layers) + 1)]

    @cached_property
    def _runs(self) -> tuple[list[LayerRun], np.ndarray]:
        """The distinct runs, and the run of every interval."""
        return runs_of(*self._alike)

    @cached_property
    def _most_kept(self) -> int:
        """The most runs whose values are needed at any time."""
        kept = most = 0
        for members, done in _in_order(self._runs[0]):
            kept += len(members)
            most, kept = max(most, kept), kept - len(done)
        return most

    def _by_layer(self, row: Row, first: int, end: int) -> list[tuple[LayerTables, int]]:
        """The tables of layers [first, end), and the position of this row in them."""
        own, classes = self._own(row), self._alike[0]
        for key in dict.fromkeys(classes[first:end]):
            if (key, own) not in self._found:
                self._made(classes.index(key), [own])
        return [self._found[key, own] for key in classes[first:end]]

    # ---- the choices behind a cost

    def choices(
        self, row: Row, first: int, end: int, then: tuple[int, Row] | None = None
    ) -> tuple[dict[str, str], tuple[str, ...], tuple[State, ...]]:
        """({op or parameter node → label}, recompute mode per layer, state per border) of the best way through layers
        [first, end). A parameter that several of these layers use has the label of the first. then: a layer from which
        on another row of this case holds. ValueError where there is no way."""
        labels: dict[str, str] = {}
        by_layer, path = self._way(row, first, end, then)
        modes = [
            self._add_labels(labels, row[0], layer, *table, *borders)
            for layer, table, borders in zip(range(first, end), by_layer, pairwise(path))
        ]
        states = tuple(self.states(first + k)[0][s] for k, s in enumerate(path))
        return labels, tuple(modes), states

    def labels(
        self, layers: Container[int], row: Row, first: int, end: int, then: tuple[int, Row] | None = None
    ) -> dict[str, str]:
        """The labels of ``choices`` that are chosen in some layers."""
        labels: dict[str, str] = {}
        by_layer, path = self._way(row, first, end, then)
        for layer, table, borders in zip(range(first, end), by_layer, pairwise(path)):
            if layer in layers:
                self._add_labels(labels, row[0], layer, *table, *borders)
        return labels

    def _way(
        self, row: Row, first: int, end: int, then: tuple[int, Row] | None
    ) -> tuple[list[tuple[LayerTables, int]], list[int]]:
        """(the tables of each layer, and the position of the row in them; the border states of the best way)."""
        cut, other = then or (end, row)
        by_layer = [*self._by_layer(row, first, cut), *self._by_layer(other, cut, end)]
        return by_layer, self._path(row, first, end, by_layer)

    def _add_labels(
        self, labels: dict[str, str], case: int, layer: int, table: LayerTables, position: int, into: int, out: int
    ) -> str:
        """Add the labels of a layer between two border states, and return its recompute mode."""
        chosen, mode = table.choices(position, into, out)
        template, names = table.template, self._names(table.template.layer, layer)
        section, chosen = template.decision(chosen)
        for operator, (name, kind, choice) in enumerate(zip(section.names, section.kinds, chosen)):
            if kind in ("op", "parameter") and name in names:
                labels.setdefault(names[name], section.label(operator, choice, case))
        return template.modes[mode]

    def _path(self, row: Row, first: int, end: int, by_layer: Sequence[tuple[LayerTables, int]]) -> list[int]:
        """The border states (indices) of the best way through layers [first, end)."""
        cost = self.border_seconds(first)[0][:, row[0]] + self.actions[row[0]]
        back = []
        for table, position in by_layer:
            total = cost[:, None] + table.cost[..., position]
            back.append(total.argmin(axis=0))
            cost = total.min(axis=0)
        cost = cost + self.border_seconds(end)[1][:, row[0]]
        state = int(cost.argmin())
        if not np.isfinite(cost[state]):
            raise ValueError(f"an interval must be possible, but got layers [{first}, {end}) in row {row}")
        states = [state]
        for best in reversed(back):
            state = int(best[state])
            states.append(state)
        return states[::-1]

    def _names(self, source: int, layer: int) -> dict[str, str]:
        """Ops and parameters of layer ``source`` → those in the same place of ``layer``, of the same class."""
        key, cache = ("names", source, layer), self.cases.cache
        if key not in cache:
            layers, nodes = self.cases.layering.layers, self.cases.source.by_name()
            names = dict(zip(layers[source].ops, layers[layer].ops, strict=True))
            for ours, theirs in list(names.items()):
                for one, other in zip(tensor_operands(nodes[ours]), tensor_operands(nodes[theirs]), strict=True):
                    if one.op == "placeholder":
                        names.setdefault(one.name, other.name)
            cache[key] = names
        return cache[key]


def _least_phases(section: CaseSection) -> np.ndarray:
    """[2, cases] the sums over the ops of a layer of the least forward and backward among their choices; nothing of
    floating ones."""
    total = np.zeros((2, len(section.extent_of)))
    for i, kind in enumerate(section.kinds):
        if kind == "op":
            counted = np.isfinite(section.seconds[i]) & (section.floor_seconds[i] > 0)
            phases = np.stack([section.seconds[i] - section.backward_seconds[i], section.backward_seconds[i]])
            least = np.where(counted, phases, np.where(section.floor_seconds[i] > 0, np.inf, 0.0)).min(axis=2)
            total += np.where(np.isfinite(least), least, 0.0)
    return total


def _positions(section: CaseSection, operator: int, states: Sequence[State], tensor: int) -> np.ndarray:
    """[states] which choice of a kept operator each border state is."""
    position = {pair: i for i, pair in enumerate(section.choices[operator])}
    return np.array([position[state[tensor]] for state in states], dtype=np.intp)


Row = tuple[int, int]  # (case, level)
# cost [in, out, rows]; pace, step, resident, saved, transient [5, in, out, rows]; lower bounds [in, out, rows] of cost
Taken = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class LayerRun:
    """A run of layers: the one that it extends by a layer (−1: none), that layer's class, and the first interval
    that it is."""

    before: int
    layer: str
    first: int
    last: int
    length: int


def runs_of(classes: Sequence[str], borders: Sequence[Hashable]) -> tuple[list[LayerRun], np.ndarray]:
    """The distinct runs, a run after the one that it extends; and int [L, L + 1], the run of every interval."""
    numbers: dict[Hashable, int] = {}
    borders_at = [numbers.setdefault(key, len(numbers)) for key in borders]
    ids: dict[tuple[int, int, str, int], int] = {}
    runs: list[LayerRun] = []
    index = np.full((len(classes), len(classes) + 1), -1)
    for first in range(len(classes)):
        before, start = -1, borders_at[first]
        for last in range(first, len(classes)):
            layer = classes[last]
            key = before, start, layer, borders_at[last + 1]
            if key not in ids:
                ids[key] = len(runs)
                runs.append(LayerRun(before, layer, first, last, last - first + 1))
            before = index[first, last + 1] = ids[key]
            start = -1  # the runs before say where they start
    return runs, index


def _in_order(runs: Sequence[LayerRun]) -> Iterator[tuple[list[int], list[int]]]:
    """(the runs that end with a layer, those that no later run extends and no earlier pair named), layer by layer: each
    run after the one that it extends."""
    members: dict[int, list[int]] = {}
    needed = [run.last for run in runs]  # the last layer that extends it
    for number, run in enumerate(runs):
        members.setdefault(run.last, []).append(number)
        if run.before >= 0:
            needed[run.before] = max(needed[run.before], run.last)
    done: dict[int, list[int]] = {}
    for number, last in enumerate(needed):
        done.setdefault(last, []).append(number)
    for last in sorted(members):
        yield members[last], done.get(last, [])


def _blocks(members: Sequence[int], cells: int) -> Iterator[Sequence[int]]:
    """The runs in blocks whose arrays, of so many cells per run, stay in a core's cache."""
    size = max(1, _BLOCK_CELLS // cells)
    return (members[k : k + size] for k in range(0, len(members), size))


class Ways:
    """The ways through a layer by the state they lead to: the first one to each, the second one, …

    A tensor that passes a layer keeps its state, so where several tensors cross borders most pairs of states have none.
    into: int [most ways to a state, out states], the states that they come from; where a state has no more ways, they
    are impossible ones.
    """

    def __init__(self, table: np.ndarray) -> None:
        """table: [in states, out states, rows], inf where there is no way."""
        possible = np.asarray(np.isfinite(table).any(axis=2))
        most = max(1, int(possible.sum(axis=0).max()))
        self._all = most == len(possible)
        self.into = np.argsort(~(possible | self._all), axis=0, kind="stable")[:most]
        self._out = np.arange(possible.shape[1])

    def of(self, table: np.ndarray) -> np.ndarray:
        """[most ways, out states, rows] of [in states, out states, rows]."""
        return table if self._all else table[self.into, self._out]

    def start(self, values: np.ndarray, number: int) -> np.ndarray:
        """[runs, out states or 1, rows] of [runs, in states, rows]: where the ways of this number begin."""
        return values[:, number, None] if self._all else values.take(self.into[number], axis=1)


def floors_of(runs: Sequence[LayerRun], tables: Mapping[str, np.ndarray], actions: np.ndarray) -> np.ndarray:
    """[runs, rows]: the least sum of each run's layers and of a stage's actions [rows], whatever its borders' states.
    tables: by class, [in states, out states, rows]."""
    floors = np.empty((len(runs), len(actions)))
    before: dict[int, np.ndarray] = {}
    ways = {key: Ways(table) for key, table in tables.items()}
    lines = {key: ways[key].of(table) for key, table in tables.items()}
    for every, done in _in_order(runs):
        key = runs[every[0]].layer
        zero = np.zeros(tables[key].shape[::2])
        for members in _blocks(every, tables[key][0].size):
            start = np.stack([before[runs[n].before] if runs[n].before >= 0 else zero for n in members])
            least = ways[key].start(start, 0) + lines[key][0]
            total = np.empty_like(least)
            for number, line in enumerate(lines[key][1:], 1):
                np.minimum(least, np.add(ways[key].start(start, number), line, out=total), out=least)
            floors[members] = least.min(axis=1) + actions
            before |= {number: least[place] for place, number in enumerate(members)}
        for number in done:
            del before[number]
    return floors


class Composition:
    """The min-plus products of all runs, for some rows: arrays [runs, states, rows].

    tables: by class; borders: by border, entry and exit seconds [states, cases];
    actions [cases]; peaks: by class, [cases]; case [rows]: the case of each row.
    """

    def __init__(
        self,
        runs: Sequence[LayerRun],
        tables: Mapping[str, Taken],
        borders: Mapping[int, tuple[np.ndarray, np.ndarray]],
        actions: np.ndarray,
        peaks: Mapping[str, np.ndarray],
        case: np.ndarray,
    ) -> None:
        self.runs, self.tables, self.borders, self.case = runs, tables, borders, case
        self.actions, self.peaks = actions[case], {key: peak[case] for key, peak in peaks.items()}
        least = {key: np.minimum(table, below) for key, (table, _, below) in tables.items()}
        self.ways = {key: Ways(table) for key, table in least.items()}
        self.lines = {
            key: (self.ways[key].of(table), self.ways[key].of(below)) for key, (table, _, below) in tables.items()
        }
        self.results = np.empty((9, len(runs), len(case)))

    def run(self) -> np.ndarray:
        """[9, runs, rows]: cost, floor_s, the ``QUANTITIES`` and entry_s."""
        before: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for every, done in _in_order(self.runs):
            key = self.runs[every[0]].layer
            for members in _blocks(every, self.tables[key][0][0].size):
                starts = [self._start(number, before) for number in members]
                vectors = self._extended(key, np.stack([start for start, _ in starts], axis=1))
                peak = np.maximum(np.stack([peak for _, peak in starts]), self.peaks[key])
                before |= {number: (vectors[:, place], peak[place]) for place, number in enumerate(members)}
                self._leave(members, vectors, peak)
            for number in done:
                del before[number]
        return self.results

    def _start(self, number: int, before: dict[int, tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """The values of a run before its last layer: [8, in states, rows], and the peak [rows]."""
        run = self.runs[number]
        if run.before >= 0:
            return before[run.before]
        entry = self.borders[run.first][0][:, self.case]
        start = np.zeros((8, *entry.shape))
        start[0] = entry + self.actions
        start[1] = start[2] = self.actions
        start[4] = entry
        return start, np.zeros(len(self.case))

    def _extended(self, key: str, start: np.ndarray) -> np.ndarray:
        """One more layer of class ``key``: [8, runs, in states, rows] → [8, runs, out states, rows]."""
        table, quantities, _ = self.tables[key]
        ways, (lines, floors) = self.ways[key], self.lines[key]
        num_into, num_out, num_rows = table.shape
        shape = start.shape[1], num_out, num_rows
        values = np.empty((8, *shape))
        least, lowest = values[0], values[1]
        running = Running(least, len(lines))
        total, better = np.empty(shape), np.empty(shape, dtype=bool)
        for number, (line, floor) in enumerate(zip(lines, floors)):
            if number == 0:
                np.add(ways.start(start[0], 0), line, out=least)
                np.add(ways.start(start[1], 0), floor, out=lowest)
                continue
            running.offer(np.add(ways.start(start[0], number), line, out=total), number, None, better)
            np.minimum(lowest, np.add(ways.start(start[1], number), floor, out=total), out=lowest)
        rows = np.arange(num_rows)
        best = ways.into[running.best, np.arange(num_out)[:, None]]
        old = best * num_rows
        old += (np.arange(shape[0]) * (num_into * num_rows))[:, None, None] + rows
        best *= num_out * num_rows
        best += np.arange(num_out)[:, None] * num_rows + rows
        start.reshape(8, -1)[2:].take(old, axis=1, out=values[2:], mode="clip")
        taken = quantities.reshape(5, -1).take(best, axis=1, mode="clip")
        values[2:4] += taken[:2]
        values[5:7] += taken[2:4]
        np.maximum(values[7], taken[4], out=values[7])
        return values

    def _leave(self, members: Sequence[int], vectors: np.ndarray, peak: np.ndarray) -> None:
        """The best state to leave in, for the runs ``members``."""
        _, num_runs, num_out, num_rows = vectors.shape
        back = np.stack([self.borders[self.runs[n].last + 1][1][:, self.case] for n in members])
        state = (vectors[0] + back).argmin(axis=1)
        at = (np.arange(num_runs)[:, None] * num_out + state) * num_rows + np.arange(num_rows)
        chosen = vectors.reshape(8, -1).take(at, axis=1, mode="clip")
        possible = np.isfinite(chosen[0])
        self.results[8, members] = chosen[4] * possible
        chosen[0] += back.reshape(-1).take(at, mode="clip")
        chosen[1] = vectors[1].min(axis=1)
        chosen[4] += back.reshape(-1).take(at, mode="clip")
        chosen[7] += peak
        chosen[2:] *= possible
        self.results[:8, members] = chosen
