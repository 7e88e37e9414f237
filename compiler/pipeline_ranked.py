"""Several pipelines of one recurrence: the k best by W, and those that a bisection for T passes."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import inf, isfinite

import numpy as np

from .pipeline_arcs import Search
from .pipeline_search import Found, Mode, Solved, gather
from .pipeline_table import StageChoice, StageOption

__all__ = ["fastest", "ranked"]

_Stages = tuple[StageChoice, ...]


def ranked(
    found: Found, options: Sequence[StageOption], most: float, visits: int
) -> Iterator[tuple[float, _Stages] | None]:
    """(W, pipeline) ascending, at most ``most``, each with cuts or meshes that none before it had; a last None where
    ``visits`` states were looked at without coming to an end.

    Best first over partial pipelines: what stages so far make certain, and the recurrence's value of what is left, are
    together the exact value of the best pipeline that begins so.
    """
    tick = count()
    # (value, layers left, order, maximum of heads, sum of fills, state, column, mode, the arcs so far)
    heap: list[tuple[float, int, int, float, float, int, int, int, object]] = []
    for mode, one in enumerate(found.solved):
        for column in one.columns:
            if (value := float(one.value[0, column])) <= most and isfinite(value):
                heap.append((value, one.arcs.rows.num_layers, next(tick), 0.0, 0.0, 0, column, mode, None))
    heapq.heapify(heap)
    seen: set[tuple[tuple[int, int, int, int], ...]] = set()
    while heap and visits > 0:
        value, left, _, head, fill, state, column, mode, path = heapq.heappop(heap)
        one = found.solved[mode]
        if not left:
            stages = _stages(one, path)
            key = tuple((s[0], s[1], options[s[2]].num_devices, options[s[2]].shape) for s in stages)
            if key not in seen:
                seen.add(key)
                yield value, stages
            continue
        visits -= 1
        arcs, heads, fills, behind = one.children(state, column)
        tops = np.maximum(head, fill + heads)
        worth = np.maximum(tops, fill + fills + behind)
        width, layers = len(one.arcs.rows.positions), one.arcs.rows.num_layers
        for k in np.flatnonzero((worth <= most) & np.isfinite(worth)):
            target = int(one.arcs.target[arcs[k]])
            item = float(worth[k]), layers - target // width, next(tick), float(tops[k]), fill + float(fills[k])
            heapq.heappush(heap, (*item, target, column - int(one.counted), mode, (int(arcs[k]), path)))
    if heap:
        yield None


def _stages(one: Solved, path: object) -> _Stages:
    out = []
    while isinstance(path, tuple):
        arc, path = path
        out.append(one.arcs.choice(arc))
    return tuple(reversed(out))


def fastest(search: Search, of: Sequence[Mode], best: float, epsilon: float, sweeps: int) -> list[_Stages]:
    """Pipelines of least Σ fills + max head (``search`` is additive), the best first, then others that the bisection
    passed: the best of these and ``best`` is within the fraction ``epsilon`` of the optimum unless ``sweeps`` runs out.
    """
    if search.low >= best * (1.0 - epsilon):
        return []
    found = gather(search, of, best * (1 + 1e-12))
    heads = [one.head[np.isfinite(one.head)] for one in found.solved]
    caps = np.unique(np.concatenate(heads)) if heads else np.empty(0)
    passed: list[tuple[float, _Stages]] = []
    least = int(np.searchsorted(caps, search.least_head))
    # pipelines whose largest head is in caps[low..high] have sums of at least `total`, and values of at least the first
    queue: list[tuple[float, int, int, float]] = []
    if least < len(caps):
        queue.append((search.low, least, len(caps) - 1, search.low - search.least_head))
    while queue and sweeps > 0 and queue[0][0] < best * (1.0 - epsilon):
        _, low, high, total = heapq.heappop(queue)
        high = min(high, int(np.searchsorted(caps, best - total, "right")) - 1)  # slower stages than this cannot win
        if low > high:
            continue
        sweeps -= 1
        middle = min(max(int(np.searchsorted(caps, (caps[low] + caps[high]) / 2, "right")) - 1, low), high)
        reached, slowest, stages = _sweep(found, float(caps[middle]), best)
        if middle < high:
            heapq.heappush(queue, (total + float(caps[middle + 1]), middle + 1, high, total))
        if stages:
            passed.append((reached + slowest, stages))
            best = min(best, reached + slowest)
            below = int(np.searchsorted(caps, slowest)) - 1
            if below >= low:
                heapq.heappush(queue, (reached + float(caps[low]), low, below, reached))
    return [stages for _, stages in sorted(passed)]


def _sweep(found: Found, cap: float, most: float) -> tuple[float, float, _Stages]:
    """(least sum of fills with no head over ``cap``, the largest head of the pipeline that has it, that pipeline), of
    the pipelines worth at most ``most``."""
    swept = []
    for one in found.solved:
        slow = one.head.min(axis=1) > cap
        arcs = one.arcs.only(~slow[one.arcs.entry] & (one.arcs.worth <= most))
        fill = np.where(one.head <= cap, one.fill, inf)
        value = arcs.values(None, fill, one.counted)
        swept.append(replace(one, arcs=arcs, head=np.zeros_like(fill), fill=fill, value=value))
    index = min(range(len(swept)), key=lambda k: swept[k].best, default=0)
    if not swept or not isfinite(swept[index].best):
        return inf, inf, ()
    one, head = swept[index], found.solved[index].head
    path = one.path()
    slowest = max(float(head[one.arcs.entry[arc], column]) for arc, column in path)
    return one.best, slowest, tuple(one.arcs.choice(arc) for arc, _ in path)
