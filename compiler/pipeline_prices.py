"""What the recurrences of ``pipeline_arcs`` add up: a table's numbers per (row, pair of layers) as heads and fills.

``Prices.path`` makes W, ``latency`` T and ``excess`` the bytes over the limit (``pipeline_dp`` says what these are).
``turn_lines`` are what ``pipeline_bound`` proves of one pipeline beyond W.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from .asynchronous import PIPEDREAM
from .pipeline_arcs import Rows
from .pipeline_table import Floats, Ints, PipelineTable

__all__ = ["Prices", "fill_share", "turn_lines"]


def fill_share(schedule: str, forward_share: Floats | float, input_share: Floats | float) -> Floats | float:
    """The part of a stage's pace by which it delays the others: f + max(0, b_input − b_weight) under zb-h1, else 1."""
    if not schedule.startswith("zb"):
        return 1.0
    return forward_share + np.maximum(0.0, 2.0 * input_share + forward_share - 1.0)


def turn_lines(
    schedule: str, m: int, q: int, left: int, way: tuple[Floats, Floats, Floats, Floats]
) -> list[tuple[float, Floats]]:
    """The lines (``pipeline_arcs``) of a stage with q microbatches in flight and ``left`` stages left, for ``way`` =
    (trip: its part of a microbatch's way there and back, rest: that with the message behind it, once: what its fill
    counts beside, head). With R the way behind: ⌈m/q⌉ (rest + R) and (m − q + 1) trip + 2 (rest − trip + R); under
    GPipe the way of one microbatch, and all the others' work."""
    trip, rest, once, head = way
    if schedule == "gpipe":
        return [(1.0, rest + head - trip)]
    q = min(q, left)
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
        self._latency = m * self.pace - through, fill
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
        """What the constants of ``turns`` grow with, beside head and fill."""
        trip, rest, _ = self._way
        return trip, rest - trip if self.schedule == "gpipe" else rest

    def latency(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats]:
        """T: every stage's fill e + t + x, and one more head (m − 1) t."""
        head, fill = self._latency
        return np.where(self._fits(q, row, pair), head[row, pair], inf), fill[row, pair]

    def excess(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats]:
        """Bytes over the limit, where the stage can run at all; no fills."""
        over = self.base[row, pair] + q * self.saved[row, pair] - self.limit[row, pair]
        head = np.where(np.isfinite(self.pace[row, pair]), np.maximum(over, 0.0), inf)
        return head, np.zeros_like(head)
