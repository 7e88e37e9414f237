"""Runs of layers, and the min-plus products of all of them at once (``batch_compose``).

A run depends on its sequence of layer classes and on its borders alone: id(i, j + 1) = cons(id(i, j), class of layer j,
border j + 1), and equal sequences are one run. So what a run knows of its layers may depend on how many of their class
come before them in the run, which *mixed* rows use.

**Mixed rows.** Where memory binds, all equal layers of a row change their minds at the same price of a byte, and the
bytes of a run jump. A row (case, level, other level, share of ``PERIOD``) takes a layer's table of the first level if
k mod PERIOD < share, for the k-th layer of its class in the run, and that of the other level elsewhere. Tables of one
case share their border states whatever their level. The costs of such a row are sums of different objectives and so no
Lagrangian; its choices and what they take are as real as any (what a convex combination of two integral solutions of
the relaxed problem would take is nearly attained, as equal layers may differ: the gap closes with their number, as in
the Shapley-Folkman theorem).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .batch_eliminate import Running

__all__ = ["PERIOD", "Composition", "Mixed", "Row", "Run", "runs_of"]

PERIOD = 4  # layers of a class after which a mixture repeats

Row = tuple[int, int]  # (variant, level)
Key = tuple[str, int]  # (class, occurrence modulo the period)
Taken = tuple[np.ndarray, np.ndarray]  # cost [in, out, rows]; pace, step, resident, saved, transient [5, in, out, rows]


class Mixed(NamedTuple):
    """A row of two levels: ``level`` for ``share`` of ``PERIOD`` layers of a class, ``other`` for the rest."""

    variant: int
    level: int
    other: int
    share: int

    def of(self, occurrence: int) -> Row:
        """The row that a layer is in with so many of its class before it in its run."""
        return self.variant, self.level if occurrence % PERIOD < self.share else self.other


@dataclass(frozen=True)
class Run:
    """A run of layers: the one that it extends by a layer (−1: none), that layer's class and how many of it are before
    it, and the first interval that it is."""

    before: int
    layer: str
    occurrence: int
    first: int
    last: int
    length: int


def runs_of(classes: Sequence[str], borders: Sequence[Hashable]) -> tuple[list[Run], np.ndarray]:
    """The distinct runs, a run after the one that it extends; and int [L, L + 1], the run of every interval."""
    numbers: dict[Hashable, int] = {}
    borders_at = [numbers.setdefault(key, len(numbers)) for key in borders]
    ids: dict[tuple[int, int, str, int], int] = {}
    runs: list[Run] = []
    index = np.full((len(classes), len(classes) + 1), -1)
    for first in range(len(classes)):
        before, start = -1, borders_at[first]
        seen: dict[str, int] = {}
        for last in range(first, len(classes)):
            layer = classes[last]
            key = before, start, layer, borders_at[last + 1]
            if key not in ids:
                ids[key] = len(runs)
                runs.append(Run(before, layer, seen.get(layer, 0), first, last, last - first + 1))
            seen[layer] = seen.get(layer, 0) + 1
            before = index[first, last + 1] = ids[key]
            start = -1  # the runs before say where they start
    return runs, index


class Composition:
    """The min-plus products of all runs, for some rows: arrays [runs, states, rows].

    tables: by class and occurrence modulo ``period``; borders: by border, entry and exit seconds [states, cases];
    actions [cases]; peaks: by class, [cases]; variant [rows]: which case each row is of.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        tables: Mapping[Key, Taken],
        borders: Mapping[int, tuple[np.ndarray, np.ndarray]],
        actions: np.ndarray,
        peaks: Mapping[str, np.ndarray],
        variant: np.ndarray,
        period: int,
    ) -> None:
        self.runs, self.tables, self.borders, self.variant, self.period = runs, tables, borders, variant, period
        self.actions, self.peaks = actions[variant], {key: peak[variant] for key, peak in peaks.items()}
        self.results = np.empty((9, len(runs), len(variant)))

    def run(self) -> np.ndarray:
        """[9, runs, rows]: cost, floor_s, the ``QUANTITIES`` and entry_s."""
        by_length: dict[int, list[int]] = {}
        for number, run in enumerate(self.runs):
            by_length.setdefault(run.length, []).append(number)
        before: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for _, numbers in sorted(by_length.items()):
            groups: dict[Key, list[int]] = {}
            for number in numbers:
                run = self.runs[number]
                groups.setdefault((run.layer, run.occurrence % self.period), []).append(number)
            now: dict[int, tuple[np.ndarray, np.ndarray]] = {}
            for key, members in groups.items():
                starts = [self._start(number, before) for number in members]
                vectors = self._extended(key, np.stack([start for start, _ in starts], axis=1))
                peak = np.maximum(np.stack([peak for _, peak in starts]), self.peaks[key[0]])
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

    def _extended(self, key: Key, start: np.ndarray) -> np.ndarray:
        """One more layer of class ``key``: [8, runs, in states, rows] → [8, runs, out states, rows]."""
        table, quantities = self.tables[key]
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
        taken = quantities.reshape(5, -1).take(best, axis=1, mode="clip")
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
