"""The recurrence of the inter-operator pass on any costs: a pipeline is a path, a stage an arc of it.

State (i, p): layers i.. are left, and the devices from ``positions[p]`` on. An arc (i, p) → (j, p′) is a stage of
layers [i, j) under one *row* (an option at one memory limit) at the leftmost of its offsets from p on; p′ is behind it.
A row's price is the same at all its offsets and more room is never worse, so further to the right it need not start:
exact with idle devices, uneven hosts and several pools. With a *head* and a *fill* per arc, both ≥ 0, a path is worth

    W = max over its arcs of (the fills of the arcs before + the arc's head)
    W(i, p, s) = min over arcs:  max(head, fill + W(j, p′, s − 1)),      W(L, ·, 0) = 0            (``Arcs.values``)

s counts the stages left. The right side grows with W(j, p′, s − 1), so a best suffix stays best under every prefix: by
induction on s one value per state is exact, the bottleneck and the sum together (no Pareto front is needed). Heads of
zero make it a plain sum, fills of zero a bottleneck.

*Lines.* A path may also be worth at least (the fills before an arc) + constant + slope · (the fills behind it), for one
or more lines (slope, constant) per arc and s. With S the least sum of fills of what is left, itself a recurrence,

    Z(i, p, s) = min over arcs:  max(head, fill + Z(j, p′, s − 1), constant + slope · S(j, p′, s − 1) over the lines)

is a lower bound on every path from (i, p): by induction no suffix is worth less than Z, nor sums to less than S. (The
best path may be worth more, as Z and S may be attained by two suffixes.)

Costs may depend on s, through the microbatches in flight (memory). ``StageRecurrence.suffix`` solves the recurrence on
the least costs over s, with one row per group of rows that use the same devices, dense over (i, p): a lower bound on
what is left, and exact where memory binds nowhere. ``StageRecurrence.arcs(most)`` then walks forwards and makes only
the arcs on which (fills before) ∪ head ∪ (fill + bound on what is left) ≤ most: every path worth at most ``most`` is in
them.

``Prices`` are the costs of the recurrence: a table's numbers per (row, pair of layers) as heads and fills.
``Prices.path`` makes W and ``excess`` the bytes over the limit (``stage_dp`` says what these are).
``turn_lines`` are what ``bounds`` proves of one pipeline beyond W.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from .families import PIPEDREAM, is_split
from .table import Floats, Ints, PipelineTable, StageChoice, StageOption

__all__ = ["Arcs", "Costs", "Lines", "Prices", "Rows", "StageRecurrence", "Turns", "fill_share", "turn_lines"]


_BLOCK = 2048  # rows of columns

Costs = Callable[[int, Ints | slice, Ints | slice], tuple[Floats, Floats]]
"""(microbatches in flight q, rows, pairs) → (head, fill) of these entries; both ascend, or both descend, with q. Slices
for rows and pairs ask for all, [rows, pairs]. An infinite head says that the stage cannot be."""

Turns = Callable[[int, int, Ints, Ints], Sequence[tuple[float, Floats]]]
"""(microbatches in flight, stages left with this one, rows, pairs) → the lines (slope ≥ 0, constants of these entries);
equally many for all arguments."""

Lines = Sequence[tuple[Floats, Floats]]
"""(slope [S], constant [entries, S]) each."""


class Rows:
    """Options split by memory limit, grouped by the devices they use; the positions that pipelines can reach."""

    def __init__(self, options: Sequence[StageOption], num_layers: int, num_devices: int) -> None:
        self.num_layers, self.num_devices = num_layers, num_devices
        self.first, self.end = np.triu_indices(num_layers, 1, num_layers + 1)
        self.pair = np.full((num_layers, num_layers + 1), -1, dtype=np.intp)
        self.pair[self.first, self.end] = np.arange(len(self.first))
        option, limit, group = [], [], []
        groups: dict[tuple[int, tuple[int, ...], bool], int] = {}
        for index, one in enumerate(options):
            by_limit: dict[float, list[int]] = {}
            for offset, bytes_ in zip(one.offsets, one.limit_bytes):
                by_limit.setdefault(bytes_, []).append(offset)
            for bytes_, offsets in by_limit.items():
                option.append(index)
                limit.append(bytes_)
                group.append(groups.setdefault((one.num_devices, tuple(offsets), one.adjacent), len(groups)))
        self.option, self.limit = np.array(option, dtype=np.intp), np.array(limit, dtype=np.float64)
        self.group, self.num_groups = np.array(group, dtype=np.intp), len(groups)
        self._place(list(groups))

    def _place(self, groups: Sequence[tuple[int, tuple[int, ...], bool]]) -> None:
        reached, queue = {0}, [0]
        while queue:
            at = queue.pop()
            for n, offsets, adjacent in groups:
                k = bisect_left(offsets, at)
                if k == len(offsets) or (adjacent and offsets[k] != at):
                    continue
                if offsets[k] + n not in reached:
                    reached.add(offsets[k] + n)
                    queue.append(offsets[k] + n)
        self.positions = np.array(sorted(reached), dtype=np.intp)
        none = len(self.positions)
        self.offset = np.full((len(groups), none), -1, dtype=np.intp)  # where the group starts from a position on
        self.after = np.full((len(groups), none), none, dtype=np.intp)  # the position behind it; none: no room
        for index, (n, offsets, adjacent) in enumerate(groups):
            starts = np.array(offsets, dtype=np.intp)
            nearest = np.searchsorted(starts, self.positions)
            fits = nearest < len(starts)
            if adjacent:
                fits &= starts[np.minimum(nearest, len(starts) - 1)] == self.positions
            self.offset[index, fits] = starts[nearest[fits]]
            self.after[index, fits] = np.searchsorted(self.positions, starts[nearest[fits]] + n)

    def packed(self, array: Floats) -> Floats:
        """[options, L, L + 1] as [rows, pairs]."""
        flat = np.take(array.reshape(len(array), -1), self.first * (self.num_layers + 1) + self.end, axis=1)
        one_each = len(self.option) == len(array) and bool((self.option == np.arange(len(array))).all())
        return flat if one_each else flat[self.option]

    def members(self, group: int) -> Ints:
        """The rows of a group."""
        return np.flatnonzero(self.group == group)


@dataclass(frozen=True, eq=False)
class Arcs:
    """The arcs of a search, by ascending state (i · positions + p). entry: which pair of row and layers an arc has."""

    rows: Rows
    source: Ints  # [arcs]
    target: Ints  # [arcs]
    entry: Ints  # [arcs]
    worth: Floats  # [arcs], a lower bound on all paths through it
    entry_row: Ints  # [entries]
    entry_pair: Ints  # [entries]

    @cached_property
    def _blocks(self) -> list[tuple[int, int, Ints, Ints]]:
        """Per layer from the last on: its arcs' range, the arc that begins each state, and these states."""
        begins = np.flatnonzero(np.diff(self.source, prepend=-1))
        states = self.source[begins]
        width = len(self.rows.positions)
        layer = states // width
        out = []
        for i in np.unique(layer)[::-1]:
            low, high = np.searchsorted(layer, [i, i + 1])
            stop = int(begins[high]) if high < len(begins) else len(self.source)
            out.append((int(begins[low]), stop, begins[low:high] - begins[low], states[low:high]))
        return out

    def values(
        self, head: Floats | None, fill: Floats, counted: bool, lines: Lines = (), sums: Floats | None = None
    ) -> Floats:
        """W (Z with ``lines`` and the ``sums`` S of what is left) per state and column: head (None: nothing) and fill
        are [entries, S]; where ``counted``, column k is of k + 1 stages left (then one that ends the layers has column
        0), otherwise columns do not mix. Shape [states, S + counted]."""
        width, columns = len(self.rows.positions), fill.shape[1]
        value = np.full((self.rows.num_layers * width + width, columns + counted), inf)
        value[self.rows.num_layers * width :, : 1 if counted else columns] = 0.0
        for start, stop, begins, states in self._blocks:
            entry = self.entry[start:stop]
            total = fill[entry]
            total += value[self.target[start:stop], :columns]
            if head is not None:
                np.maximum(total, head[entry], out=total)
            if sums is not None:
                left = sums[self.target[start:stop], :columns]
                left[np.isinf(left)] = 0.0  # no path: the total says so, and slopes may be 0
                for slope, constant in lines:
                    np.maximum(total, slope * left + constant[entry], out=total)
            value[states, int(counted) :] = np.minimum.reduceat(total, begins, axis=0)
        return value

    def longest(self) -> int:
        """The largest number of arcs of a path from the first state to the end."""
        width = len(self.rows.positions)
        count = np.full((self.rows.num_layers + 1) * width, -inf)
        count[self.rows.num_layers * width :] = 0.0
        for start, stop, begins, states in self._blocks:
            count[states] = 1.0 + np.maximum.reduceat(count[self.target[start:stop]], begins)
        return int(max(count[0], 0.0))

    def out(self, state: int) -> slice:
        """The arcs that leave a state."""
        low, high = np.searchsorted(self.source, [state, state + 1])
        return slice(int(low), int(high))

    def choice(self, arc: int) -> StageChoice:
        """The stage that the arc stands for."""
        rows, entry = self.rows, self.entry[arc]
        row, pair = self.entry_row[entry], self.entry_pair[entry]
        position = self.source[arc] % len(rows.positions)
        return StageChoice(
            int(rows.first[pair]), int(rows.end[pair]), int(rows.option[row]),
            int(rows.offset[rows.group[row], position]),
        )  # fmt: skip

    def priced(self, costs: Costs, flights: Sequence[int]) -> tuple[Floats, Floats]:
        """Head and fill [entries, len(flights)], column k with flights[k] microbatches in flight."""
        by_flight: dict[int, tuple[Floats, Floats]] = {}
        for q in flights:
            if q not in by_flight:
                by_flight[q] = costs(q, self.entry_row, self.entry_pair)
        return _columns([by_flight[q][0] for q in flights]), _columns([by_flight[q][1] for q in flights])

    def lined(self, turns: Turns | None, flights: Sequence[int], lefts: Sequence[int]) -> Lines:
        """The lines of the arcs, column k with flights[k] microbatches in flight and lefts[k] stages left."""
        if turns is None:
            return ()
        lines = [turns(q, left, self.entry_row, self.entry_pair) for q, left in zip(flights, lefts)]
        return [(np.array([one[0] for one in line]), _columns([one[1] for one in line])) for line in zip(*lines)]


