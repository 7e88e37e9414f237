"""Mixtures of levels: which are worth composing (``batch_runs``) for stages that memory binds.

A stage with q microbatches in flight has at each level a point (bytes, seconds). Where the fastest level that fits
leaves memory unused, equal layers that partly take a faster one fill it. A mixture's point lies about on the chord
between the points of its two levels; what it gains in a stage is the seconds saved against the best level that fits.
Stages that count are those that a pipeline better than the best so far may be made of: they hold about as large a share
of the work as of the devices, and their microbatches fit into its time. Mixtures are taken greedily by the gain that
they add over all those stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .batch_runs import PERIOD

__all__ = ["Mixture", "Points", "Price", "promising"]

_SHARES = 0.8, 1.5  # of the work, per share of the devices, of a stage that counts
_FLIGHTS = 0.5, 0.75, 1.0  # per stages of this size that follow: how many microbatches a stage may hold
_LEAST = 0.01  # of a stage's seconds, that a mixture must gain on average over the stages that count for something


class Mixture(NamedTuple):
    """``level`` for ``share`` of ``PERIOD`` equal layers, ``other`` for the rest."""

    level: int
    other: int
    share: int


Price = int | Mixture  # of a byte: the number of a level, or two


@dataclass(frozen=True, eq=False)
class Points:
    """Stages of one submesh at some levels: arrays [levels, stages]; seconds are inf where a stage is impossible.

    flights [stages]: microbatches in flight.
    """

    seconds: np.ndarray
    resident: np.ndarray
    saved: np.ndarray
    transient: np.ndarray
    flights: np.ndarray

    @property
    def bytes(self) -> np.ndarray:
        """[levels, stages] what the stages hold."""
        return self.resident + self.flights * self.saved + self.transient


def stages_that_count(
    work: np.ndarray, classes: Sequence[str], device_share: float, m: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first, end, microbatches in flight) of stages for this share of the devices that hold several layers of a class;
    work: [L, L + 1] of each run; classes: of the layers."""
    share = np.triu(work / work[0, -1], 1)
    first, end = np.nonzero((share >= _SHARES[0] * device_share) & (share <= _SHARES[1] * device_share))
    several = [len(set(classes[i:j])) < j - i for i, j in zip(first.tolist(), end.tolist())]
    first, end = first[several], end[several]
    after = (work[first, -1] / work[first, end])[None] * np.array(_FLIGHTS)[:, None]
    flights = np.clip(np.ceil(after), 1, m).reshape(-1)
    return np.tile(first, len(_FLIGHTS)), np.tile(end, len(_FLIGHTS)), flights


def promising(levels: Sequence[int], points: Points, limit: float, most: float, num: int) -> list[Mixture]:
    """At most ``num`` mixtures of ``levels``, best first; most: seconds of a microbatch that no stage may take."""
    used, seconds = points.bytes, points.seconds
    pure = np.where(used <= limit, seconds, np.inf).min(axis=0)
    pairs = [(a, b) for a in range(len(levels)) for b in range(len(levels)) if a != b]
    shares = np.arange(1, PERIOD)[:, None] / PERIOD
    gains, names = [], []
    for a, b in pairs:
        mixed = shares * seconds[a] + (1 - shares) * seconds[b]
        fits = (shares * used[a] + (1 - shares) * used[b] <= limit) & (mixed < most)
        gains.append(np.where(fits, np.maximum(np.minimum(pure, most) / mixed - 1.0, 0.0), 0.0))
        names += [Mixture(levels[a], levels[b], share) for share in range(1, PERIOD)]
    return _greedy(np.concatenate(gains), names, num) if gains else []


def _greedy(gains: np.ndarray, names: Sequence[Mixture], num: int) -> list[Mixture]:
    """Those that together gain most: gains [mixtures, stages], of which each stage has the largest of those taken."""
    taken = []
    gains = gains[:, gains.max(axis=0) > 0]
    for _ in range(num):
        total = gains.sum(axis=1)
        best = int(total.argmax()) if len(total) else 0
        if not gains.size or total[best] < _LEAST * gains.shape[1]:
            break
        taken.append(names[best])
        gains = np.maximum(gains - gains[best], 0.0)
    return taken
