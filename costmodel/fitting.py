"""Fits of measured times: a line, a line in pieces, and two rates at once. No constant is ever negative.

Each fit minimises relative errors with Huber weights, so that one disturbed size does not bend it, and so that a
microsecond counts at 1 KB as a millisecond does at 1 MB::

    line      seconds = alpha_s + beta_s_per_byte · bytes                          ``two_rates`` with rows (1, bytes)
    pieces    at most four lines, each over an interval of sizes, and one beyond   ``fit_pieces``
    optimizer seconds = alpha_s · tensors + beta_s_per_byte · bytes                ``fit_optimizer``

The breaks of the pieces are the exact optimum over all splits of the sizes (dynamic programming over at most a few
dozen sizes). One piece is kept if its errors are within ``TOLERANCE``; a further one has to earn its place. Where the
last line is flatter than its points and those of the line before rise on the whole (a disturbed size does that), larger
messages than were measured get a piece that rises so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from statistics import median

from .measured import CodingRate, CollectiveMeasurement, OptimizerRate, Piece

__all__ = ["TOLERANCE", "fit_optimizer", "fit_pieces", "fit_wire", "rising", "two_rates"]

TOLERANCE = 0.10  # relative error that a fit may leave: between two profiles of one machine times differ by as much
_WORST = 0.25  # no piece may be further off than this at its worst size but one
_EARNS = 0.8  # a further piece has to bring the errors down to this share
MOST_PIECES = 4

Points = Sequence[tuple[float, float]]


def two_rates(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b) >= 0 of t ≈ a·x + b·y for the rows (x, y, t), by robust relative least squares."""
    weights = [1.0] * len(rows)
    a = b = 0.0
    for _ in range(30):
        w = [weight / (t * t) for weight, (_, _, t) in zip(weights, rows)]
        xx = sum(wi * x * x for wi, (x, _, _) in zip(w, rows))
        xy = sum(wi * x * y for wi, (x, y, _) in zip(w, rows))
        yy = sum(wi * y * y for wi, (_, y, _) in zip(w, rows))
        xt = sum(wi * x * t for wi, (x, _, t) in zip(w, rows))
        yt = sum(wi * y * t for wi, (_, y, t) in zip(w, rows))
        determinant = xx * yy - xy * xy
        if determinant > 1e-12 * xx * yy:
            a, b = (xt * yy - yt * xy) / determinant, (xx * yt - xy * xt) / determinant
        else:  # one direction only: all on the first rate
            a, b = (xt / xx, 0.0) if xx else (0.0, yt / yy)
        if a < 0:
            a, b = 0.0, max(yt / yy, 0.0)
        elif b < 0:
            a, b = max(xt / xx, 0.0), 0.0
        errors = [abs(a * x + b * y - t) / t for x, y, t in rows]
        scale = max(1.5 * sorted(errors)[len(errors) // 2], 1e-3)
        weights = [min(1.0, scale / e) if e else 1.0 for e in errors]
    return a, b


def rising(points: Points) -> list[tuple[float, float]]:
    """Sorted, and more work never takes less time: a point that was disturbed upwards is pulled down to the next larger
    one's time."""
    out: list[tuple[float, float]] = []
    for work, seconds in sorted(points, reverse=True):
        out.append((work, min(seconds, out[-1][1]) if out else seconds))
    return out[::-1]


def fit_pieces(points: Points) -> tuple[tuple[Piece, ...], float]:
    """(pieces, median relative error at the points) for (bytes, seconds) points of distinct sizes.

    Raises ValueError on fewer than two sizes or a point that is not a positive finite time.
    """
    for size, seconds in points:
        if not (isfinite(size) and size >= 0 and isfinite(seconds) and seconds > 0):
            raise ValueError(
                f"a sample is (bytes >= 0, seconds > 0), but got ({size}, {seconds}); measure that size again"
            )
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"a fit needs two message sizes, but got {len(points)}; measure more sizes")
    smooth = rising(points)
    best = _Best(smooth)
    chosen = best.split(1)
    for count in range(2, min(MOST_PIECES, len(smooth) // 2) + 1):
        if _good(best.errors(chosen)):
            break
        further = best.split(count)
        if _loss(best.errors(further)) <= _EARNS * _loss(best.errors(chosen)):
            chosen = further
    pieces = _joined(smooth, [(start, *best.line(start, stop)) for start, stop in chosen])
    pieces += _beyond(pieces[-1], smooth[chosen[-2:][0][0] :])
    errors = [abs(_at(pieces, size) - seconds) / seconds for size, seconds in points]
    return pieces, median(errors)


def _good(errors: Sequence[float]) -> bool:
    ordered = sorted(errors)
    return ordered[len(ordered) // 2] <= TOLERANCE and ordered[max(len(ordered) - 2, 0)] <= _WORST


def _loss(errors: Sequence[float]) -> float:
    return sqrt(sum(min(error, 1.0) ** 2 for error in errors) / len(errors))


class _Best:
    """The best split of sorted points into a number of runs of at least two, each with its own line."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self._lines: dict[tuple[int, int], tuple[float, float]] = {}
        self._splits: dict[tuple[int, int], tuple[float, tuple[tuple[int, int], ...]]] = {}

    def line(self, start: int, stop: int) -> tuple[float, float]:
        if (start, stop) not in self._lines:
            self._lines[start, stop] = two_rates([(1.0, x, t) for x, t in self.points[start:stop]])
        return self._lines[start, stop]

    def errors(self, runs: Sequence[tuple[int, int]]) -> list[float]:
        return [
            abs(self.line(start, stop)[0] + self.line(start, stop)[1] * x - t) / t
            for start, stop in runs
            for x, t in self.points[start:stop]
        ]

    def split(self, count: int) -> tuple[tuple[int, int], ...]:
        return self._upto(len(self.points), count)[1]

    def _upto(self, stop: int, count: int) -> tuple[float, tuple[tuple[int, int], ...]]:
        """(sum of squared errors, runs) over the points before ``stop``."""
        if (stop, count) not in self._splits:
            found: tuple[float, tuple[tuple[int, int], ...]]
            if count == 1:
                found = (self._cost(0, stop), ((0, stop),))
            else:
                found = min(
                    (before + self._cost(start, stop), (*runs, (start, stop)))
                    for start in range(2 * (count - 1), stop - 1)
                    for before, runs in [self._upto(start, count - 1)]
                )
            self._splits[stop, count] = found
        return self._splits[stop, count]

    def _cost(self, start: int, stop: int) -> float:
        return sum(min(error, 1.0) ** 2 for error in self.errors([(start, stop)]))


def _joined(points: Points, lines: Sequence[tuple[int, float, float]]) -> tuple[Piece, ...]:
    """Pieces from (first point, alpha, beta): they change where their lines meet, if that is between the two sizes,
    else halfway in log space; and a later one never starts below where the former ends."""
    pieces: list[Piece] = []
    for start, alpha, beta in lines:
        if not pieces:
            pieces.append(Piece(0.0, alpha, beta))
            continue
        last, low, high = pieces[-1], points[start - 1][0], points[start][0]
        meet = (alpha - last.alpha_s) / (last.beta_s_per_byte - beta) if beta != last.beta_s_per_byte else -1.0
        at = meet if low < meet < high else sqrt(max(low, 1.0) * high)
        fall = last.alpha_s + last.beta_s_per_byte * at - (alpha + beta * at)
        pieces.append(Piece(at, alpha + max(fall, 0.0), beta))
    return tuple(pieces)


def _beyond(last: Piece, points: Points) -> tuple[Piece, ...]:
    """A piece for messages larger than the largest of ``points``, those of the last line and of the one before, if the
    last line is flatter than they rise on the whole; it begins where that line ends."""
    (first_size, first_s), (size, seconds) = points[0], points[-1]
    end_s = last.alpha_s + last.beta_s_per_byte * size
    rise = min((seconds - first_s) / (size - first_size), end_s / size)  # no more than in proportion: alpha >= 0
    if last.beta_s_per_byte >= (1 - 2 * TOLERANCE) * rise:  # two times of one line differ by as much
        return ()
    return (Piece(size, max(end_s - rise * size, 0.0), rise),)


def _at(pieces: Sequence[Piece], nbytes: float) -> float:
    piece = [p for p in pieces if p.from_bytes <= nbytes][-1]
    return piece.alpha_s + piece.beta_s_per_byte * nbytes


def fit_wire(
    kind: str, size: int, members: int, groups: int, measured: Mapping[float, float], samples: int, algorithm: str
) -> CollectiveMeasurement:
    """The Wire of one collective on one form of group from {bytes: median seconds}."""
    pieces, residual = fit_pieces(sorted(measured.items()))
    points = tuple(rising(list(measured.items())))
    return CollectiveMeasurement(kind, algorithm, size, members, groups, pieces, points, residual, samples)


def fit_optimizer(name: str, rows: Sequence[tuple[float, float, float]], samples: int) -> OptimizerRate:
    """The OptimizerRate from (tensors, bytes, seconds of one step) rows; ValueError on fewer than two of them."""
    if len(rows) < 2:
        raise ValueError(f"the rate of {name} needs two measurements, but got {len(rows)}; measure more")
    alpha, beta = two_rates(rows)
    residual = median(abs(alpha * x + beta * y - t) / t for x, y, t in rows)
    return OptimizerRate(name, alpha, beta, residual, samples)


def fit_coding(name: str, rows: Sequence[tuple[float, float]], samples: int) -> CodingRate:
    """The CodingRate from (elements, seconds of one sum) rows; ValueError on fewer than two of them."""
    if len(rows) < 2:
        raise ValueError(f"the rate of code {name} needs two measurements, but got {len(rows)}; measure more")
    alpha, beta = two_rates([(1.0, n, seconds) for n, seconds in rows])
    residual = median(abs(alpha + beta * n - t) / t for n, t in rows)
    return CodingRate(name, alpha, beta, residual, samples)
