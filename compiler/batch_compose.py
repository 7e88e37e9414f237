"""Stage costs for every run of layers, of many rows at once: (mesh, microbatches) cases under levels of weights.

As in ``compose``, a run of layers costs the min-plus product of its layers' tables (``batch_tables``) between entering
a border in some state and leaving one. A run depends on its sequence of layer classes and on its borders alone, so
equal sequences are one run: ids are hash-consed, id(i, j + 1) = cons(id(i, j), class of layer j, border j + 1), and a
GPT of 98 layers has some 500 of them where it has 4,851 intervals. All runs of one length are extended together.

**What an interval's cost is.** With pace p and step seconds s (per microbatch; tables), a stage's two actions a, and
the transfer x of what crosses its borders, forward and back,

    cost = min over border states of   objective(p + s, bytes) + a + x
    floor_s = min over border states of   objective(p + s, bytes) + a            (its own minimum: nothing follows x)

so with no weights on bytes, floor_s is the least seconds of a microbatch, and with weights the value of the Lagrangian.
pace_s (actions included), step_s, transfer_s and the bytes are those of the choices behind cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .batch_eliminate import Running, in_chunks
from .batch_section import BatchSection, build_batch_section
from .batch_tables import LayerTables, Level, Template, Weights
from .graph import op_name, tensor_operands, types_of
from .problem import Restriction
from .variants import State, Variants

__all__ = ["BatchComposer", "BatchIntervals", "Row"]

Row = tuple[int, int]  # (variant, level)
Build = Callable[[Variants, int, Sequence[State], Sequence[State], Restriction, Sequence[str]], BatchSection]
QUANTITIES = ("pace_s", "step_s", "transfer_s", "resident", "saved", "transient")
_SLICE = 256  # rows that one thread composes at a time


@dataclass(frozen=True, eq=False)
class BatchIntervals:
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

    def of(self, name: str, rows: Sequence[int] | slice = slice(None)) -> np.ndarray:
        """The array of this name as [rows, L, L + 1], for some rows (positions in ``rows``) or all of them."""
        values = getattr(self, name).T[rows]
        below = np.inf if name in ("cost", "floor_s") else 0.0
        padded = np.concatenate([values, np.full((len(values), 1), below)], axis=1)
        return np.asarray(padded.take(self.run, axis=1, mode="wrap"))  # −1 is the padding


@dataclass(frozen=True)
class _Run:
    """A run of layers: the one that it extends by a layer (−1: none), and the first interval that it is."""

    before: int
    first: int
    last: int
    length: int


@dataclass(eq=False)
class BatchComposer:
    """Tables and intervals of one model for the cases of ``variants``, at any of ``levels``.

    modes: recompute modes that each layer may choose from. build: makes a layer's section for all cases.
    """

    variants: Variants
    restriction: Restriction
    levels: Sequence[Level]
    modes: Sequence[str]
    build: Build = build_batch_section
    _templates: dict[str, Template] = field(default_factory=dict)
    _found: dict[Row, tuple[dict[str, LayerTables], int]] = field(default_factory=dict)
    _borders: dict[Any, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    _peaks: dict[str, np.ndarray] = field(default_factory=dict)

    # ---- tables

    def states(self, boundary: int) -> tuple[tuple[State, ...], np.ndarray]:
        """The states of a border in any case, and bool [cases, states] in which."""
        return self.variants.states(boundary, self.restriction.roles)

    def template(self, layer: int) -> Template:
        """The template of a layer's class."""
        key = self.variants.layering.layers[layer].class_key
        if key not in self._templates:
            self._templates[key] = self._template(layer)
        return self._templates[key]

    def _template(self, layer: int) -> Template:
        (into, has_into), (out, has_out) = self.states(layer), self.states(layer + 1)
        modes = self.restriction.modes.get(self.variants.layering.layers[layer].class_key, self.modes)
        section = self.build(self.variants, layer, into, out, self.restriction, modes)
        crossing = self.variants.layering.crossing
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
        return Template.of(section, layer, modes, arriving, going, mask)

    def tables(self, rows: Sequence[Row]) -> dict[str, LayerTables]:
        """Per layer class the tables of these rows."""
        weights = Weights.of([(variant, self.levels[level]) for variant, level in rows])
        found: dict[str, LayerTables] = {}
        for index, layer in enumerate(self.variants.layering.layers):
            if layer.class_key not in found:
                found[layer.class_key] = self.template(index).tables(weights)
        self._found.update({row: (found, position) for position, row in enumerate(rows)})
        return found

    # ---- borders

    def border_seconds(self, boundary: int) -> tuple[np.ndarray, np.ndarray]:
        """(entry, exit) seconds [states, cases]: receiving the tensors that cross here in each state, and getting their
        cotangents back. Without a stage's actions."""
        key = self.variants.border_key(boundary)
        if key not in self._borders:
            self._borders[key] = self._price_border(boundary)
        return self._borders[key]

    def _price_border(self, boundary: int) -> tuple[np.ndarray, np.ndarray]:
        variants = self.variants
        states, _ = self.states(boundary)
        entry, leave = (np.zeros((len(states), variants.num)) for _ in range(2))
        nodes, grad = variants.source.by_name(), variants.layering.needs_grad
        for t, name in enumerate(variants.layering.crossing[boundary]):
            kind = nodes[name].meta["type"]
            whole = variants.shapes(kind).prod(axis=1)[variants.extent_of] * float(kind.dtype.itemsize)
            for i, state in enumerate(states):
                entry[i] += self._transfer(whole, state[t].value)
                if name in grad:
                    leave[i] += self._transfer(whole, state[t].cotangent)
        return entry, leave

    def _transfer(self, whole: np.ndarray, spec: Any) -> np.ndarray:
        """[cases] seconds to send a tensor of these whole bytes to each device, cut as ``spec`` says."""
        mask = sum(1 << axis for axis, placement in enumerate(spec) if placement.is_shard)
        key = "transfer", mask, whole.tobytes()
        cache = self.variants.cache
        if key not in cache:
            sizes = whole / self.variants.divisor[:, mask]
            pricers = [self.variants.pricer(v) for v in range(self.variants.num)]
            cache[key] = np.array([p.transfer_seconds(size) for p, size in zip(pricers, sizes.tolist())])
        return np.asarray(cache[key])

    def _actions(self) -> np.ndarray:
        """[cases] seconds of a stage's two actions, beside their ops."""
        return np.array([2 * self.variants.pricer(v).device.action_s for v in range(self.variants.num)])

    def peak_bytes(self, layer: int) -> np.ndarray:
        """[cases] the largest op's operands and outputs, twice (value and cotangent), cut evenly over the mesh: a floor
        of the peak beside what is kept."""
        key = self.variants.layering.layers[layer].class_key
        if key not in self._peaks:
            nodes = self.variants.source.by_name()
            sizes = []
            for node in map(nodes.__getitem__, self.variants.layering.layers[layer].ops):
                if op_name(node) == "getitem":
                    continue
                kinds = [*types_of(node)]
                kinds += [types_of(o)[0] for o in node.all_input_nodes if o.op != "placeholder"]
                sizes.append(
                    sum(self.variants.shapes(kind).prod(axis=1) * float(kind.dtype.itemsize) for kind in kinds)
                )
            most = np.max(sizes, axis=0)[self.variants.extent_of]
            self._peaks[key] = 2.0 * most / self.variants.num_devices
        return self._peaks[key]

    # ---- intervals

    def intervals(self, rows: Sequence[Row]) -> BatchIntervals:
        """Cost, seconds and bytes of every interval for these rows, each with its best border states and modes."""
        tables = self.tables(rows)
        runs, index = self._runs()
        variant = np.array([v for v, _ in rows], dtype=np.intp)
        borders = {b: self.border_seconds(b) for b in range(len(self.variants.layering.crossing))}
        actions = self._actions()
        peaks = [self.peak_bytes(k) for k in range(len(self.variants.layering.layers))]

        def work(part: slice) -> np.ndarray:
            return _Composition(self, tables, runs, borders, actions, peaks, variant[part], part).run()

        parts = in_chunks(work, len(rows), _SLICE if len(rows) > 2 * _SLICE else max(1, -(-len(rows) // 2)))
        return BatchIntervals(tuple(rows), index, *np.concatenate(parts, axis=2))

    def _runs(self) -> tuple[list[_Run], np.ndarray]:
        """The distinct runs, a run after the one that it extends; and the run of every interval."""
        layers = self.variants.layering.layers
        borders = [self.variants.border_key(b) for b in range(len(layers) + 1)]
        numbers: dict[Any, int] = {}
        borders_at = [numbers.setdefault(key, len(numbers)) for key in borders]
        ids: dict[tuple[int, int, str, int], int] = {}
        runs: list[_Run] = []
        index = np.full((len(layers), len(layers) + 1), -1)
        for first in range(len(layers)):
            before, start = -1, borders_at[first]
            for last in range(first, len(layers)):
                key = before, start, layers[last].class_key, borders_at[last + 1]
                if key not in ids:
                    ids[key] = len(runs)
                    runs.append(_Run(before, first, last, last - first + 1))
                before = index[first, last + 1] = ids[key]
                start = -1  # the runs before say where they start
        return runs, index

    # ---- the way back

    def choices(self, row: Row, first: int, end: int) -> tuple[dict[str, str], tuple[str, ...], tuple[State, ...]]:
        """({op or parameter node → label}, recompute mode per layer, state per border) of the best way through layers
        [first, end). A parameter that several of these layers use has the label of the first. ValueError where there
        is no way."""
        if row not in self._found:
            self.tables([row])
        tables, position = self._found[row]
        path = self._path(row, first, end)
        layers = self.variants.layering.layers
        labels: dict[str, str] = {}
        modes = []
        for layer, into, out in zip(range(first, end), path, path[1:]):
            table = tables[layers[layer].class_key]
            chosen, mode = table.choices(position, into, out)
            modes.append(table.template.modes[mode])
            section, names = table.template.section, self._names(table.template.layer, layer)
            for operator, (name, kind, choice) in enumerate(zip(section.names, section.kinds, chosen)):
                if kind in ("op", "parameter") and name in names:
                    labels.setdefault(names[name], section.label(operator, choice, row[0]))
        states = tuple(self.states(first + k)[0][s] for k, s in enumerate(path))
        return labels, tuple(modes), states

    def _path(self, row: Row, first: int, end: int) -> list[int]:
        """The border states (indices) of the best way through layers [first, end)."""
        tables, position = self._found[row]
        layers = self.variants.layering.layers
        cost = self.border_seconds(first)[0][:, row[0]] + self._actions()[row[0]]
        back = []
        for layer in range(first, end):
            total = cost[:, None] + tables[layers[layer].class_key].cost[..., position]
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
        layers, nodes = self.variants.layering.layers, self.variants.source.by_name()
        names = dict(zip(layers[source].ops, layers[layer].ops, strict=True))
        for ours, theirs in list(names.items()):
            for one, other in zip(tensor_operands(nodes[ours]), tensor_operands(nodes[theirs]), strict=True):
                if one.op == "placeholder":
                    names.setdefault(one.name, other.name)
        return names


class _Composition:
    """The min-plus products of all runs, for a slice of the rows. Arrays [runs, states, rows]."""

    def __init__(
        self,
        composer: BatchComposer,
        tables: dict[str, LayerTables],
        runs: list[_Run],
        borders: dict[int, tuple[np.ndarray, np.ndarray]],
        actions: np.ndarray,
        peaks: list[np.ndarray],
        variant: np.ndarray,
        part: slice,
    ) -> None:
        self.keys = [layer.class_key for layer in composer.variants.layering.layers]
        self.runs, self.borders, self.variant = runs, borders, variant
        self.actions, self.peaks = actions[variant], {k: peak[variant] for k, peak in zip(self.keys, peaks)}
        self.cost = {key: np.ascontiguousarray(table.cost[..., part]) for key, table in tables.items()}
        self.taken = {
            key: np.stack([q[..., part] for q in (t.pace_s, t.step_s, t.resident, t.saved, t.transient)])
            for key, t in tables.items()
        }
        self.results = np.empty((9, len(runs), len(variant)))

    def run(self) -> np.ndarray:
        """[9, runs, rows]: cost, floor_s, the ``QUANTITIES`` and entry_s."""
        by_length: dict[int, list[int]] = {}
        for number, run in enumerate(self.runs):
            by_length.setdefault(run.length, []).append(number)
        before: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for _, numbers in sorted(by_length.items()):
            groups: dict[str, list[int]] = {}
            for number in numbers:
                groups.setdefault(self.keys[self.runs[number].last], []).append(number)
            now: dict[int, tuple[np.ndarray, np.ndarray]] = {}
            for key, members in groups.items():
                starts = [self._start(number, before) for number in members]
                vectors = self._extended(key, np.stack([start for start, _ in starts], axis=1))
                peak = np.maximum(np.stack([peak for _, peak in starts]), self.peaks[key])
                for place, number in enumerate(members):
                    now[number] = vectors[:, place], peak[place]
                self._leave(members, vectors, peak)
            before = now
        return self.results

    def _start(self, number: int, before: dict[int, tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """What came before the last layer of a run: [8, in states, rows], and the peak [rows]."""
        run = self.runs[number]
        if run.before >= 0:
            return before[run.before]
        entry = self.borders[run.first][0][:, self.variant]
        start = np.zeros((8, *entry.shape))
        start[0] = entry + self.actions
        start[1] = start[2] = self.actions
        start[4] = entry
        return start, np.zeros(len(self.variant))

    def _extended(self, key: str, start: np.ndarray) -> np.ndarray:
        """One more layer of class ``key``: [8, runs, in states, rows] → [8, runs, out states, rows]."""
        table = self.cost[key]
        num_into, num_out, num_rows = table.shape
        shape = start.shape[1], num_out, num_rows
        found = np.empty((8, *shape))
        least, lowest = found[0], found[1]
        running = Running(least, num_into)
        total, better = np.empty(shape), np.empty(shape, dtype=bool)
        for state, line in enumerate(table):
            if state == 0:
                np.add(start[0][:, 0, None], line, out=least)
                np.add(start[1][:, 0, None], line, out=lowest)
                continue
            running.offer(np.add(start[0][:, state, None], line, out=total), state, None, better)
            np.minimum(lowest, np.add(start[1][:, state, None], line, out=total), out=lowest)
        rows = np.arange(num_rows)
        best = running.best.astype(np.intp)
        old = best * num_rows
        old += (np.arange(shape[0]) * (num_into * num_rows))[:, None, None] + rows
        best *= num_out * num_rows
        best += np.arange(num_out)[:, None] * num_rows + rows
        start.reshape(8, -1)[2:].take(old, axis=1, out=found[2:], mode="clip")
        taken = self.taken[key].reshape(5, -1).take(best, axis=1, mode="clip")
        found[2:4] += taken[:2]
        found[5:7] += taken[2:4]
        np.maximum(found[7], taken[4], out=found[7])
        return found

    def _leave(self, members: list[int], vectors: np.ndarray, peak: np.ndarray) -> None:
        """The best state to leave in, for the runs ``members``."""
        _, num_runs, num_out, num_rows = vectors.shape
        back = np.stack([self.borders[self.runs[n].last + 1][1][:, self.variant] for n in members])
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


def _positions(section: BatchSection, operator: int, states: Sequence[State], tensor: int) -> np.ndarray:
    """[states] which choice of a kept operator each border state is."""
    position = {pair: i for i, pair in enumerate(section.choices[operator])}
    return np.array([position[state[tensor]] for state in states])