def _columns(arrays: Sequence[Floats]) -> Floats:
    """``np.stack(arrays, 1)`` of long arrays, a block of rows at a time: what is written stays in the cache, which is
    two to seven times as fast."""
    columns = np.empty((len(arrays[0]), len(arrays)))
    for first in range(0, len(columns), _BLOCK):
        columns[first : first + _BLOCK] = np.stack([array[first : first + _BLOCK] for array in arrays]).T
    return columns


class StageRecurrence:
    """The recurrence over ``rows`` with the least ``costs`` over ``flights``; ``allowed`` says which pairs may be
    stages. labels: rows of a group and a label count as one (a row that another of them never loses to is left out).
    turns: the lines of arcs, whose constants grow with head, fill and ``parts``: what else to compare before a row is
    left out.
    """

    def __init__(
        self,
        rows: Rows,
        costs: Costs,
        flights: Sequence[int],
        allowed: NDArray[np.bool_],
        labels: Sequence[int] | None = None,
        turns: Turns | None = None,
        parts: Callable[[int], Sequence[Floats]] = lambda q: (),
    ) -> None:
        self.rows, self.costs, self.turns = rows, costs, turns
        self.ends = sorted({min(flights), max(flights)})  # the costs are monotone in between
        (head, fill), (other_head, other_fill) = (costs(q, slice(None), slice(None)) for q in (self.ends * 2)[:2])
        high_head, high_fill = np.maximum(head, other_head), np.maximum(fill, other_fill)
        self.head, self.fill = np.where(allowed, np.minimum(head, other_head), inf), np.minimum(fill, other_fill)
        own, other = (parts(q) for q in (self.ends * 2)[:2])
        pairs = [(np.minimum(a, b), np.maximum(a, b)) for a, b in zip(own, other)]
        compared = [(self.head, high_head), (self.fill, high_fill), *pairs]
        self._drop_dominated(compared, [0] * len(rows.option) if labels is None else labels)
        shape = (rows.num_groups, rows.num_layers, rows.num_layers + 1)
        self.group_head, self.group_fill = np.full(shape, inf), np.full(shape, inf)
        for group in range(rows.num_groups):
            members = rows.members(group)
            head, fill = self.head[members], np.where(np.isfinite(self.head[members]), self.fill[members], inf)
            self.group_head[group, rows.first, rows.end] = head.min(axis=0)
            self.group_fill[group, rows.first, rows.end] = fill.min(axis=0)

    def _drop_dominated(self, compared: Sequence[tuple[Floats, Floats]], labels: Sequence[int]) -> None:
        """Rows that are at every q no less than the row that is best at its worst, of all that is (least, most)
        ``compared``, the heads first."""
        alike: dict[tuple[int, int], list[int]] = {}
        for row, key in enumerate(zip(map(int, self.rows.group), labels)):
            alike.setdefault(key, []).append(row)
        every = np.arange(self.head.shape[1])
        for members in alike.values():
            if len(members) > 1:
                best = compared[0][1][members].argmin(axis=0)
                row = np.array(members)[best]
                worse = np.logical_and.reduce([least[members] >= most[row, every] for least, most in compared])
                worse[best, every] = False
                self.head[members] = np.where(worse, inf, self.head[members])

    @cached_property
    def suffix(self) -> tuple[Floats, Floats]:
        """(value [L + 1, positions + 1] of what is left, the same [groups, L + 1, positions] behind each group)."""
        return self._dense(self.group_head, self.group_fill)

    @property
    def low(self) -> float:
        """A lower bound on every path."""
        return float(self.suffix[0][0, 0])

    def _dense(self, head: Floats, fill: Floats) -> tuple[Floats, Floats]:
        rows = self.rows
        layers, width = rows.num_layers, len(rows.positions)
        value = np.full((layers + 1, width + 1), inf)
        value[layers, :width] = 0.0
        behind = np.full((rows.num_groups, layers + 1, width), inf)
        behind[:, layers] = value[layers][rows.after]
        for i in range(layers - 1, -1, -1):
            total = np.maximum(behind[:, i + 1 :] + fill[:, i, i + 1 :, None], head[:, i, i + 1 :, None])
            value[i, :width] = total.min(axis=(0, 1))
            behind[:, i] = value[i][rows.after]
        return value, behind

    def depends(self, arcs: Arcs) -> bool:
        """True if any arc's costs change with the microbatches in flight."""
        (head, fill), *other = [self.costs(q, arcs.entry_row, arcs.entry_pair) for q in self.ends]
        return any((more != head).any() or (longer != fill).any() for more, longer in other)

    def arcs(self, most: float) -> Arcs:
        """The arcs of all paths that are worth at most ``most``."""
        rows = self.rows
        width, pairs = len(rows.positions), len(rows.first)
        blocks = list(self._group_arcs(most))
        empty = np.empty(0, dtype=np.intp)
        group, pair, source, target = (
            np.concatenate([one[k] for one in blocks]) if blocks else empty for k in range(4)
        )
        before = np.concatenate([one[4] for one in blocks]) if blocks else np.empty(0)
        size = np.bincount(rows.group, minlength=rows.num_groups)
        by_group, begins = np.argsort(rows.group, kind="stable"), np.cumsum(size) - size
        arc = np.repeat(np.arange(len(group)), size[group])  # every row of the arc's group
        nth = np.arange(len(arc)) - np.repeat(np.cumsum(size[group]) - size[group], size[group])
        row = by_group[begins[group[arc]] + nth]
        key = row * pairs + pair[arc]
        head, left = self.head.ravel()[key], self.suffix[0][:, :width].ravel()[target[arc]]
        worth = before[arc] + np.maximum(head, self.fill.ravel()[key] + left)
        kept = np.isfinite(head) & (worth <= most)
        arc, key = arc[kept], key[kept]
        used = np.zeros(len(rows.option) * pairs, dtype=bool)
        used[key] = True
        entry = (np.cumsum(used) - 1)[key]
        return Arcs(rows, source[arc], target[arc], entry, worth[kept], *np.divmod(np.flatnonzero(used), pairs))

    def _group_arcs(self, most: float) -> Iterator[tuple[Ints, Ints, Ints, Ints, Floats]]:
        """Per layer: (group, pair, source, target, fills before the arc) of the arcs worth keeping, by source."""
        rows = self.rows
        layers, width = rows.num_layers, len(rows.positions)
        behind = self.suffix[1]
        reach = np.full((layers + 1, width), inf)
        reach[0, 0] = 0.0
        for i in range(layers):
            p = np.flatnonzero(np.isfinite(reach[i]))
            if not len(p):
                continue
            heads = self.group_head[:, i, i + 1 :]
            group, j = np.nonzero(np.isfinite(heads) & (heads <= most - reach[i, p].min()))
            j += i + 1
            head, fill = self.group_head[group, i, j], self.group_fill[group, i, j]
            worth = reach[i, p] + np.maximum(head[:, None], fill[:, None] + behind[group, j][:, p])
            at, k = np.nonzero((worth <= most).T & np.isfinite(worth).T)  # by position
            group, j, fill, at = group[k], j[k], fill[k], p[at]
            to = rows.after[group, at]
            np.minimum.at(reach, (j, to), reach[i, at] + fill)
            yield group, rows.pair[i, j], i * width + at, j * width + to, reach[i, at]


