"""Measured op times as functions of their work: a Curve over FLOPs or bytes, a Surface over the three sizes of a
matmul.

Both are read by interpolation in log space inside their grid. Outside it the last measured rate holds above, and below
the time falls in proportion down to a launch; ``compute`` guards that with the roofline. Times of the direction
"backward" are those of the whole backward pass, all gradients, against the work of the *forward*.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import exp, isfinite, log, prod
from typing import Any

import numpy as np

__all__ = ["DIRECTIONS", "Curve", "Surface", "curve_from", "surface_from"]

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured time of one op kind, dtype and direction: ``points`` are (work, seconds), increasing; ``variable`` is
    "flops" or "bytes"."""

    kind: str
    dtype: str
    variable: str
    points: tuple[tuple[float, float], ...]
    direction: str = "forward"

    def __post_init__(self) -> None:
        where = f"curve {self.kind}/{self.dtype}/{self.direction}"
        if self.variable not in ("flops", "bytes"):
            raise ValueError(f"{where}: variable is 'flops' or 'bytes', but got {self.variable!r}; correct it")
        _check_direction(where, self.direction)
        if len(self.points) < 2:
            raise ValueError(f"{where}: needs at least two points, but got {len(self.points)}; profile again")
        if not all(isfinite(v) and v > 0 for point in self.points for v in point):
            raise ValueError(
                f"{where}: work and seconds are positive finite numbers, but got {self.points}; profile again"
            )
        for (x0, t0), (x1, t1) in pairwise(self.points):
            if x1 <= x0 or t1 < t0:
                raise ValueError(
                    f"{where}: work and seconds must not fall, but got {(x0, t0)} then {(x1, t1)}; profile again"
                )

    def covers(self, work: float) -> bool:
        """True if ``work`` lies on the measured grid."""
        return self.points[0][0] <= work <= self.points[-1][0]

    def seconds(self, work: float, launch_s: float) -> float:
        """Interpolated in log space; below the grid it falls in proportion down to ``launch_s``, above it the last rate
        holds."""
        (low, first), (high, last) = self.points[0], self.points[-1]
        if work >= high:
            return last * work / high
        if work <= low:
            floor = min(launch_s, first)
            return floor + (first - floor) * work / low
        right = bisect_left(self.points, (work, 0.0))
        (x0, t0), (x1, t1) = self.points[right - 1], self.points[right]
        return exp(log(t0) + (log(t1) - log(t0)) * (log(work) - log(x0)) / (log(x1) - log(x0)))

    def covers_many(self, work: np.ndarray) -> np.ndarray:
        """``covers`` of every element."""
        return (work >= self.points[0][0]) & (work <= self.points[-1][0])

    def seconds_many(self, work: np.ndarray, launch_s: float) -> np.ndarray:
        """``seconds`` of every element, all positive; same shape."""
        (low, first), (high, last) = self.points[0], self.points[-1]
        x, y = np.log(np.array(self.points)).T
        inside = np.exp(np.interp(np.log(np.clip(work, low, high)), x, y))
        floor = min(launch_s, first)
        below = floor + (first - floor) * work / low
        return np.where(work >= high, last * work / high, np.where(work <= low, below, inside))


