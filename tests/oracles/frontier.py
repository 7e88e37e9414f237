"""Beginnings of a stage's document, pruned as it goes: of those with the same continuations only the ones that no other
undercuts stay."""

from __future__ import annotations

import numpy as np

__all__ = ["Frontier", "TooLarge"]

FORWARD, BACKWARD, ONCE, RESIDENT, SAVED, HELD, PEAK, LARGEST, WEIGHT = range(COLUMNS := 9)
MAX_ROWS = 1_500_000


class TooLarge(Exception):
    """The instance has more documents than this is meant for."""


class Frontier:
    """Rows are beginnings: what each costs (``values``) and what its continuation may depend on (``columns``)."""

    def __init__(self, what: str, split: bool, limited: bool) -> None:
        self.what, self.split, self.limited = what, split, limited
        self.columns: dict[str, np.ndarray] = {}
        self.values = np.zeros((1, COLUMNS))
        self.trail: list[tuple[np.ndarray, str, np.ndarray]] = []  # (row before, what is decided, choice)

    def cross(self, count: int, label: str) -> np.ndarray:
        """Every row with each of ``count`` choices; the choice of each new row."""
        rows = len(self.values)
        if rows * count > MAX_ROWS:
            raise TooLarge(f"{rows * count:,} beginnings of {self.what}")
        before, pick = np.repeat(np.arange(rows), count), np.tile(np.arange(count), rows)
        self.take(before, label, pick)
        return pick

    def take(self, rows: np.ndarray, label: str = "", pick: np.ndarray | None = None) -> None:
        self.values = self.values[rows]
        self.columns = {name: column[rows] for name, column in self.columns.items()}
        self.trail.append((rows, label, np.zeros(len(rows), int) if pick is None else pick))

    def keep(self, mask: np.ndarray) -> None:
        if not mask.all():
            self.take(np.flatnonzero(mask))

    def prune(self) -> None:
        """Of rows with equal columns those that no other undercuts; most of them, which is enough."""
        finite = np.isfinite(self.values).all(axis=1)
        self.keep(finite)
        if not len(self.values):
            return
        group, value = self._groups(), self.compared(self.values)
        scale = np.maximum(value.max(axis=0), 1e-300)
        order = np.lexsort(((value / scale).sum(axis=1), group))
        alive = np.ones(len(order), bool)
        group, value = group[order], value[order]
        shift, quiet = 1, 0
        while shift < len(order) and quiet < 8 and shift < 64:
            same = group[shift:] == group[:-shift]
            if not same.any():
                break
            worse = same & (value[shift:] >= value[:-shift] * (1 - 1e-13)).all(axis=1)
            dead = worse & alive[shift:]
            alive[shift:] &= ~worse
            quiet = 0 if dead.any() else quiet + 1
            shift += 1
        self.take(order[alive])

    def compared(self, values: np.ndarray) -> np.ndarray:
        """What a row must not have more of than another that it undercuts: the clock grows with each."""
        columns = [values[:, FORWARD], values[:, BACKWARD], values[:, ONCE]]
        if self.split:
            columns[1:2] = [values[:, BACKWARD] - values[:, WEIGHT], values[:, WEIGHT]]
        if self.limited:
            columns += [values[:, one] for one in (RESIDENT, SAVED, HELD, PEAK, LARGEST)]
        return np.stack(columns, axis=1)

    def _groups(self) -> np.ndarray:
        """A number per row, equal where all columns are."""
        key = np.zeros(len(self.values), np.int64)
        for column in self.columns.values():
            low, high = int(column.min()), int(column.max())
            if low == high:
                continue
            if int(key.max()) * (high - low + 1) >= 2**62:
                key = np.unique(key, return_inverse=True)[1].reshape(-1).astype(np.int64)
            if high - low > 2**20:  # a mask of many pairs
                column, low, high = np.unique(column, return_inverse=True)[1].reshape(-1), 0, len(column)
            key = key * (high - low + 1) + (column - low)
        return key

    def chosen(self, row: int) -> dict[str, int]:
        """What was decided for the part in this row."""
        found = {}
        for before, label, pick in reversed(self.trail):
            if label:
                found[label] = int(pick[row])
            row = int(before[row])
        return found
