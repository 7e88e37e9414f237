"""Fewer choices, where the elimination of a problem would be too wide: those that good decisions use.

Exact elimination of the rest finds the best of all combinations of the choices that stay ("fusion" of the decisions
that proposed them), so what it finds is a decision that really exists, at its true cost.

1. ``proposals``: the relaxation (``elimination_order.plan_relaxation``) is walked back in some rows, in the best cells
   of each; a choice scores by the cells whose walk has it.
2. ``reduced_elimination``: as long as the elimination is too wide, the operators that make it so lose the quarter of
   their choices that scores least; those of the best cell of every row go last.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from ...errors import TooWide
from .elimination_order import Limits, Recipe, plan_elimination, plan_relaxation
from .presolve import TensorEdges
from .vectorised_elimination import EliminatedRows

__all__ = ["proposals", "reduced_elimination"]

_KEPT = 4  # times the cells of the result are allowed in any case
_BEST = 1e6  # the score of a choice in the best cell of a row …
_NEEDED = 1e9  # … and of one without which a case may have none


def proposals(chunk: EliminatedRows) -> list[np.ndarray]:
    """Per operator the scores of its (alive) choices: the best ways out for each way in, and in for each way out, of
    all rows."""
    cost = chunk.cost  # [in, out, rows]
    num_in, num_out, num_rows = cost.shape
    rows = np.arange(num_rows)
    flat = cost.reshape(-1, num_rows).argmin(axis=0)
    cells = [(flat // num_out, flat % num_out, rows)]
    cells += [(np.full(num_rows, i), cost[i].argmin(axis=0), rows) for i in range(num_in)]
    cells += [(cost[:, j].argmin(axis=0), np.full(num_rows, j), rows) for j in range(num_out)]
    into, out, row = (np.concatenate(parts) for parts in zip(*cells))
    possible = np.isfinite(cost[into, out, row])
    best = possible & (np.arange(len(row)) < num_rows)
    scores = []
    for alive, choices in zip(chunk.recipe.alive, chunk.walk([into, out], row)):
        place = np.searchsorted(alive, choices)
        counts = np.bincount(place, possible, minlength=len(alive))
        counts[place[best]] += _BEST
        scores.append(counts)
    return scores


def reduced_elimination(
    alive: Sequence[np.ndarray],
    links: Sequence[TensorEdges],
    keep: Sequence[int],
    scores: Sequence[np.ndarray],
    possible: Sequence[np.ndarray],
    limits: Limits,
) -> Recipe:
    """The recipe over the choices that stay; ``keep`` lose none. possible: bool [choices, cases] per operator; of what
    is possible in a case the best goes last of all."""
    scores = [score + _covers(score, where) * _NEEDED for score, where in zip(scores, possible)]
    masks = [np.ones(len(choices), dtype=bool) for choices in alive]
    limits = replace(limits, max_cells=max(limits.max_cells, _KEPT * math.prod(len(alive[i]) for i in keep)))
    orders: Sequence[int] | None = None
    while True:
        some = [choices[mask] for choices, mask in zip(alive, masks)]
        ends = [
            replace(
                link,
                source=link.source[masks[link.producer]],
                consumers=tuple((k, target[masks[k]]) for k, target in link.consumers),
            )
            for link in links
        ]
        relaxed = plan_relaxation(some, ends, keep, limits.max_cells, *([] if orders is None else [orders]))
        orders = [relaxed.order]
        if not relaxed.relaxed:
            with contextlib.suppress(TooWide):
                return plan_elimination(some, ends, keep, limits)
        wide = frozenset().union(*relaxed.relaxed) or {i for i in range(len(alive)) if i not in keep}
        _drop_least(masks, scores, wide)


def _covers(score: np.ndarray, possible: np.ndarray) -> np.ndarray:
    """bool [choices]: which are the best possible ones of some case."""
    best = np.where(possible, score[:, None], -1.0).argmax(axis=0)
    covers = np.zeros(len(score), dtype=bool)
    covers[best[possible.any(axis=0)]] = True
    return covers


def _drop_least(masks: Sequence[np.ndarray], scores: Sequence[np.ndarray], operators: Collection[int]) -> None:
    """Drop a quarter of the choices of these operators: the least by score; each keeps its best."""
    left = []
    for i in sorted(operators):
        here = np.flatnonzero(masks[i])
        order = here[np.argsort(-scores[i][here], kind="stable")]
        left += [(float(scores[i][c]), -rank, i, int(c)) for rank, c in enumerate(order.tolist()) if rank]
    assert left, "operators of one choice each are never too wide"
    for _, _, i, c in sorted(left)[: max(1, len(left) // 4)]:
        masks[i][c] = False
