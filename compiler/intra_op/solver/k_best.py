"""The choices of a problem in the order of their seconds (Lawler, "A procedure for computing the K best solutions to
discrete optimization problems", 1972)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from ...errors import TooWide
from .elimination import eliminate
from .problem import Problem, evaluate, restrict

__all__ = ["fastest_choices"]


def fastest_choices(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield all choices of a problem, the fastest first. Ends early where what is left is too wide to eliminate.

    What lies beside a choice falls into one part per operator: those that are like it up to there and differ there. The
    best of each part are the next candidates.
    """
    queue: list[tuple[float, float, tuple[int, ...], Sequence[np.ndarray]]] = []

    def push(alive: Sequence[np.ndarray]) -> None:
        """Add the best choice among these indices of each operator, if one is possible."""
        reduced = eliminate(restrict(problem, alive))
        if np.isfinite(reduced.cost):
            chosen = tuple(int(some[k]) for some, k in zip(alive, reduced.assignment()))
            heapq.heappush(queue, (*evaluate(problem, chosen), chosen, alive))

    try:
        push([np.arange(len(operator.labels)) for operator in problem.operators])
        while queue:
            _, _, chosen, alive = heapq.heappop(queue)
            yield chosen
            alike = [np.array([k]) for k in chosen]
            for index, (k, some) in enumerate(zip(chosen, alive)):
                if len(some) > 1:
                    push([*alike[:index], some[some != k], *alive[index + 1 :]])
    except TooWide:
        return
