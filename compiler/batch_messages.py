"""Prices of messages in many cases side by side, and conversions as sums of them.

A step of a conversion costs what its collective takes for n / divisor[mask] bytes along its axis (``variants``), so a
conversion is a sum of *terms* (kind, axis, mask), at most 4·axes·2^axes and one for copies. The terms of a spec pair
depend on no tensor, their prices on no spec:

    seconds[v, s, t] = prices[v, terms] · counts[terms, s·t]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np

from .reshard import FREE, steps_between
from .spec import Spec
from .variants import cut_mask

__all__ = ["KINDS", "Offers", "Tariff", "conversion_counts", "num_terms"]

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
Offers = Sequence[Sequence[tuple[float, float, float]]]  # ``AxisPrice.pieces_of``


class Tariff:
    """Prices of one kind of message in every case: offers [num_offers, num_pieces, num] of (from_bytes, a, b)."""

    def __init__(self, offers: Sequence[Offers | None]) -> None:
        """offers: per case its offers, each its pieces; None where messages cost nothing."""
        most = max((len(one) for one in offers if one), default=1)
        pieces = max((len(piece) for one in offers if one for piece in one), default=1)
        self.parts = np.zeros((3, most, pieces, len(offers)))
        self.parts[0, :, 1:], self.parts[1] = np.inf, np.inf
        for v, one in enumerate(offers):
            if one is None:
                self.parts[1, :, :, v] = 0.0
            for w, price in enumerate(one or ()):
                for k, piece in enumerate(price):
                    self.parts[:, w, k, v] = piece

    def seconds(self, nbytes: np.ndarray) -> np.ndarray:
        """Seconds for ``nbytes`` [num, …]; nothing for no bytes."""
        shape = (-1,) + (1,) * (nbytes.ndim - 1)
        best: np.ndarray | None = None
        for w in range(self.parts.shape[1]):
            start, a, b = self.parts[:, w].reshape(3, self.parts.shape[2], *shape)
            seconds = a[0] + b[0] * nbytes
            for k in range(1, len(start)):
                seconds = np.where(nbytes >= start[k], a[k] + b[k] * nbytes, seconds)
            best = seconds if best is None else np.minimum(best, seconds)
        assert best is not None
        found: np.ndarray = np.where(nbytes == 0, 0.0, best)
        return found

    def least_rate(self, smallest: np.ndarray, largest: np.ndarray) -> np.ndarray:
        """[num] the least seconds per byte of any message of ``smallest`` to ``largest`` [num] bytes."""
        start, a, b = self.parts
        end = np.concatenate([start[:, 1:], np.full_like(start[:, :1], np.inf)], axis=1)
        within = (start <= largest) & (smallest < end)
        found: np.ndarray = np.where(within, a / np.minimum(end, largest) + b, np.inf).min(axis=(0, 1))
        return found


# ---- what conversions consist of


def num_terms(axes: int) -> int:
    """How many terms there are on a mesh: steps that communicate by kind, axis and cuts, and copies last."""
    return len(KINDS) * axes * (1 << axes) + 1


@lru_cache(maxsize=4096)
def conversion_counts(
    sources: tuple[Spec, ...], targets: tuple[Spec, ...]
) -> tuple[np.ndarray, np.ndarray, int | None]:
    """(how often each term stands in each way to convert [terms, ways], which way each conversion goes [sources ·
    targets], the way of those that do not exist, None if all do)."""
    ways: dict[tuple[int, ...] | None, int] = {}
    which = np.array([ways.setdefault(_terms(s, t), len(ways)) for s in sources for t in targets], dtype=np.intp)
    counts = np.zeros((num_terms(len(sources[0])), len(ways)))
    for terms, way in ways.items():
        for term in terms or ():
            counts[term, way] += 1
    return counts, which, ways.get(None)


@cache
def _terms(source: Spec, target: Spec) -> tuple[int, ...] | None:
    """The terms of one conversion: for each step (kind, axis, mask of the axes that cut what it moves)."""
    if source == target:
        return ()
    try:
        steps = steps_between(source, target)
    except ValueError:
        return None
    axes, mask, out = len(source), cut_mask(source), []
    for step in steps:
        bit, before = 1 << step.axis, mask
        if step.kind in ("slice", "reduce_scatter"):
            mask |= bit
        elif step.kind in ("all_gather", "pad"):
            mask &= ~bit
        if step.kind in FREE:
            out.append(num_terms(axes) - 1)
        else:
            kind = KINDS.index(step.kind.removesuffix("_max"))
            out.append(((kind * axes) + step.axis) * (1 << axes) + (before & mask))
    return tuple(out)