def fill_share(schedule: str, forward_share: Floats | float, input_share: Floats | float) -> Floats | float:
    """The part of a stage's pace by which it delays the others: f + max(0, b_input − b_weight) under zb-h1, else 1."""
    if not is_split(schedule):
        return 1.0
    return forward_share + np.maximum(0.0, 2.0 * input_share + forward_share - 1.0)


def turn_lines(
    schedule: str, m: int, q: int, left: int, way: tuple[Floats, Floats, Floats, Floats]
) -> list[tuple[float, Floats]]:
    """The lines (``recurrence``) of a stage with q microbatches in flight and ``left`` stages left, for ``way`` =
    (trip: its part of a microbatch's way there and back, rest: that with the message behind it, once: what its fill
    counts beside, head). With R the way behind: ⌈m/q⌉ (rest + R) and (m − q + 1) trip + 2 (rest − trip + R); under
    GPipe the way of one microbatch, and all the others' work."""
    trip, rest, once, head = way
    if schedule == "gpipe":
        return [(1.0, rest + head - trip)]
    q = min(q, left) if is_split(schedule) else q  # zb-h1 has the order of F and I of 1F1B
    turns = float(ceil(m / q))
    second = (2.0, 2.0 * rest + (m - q - 1) * trip + once) if m > q else (1.0, rest + once)
    return [(turns, turns * rest + once), second]


