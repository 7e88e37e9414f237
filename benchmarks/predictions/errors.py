"""How far predictions are from measurements: relative errors, their quantiles, and the agreement of two rankings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import sqrt
from typing import Any

__all__ = ["Summary", "kendall_tau", "quantile", "relative_error", "summarize"]


@dataclass(frozen=True)
class Summary:
    """Of ``count`` pairs: median and 90th percentile of the absolute relative errors, the median of the signed ones
    (positive: predicted too much), and Kendall's tau (None where there is nothing to rank)."""

    count: int
    median: float
    p90: float
    bias: float
    tau: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def relative_error(predicted: float, measured: float) -> float:
    """(predicted − measured) / measured."""
    return (predicted - measured) / measured


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the sorted values lie, linear between two neighbours; ValueError for none."""
    if not values:
        raise ValueError("a quantile needs at least one value, but got none; run a trial")
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Kendall's tau-b: (concordant − discordant pairs) over the geometric mean of the pairs untied on each side.

    None where one side has no two different values.
    """
    balance = untied_left = untied_right = 0
    for (a, b), (c, d) in combinations(zip(left, right, strict=True), 2):
        first, second = (a > c) - (a < c), (b > d) - (b < d)
        balance += first * second
        untied_left += first != 0
        untied_right += second != 0
    pairs = untied_left * untied_right
    return balance / sqrt(pairs) if pairs else None


def summarize(predicted: Sequence[float], measured: Sequence[float]) -> Summary:
    """The summary of the pairs; ValueError for none."""
    signed = [relative_error(p, m) for p, m in zip(predicted, measured, strict=True)]
    sizes = [abs(error) for error in signed]
    return Summary(
        len(signed),
        quantile(sizes, 0.5),
        quantile(sizes, 0.9),
        quantile(signed, 0.5),
        kendall_tau(predicted, measured),
    )