@dataclass(frozen=True, slots=True)
class Surface:
    """Measured time of [rows, inner] @ [inner, cols] on a full grid, for one op kind, dtype and direction.

    rows counts the rows of all batches together. ``rows``, ``inner``, ``cols``: the grid lines, increasing;
    ``seconds``: one time per grid point, row-major, cols fastest.
    """

    kind: str
    dtype: str
    rows: tuple[float, ...]
    inner: tuple[float, ...]
    cols: tuple[float, ...]
    seconds: tuple[float, ...]
    direction: str = "forward"

    def __post_init__(self) -> None:
        where = f"surface {self.kind}/{self.dtype}/{self.direction}"
        _check_direction(where, self.direction)
        for name in ("rows", "inner", "cols"):
            lines = getattr(self, name)
            rising = all(a < b for a, b in pairwise(lines))
            if not lines or not rising or not (lines[0] > 0 and isfinite(lines[-1])):
                raise ValueError(f"{where}: {name} are positive and rising, but got {lines}; profile again")
        count = len(self.rows) * len(self.inner) * len(self.cols)
        if len(self.seconds) != count:
            raise ValueError(
                f"{where}: has {count} grid points, but got {len(self.seconds)} seconds; fill the grid or drop a line"
            )
        for at, seconds in enumerate(self.seconds):
            if not (isfinite(seconds) and seconds > 0):
                raise ValueError(f"{where}: seconds are positive and finite, but got {seconds} at {at}; profile again")

    def covers(self, rows: float, inner: float, cols: float) -> bool:
        """True if the three sizes lie on the measured grid."""
        sizes = zip((self.rows, self.inner, self.cols), (rows, inner, cols))
        return all(lines[0] <= size <= lines[-1] for lines, size in sizes)

    def at(self, rows: float, inner: float, cols: float, launch_s: float) -> float:
        """Seconds: multilinear in log space; outside the grid the nearest point of it, in proportion to the work."""
        above = below = 1.0
        corners: list[tuple[tuple[int, float], ...]] = []
        for lines, size in zip((self.rows, self.inner, self.cols), (rows, inner, cols)):
            above *= max(1.0, size / lines[-1])
            below *= min(1.0, size / lines[0])
            corners.append(_between(lines, size))
        total = 0.0
        for (i, a), (j, b), (k, c) in product(*corners):
            if weight := a * b * c:
                total += weight * log(self.seconds[(i * len(self.inner) + j) * len(self.cols) + k])
        nearest = exp(total)
        floor = min(launch_s, nearest)
        return (floor + (nearest - floor) * below) * above

    def covers_many(self, rows: np.ndarray, inner: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """``covers`` of every element."""
        sizes = zip((self.rows, self.inner, self.cols), (rows, inner, cols))
        inside = [(size >= lines[0]) & (size <= lines[-1]) for lines, size in sizes]
        return inside[0] & inside[1] & inside[2]

    def at_many(self, rows: np.ndarray, inner: np.ndarray, cols: np.ndarray, launch_s: float) -> np.ndarray:
        """``at`` for arrays of equal shape, all positive."""
        above = below = np.ones(np.shape(rows))
        ends: list[tuple[np.ndarray, np.ndarray]] = []  # (the grid line below or at the size, share of the next)
        for lines, size in zip((self.rows, self.inner, self.cols), (rows, inner, cols)):
            above = above * np.maximum(1.0, size / lines[-1])
            below = below * np.minimum(1.0, size / lines[0])
            place = np.interp(np.log(size), np.log(lines), np.arange(len(lines)))
            line = np.minimum(place.astype(np.int64), max(len(lines) - 2, 0))
            ends.append((line, place - line))
        grid = np.log(np.array(self.seconds)).reshape(len(self.rows), len(self.inner), len(self.cols))
        total = np.zeros(np.shape(rows))
        for corner in product((0, 1), repeat=3):
            weight, index = np.ones(np.shape(rows)), []
            for (line, share), step, lines in zip(ends, corner, (self.rows, self.inner, self.cols)):
                weight = weight * (share if step else 1.0 - share)
                index.append(np.minimum(line + step, len(lines) - 1))
            total += weight * grid[tuple(index)]
        nearest = np.exp(total)
        floor = np.minimum(launch_s, nearest)
        return (floor + (nearest - floor) * below) * above

    @staticmethod
    def sizes(flops: float, output: Sequence[int]) -> tuple[float, float, float]:
        """(rows, inner, cols) of a matmul from its output shape, batch dims first, and its FLOPs (two per
        multiply-add)."""
        cols = float(output[-1]) if output else 1.0
        rows = float(prod(output[:-1]))
        return rows, flops / (2 * rows * cols) if rows and cols else 0.0, cols


def _between(lines: Sequence[float], size: float) -> tuple[tuple[int, float], ...]:
    """The one or two neighbouring grid lines of ``size`` with their weights."""
    if size <= lines[0]:
        return ((0, 1.0),)
    if size >= lines[-1]:
        return ((len(lines) - 1, 1.0),)
    right = bisect_left(lines, size)
    share = log(size / lines[right - 1]) / log(lines[right] / lines[right - 1])
    return ((right - 1, 1.0 - share), (right, share))


def _check_direction(where: str, direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f"{where}: direction is forward or backward, but got {direction!r}; correct it")


def curve_from(entry: Mapping[str, Any]) -> Curve:
    """A Curve from its JSON object."""
    points = tuple((float(work), float(seconds)) for work, seconds in entry["points"])
    direction = str(entry.get("direction", "forward"))
    return Curve(str(entry["kind"]), str(entry["dtype"]), str(entry["variable"]), points, direction)


def surface_from(entry: Mapping[str, Any]) -> Surface:
    """A Surface from its JSON object."""
    rows, inner, cols, seconds = (tuple(float(v) for v in entry[name]) for name in ("rows", "inner", "cols", "seconds"))
    direction = str(entry.get("direction", "forward"))
    return Surface(str(entry["kind"]), str(entry["dtype"]), rows, inner, cols, seconds, direction)