class Prices:
    """The arrays of ``table`` as [rows, pairs]; a message across the pipeline's ends counts nothing."""

    def __init__(self, table: PipelineTable, rows: Rows, m: int, schedule: str) -> None:
        leaves, enters = rows.end < table.num_layers, rows.first > 0
        self.pace = rows.packed(table.pace_s)
        once = np.where(enters, 0.0, rows.packed(table.step_s))
        if table.entry_s is not None:
            once = np.where(enters, rows.packed(table.entry_s), once)
        share = fill_share(schedule, table.forward_share, table.input_share)
        if isinstance(share, np.ndarray) and share.ndim:
            share = rows.packed(np.broadcast_to(share, table.pace_s.shape))
        through = np.where(np.isfinite(self.pace), self.pace, 0.0) * share
        fill = through + np.where(leaves, rows.packed(table.transfer_s), 0.0) + once
        self.rows, self.m, self.schedule = rows, m, schedule
        self._way = through, fill - once, np.broadcast_to(once, fill.shape)
        self._path = m * self.pace + once, fill
        if schedule == PIPEDREAM:  # no fill: the slowest stage is all
            self._path = m * self.pace + rows.packed(table.step_s), np.zeros_like(fill)
        self.base, self.saved = rows.packed(table.resident) + rows.packed(table.transient), rows.packed(table.saved)
        self.limit = np.broadcast_to(rows.limit[:, None], self.base.shape)

    def _fits(self, q: int, row: Ints | slice, pair: Ints | slice) -> NDArray[np.bool_]:
        fits: NDArray[np.bool_] = self.base[row, pair] + q * self.saved[row, pair] <= self.limit[row, pair]
        return fits

    def path(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats]:
        """W: head e + m t, fill e + t + x, the step on both where the stage is the first."""
        head, fill = self._path
        return np.where(self._fits(q, row, pair), head[row, pair], inf), fill[row, pair]

    def turns(self, q: int, left: int, row: Ints | slice, pair: Ints | slice) -> Sequence[tuple[float, Floats]]:
        """The lines of ``path``; of no schedule whose backwards are split."""
        trip, rest, once = (array[row, pair] for array in self._way)
        return turn_lines(self.schedule, self.m, q, left, (trip, rest, once, self._path[0][row, pair]))

    def parts(self, q: int) -> Sequence[Floats]:
        """The values that the constants of ``turns`` grow with, beside head and fill."""
        trip, rest, _ = self._way
        return trip, rest - trip if self.schedule == "gpipe" else rest

    def excess(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats]:
        """Bytes over the limit, where the stage can run at all; no fills."""
        over = self.base[row, pair] + q * self.saved[row, pair] - self.limit[row, pair]
        head = np.where(np.isfinite(self.pace[row, pair]), np.maximum(over, 0.0), inf)
        return head, np.zeros_like(head)
