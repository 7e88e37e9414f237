"""Runs of layers, and the min-plus products of all of them at once (``batch_compose``).

A run depends on its sequence of layer classes and on its borders alone: id(i, j + 1) = cons(id(i, j), class of layer j,
border j + 1), and equal sequences are one run.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .batch_eliminate import Running

__all__ = ["Composition", "Row", "Run", "Taken", "floors_of", "runs_of"]

Row = tuple[int, int]  # (variant, level)
Taken = tuple[np.ndarray, np.ndarray]  # cost [in, out, rows]; pace, step, resident, saved, transient [5, in, out, rows]


@dataclass(frozen=True)
class Run:
    """A run of layers: the one that it extends by a layer (−1: none), that layer's class, and the first interval
    that it is."""

    before: int
    layer: str
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
        for last in range(first, len(classes)):
            layer = classes[last]
            key = before, start, layer, borders_at[last + 1]
            if key not in ids:
                ids[key] = len(runs)
                runs.append(Run(before, layer, first, last, last - first + 1))
            before = index[first, last + 1] = ids[key]
            start = -1  # the runs before say where they start
    return runs, index


def floors_of(runs: Sequence[Run], tables: Mapping[str, np.ndarray], actions: np.ndarray) -> np.ndarray:
    """[runs, rows]: the least sum of each run's layers and of a stage's actions [rows], whatever its borders' states.
    tables: by class, [in states, out states, rows]."""
    found = np.empty((len(runs), len(actions)))
    by_length: dict[int, dict[str, list[int]]] = {}
    for number, run in enumerate(runs):
        by_length.setdefault(run.length, {}).setdefault(run.layer, []).append(number)
    before: dict[int, np.ndarray] = {}
    for _, groups in sorted(by_length.items()):
        now: dict[int, np.ndarray] = {}
        for layer, members in groups.items():
            table = tables[layer]
            ahead = [before[runs[n].before] if runs[n].before >= 0 else np.zeros(table.shape[::2]) for n in members]
            start = np.stack(ahead, axis=1)  # [in states, runs, rows]
            least = start[0][:, None] + table[0]
            total = np.empty_like(least)
            for state in range(1, len(table)):
                np.minimum(least, np.add(start[state][:, None], table[state], out=total), out=least)
            found[members] = least.min(axis=1) + actions
            now |= {number: least[place] for place, number in enumerate(members)}
        before = now
    return found


class Composition:
    """The min-plus products of all runs, for some rows: arrays [runs, states, rows].

    tables: by class; borders: by border, entry and exit seconds [states, cases];
    actions [cases]; peaks: by class, [cases]; variant [rows]: which case each row is of.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        tables: Mapping[str, Taken],
        borders: Mapping[int, tuple[np.ndarray, np.ndarray]],
        actions: np.ndarray,
        peaks: Mapping[str, np.ndarray],
        variant: np.ndarray,
    ) -> None:
        self.runs, self.tables, self.borders, self.variant = runs, tables, borders, variant
        self.actions, self.peaks = actions[variant], {key: peak[variant] for key, peak in peaks.items()}
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
                groups.setdefault(self.runs[number].layer, []).append(number)
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
