"""Problems made from an intra-op problem: smaller ones with the same optimum, and ones with other prices.

``simplify``: choices that can reach no finite entry go; states that no entry tells apart merge; of the choices that
agree in all their states only those stay that are best in seconds and bytes. ``restrict`` keeps given choices.
``weighted`` puts a price on bytes, and ``minimum_bytes_problem`` asks for the leanest assignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from .intra_op import Edge, Operator, Problem

__all__ = ["minimum_bytes_problem", "restrict", "simplify", "weighted"]


def minimum_bytes_problem(problem: Problem) -> Problem:
    """The same decisions with bytes in the place of seconds and no bytes: its optimum is the leanest assignment."""
    operators = tuple(
        replace(
            op, seconds=np.where(np.isfinite(op.seconds), op.bytes, np.inf), bytes=np.zeros_like(op.bytes, dtype=float)
        )
        for op in problem.operators
    )
    edges = tuple(
        replace(e, seconds=np.where(np.isfinite(e.seconds), e.bytes, np.inf), bytes=np.zeros_like(e.bytes, dtype=float))
        for e in problem.edges
    )
    return Problem(operators, edges)


def weighted(problem: Problem, byte_weight: float) -> Problem:
    """The problem with seconds + byte_weight · bytes in the place of seconds, and no bytes."""

    def mix(seconds: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        possible = np.isfinite(seconds) & np.isfinite(num_bytes)
        return np.where(possible, seconds + byte_weight * np.where(possible, num_bytes, 0.0), np.inf)

    operators = tuple(
        Operator(op.name, op.labels, mix(op.seconds, op.bytes), np.zeros(len(op.labels))) for op in problem.operators
    )
    edges = tuple(replace(e, seconds=mix(e.seconds, e.bytes), bytes=np.zeros(e.seconds.shape)) for e in problem.edges)
    return Problem(operators, edges)


def simplify(problem: Problem, frozen: Collection[int] = ()) -> tuple[Problem, list[np.ndarray]]:
    """A smaller problem with the same optimum for every limit, and per operator the original indices of its choices.

    Choices of ``frozen`` operators all stay, in order. An operator none of whose choices is possible keeps one, at
    inf seconds.
    """
    seconds = [np.where(np.isfinite(op.bytes), op.seconds, np.inf).astype(float) for op in problem.operators]
    num_bytes = [np.where(np.isfinite(s), op.bytes, 0.0).astype(float) for op, s in zip(problem.operators, seconds)]
    alive = [np.arange(len(s)) for s in seconds]
    open_edges = [
        replace(e, seconds=s, bytes=np.where(np.isfinite(s), e.bytes, 0.0).astype(float))
        for e in problem.edges
        if e.consumers
        for s in (np.where(np.isfinite(e.bytes), e.seconds, np.inf).astype(float),)
    ]

    def keep(i: int, mask: np.ndarray) -> bool:
        """Restrict operator i to the choices of ``mask`` (over those alive); whether anything went."""
        if i in frozen or mask.all():
            return False
        if not mask.any():
            if len(alive[i]) == 1 and np.isinf(seconds[i][alive[i][0]]):
                return False
            seconds[i][alive[i][0]] = np.inf
            mask = np.arange(len(mask)) == 0
        alive[i] = alive[i][mask]
        return True

    for i, s in enumerate(seconds):
        keep(i, np.isfinite(s))
    changed = True
    while changed:
        changed = False
        for e in open_edges:
            changed |= _drop_impossible(e, alive, keep)
        open_edges = [_merge_states(e, alive) for e in open_edges]
        states: list[list[np.ndarray]] = [[] for _ in alive]
        for e in open_edges:
            states[e.producer].append(e.source)
            for k, target in e.consumers:
                states[k].append(target)
        for i, idx in enumerate(alive):
            if len(idx) > 1 and i not in frozen:
                mask = _undominated([state[idx] for state in states[i]], seconds[i][idx], num_bytes[i][idx])
                changed |= keep(i, mask)
    operators = tuple(replace(op, seconds=s, bytes=b) for op, s, b in zip(problem.operators, seconds, num_bytes))
    edges = tuple(e for e in open_edges if e.seconds.any() or e.bytes.any())
    return restrict(Problem(operators, edges), alive), alive


def restrict(problem: Problem, alive: Sequence[np.ndarray]) -> Problem:
    """The problem with only these choices of each operator: int indices or a mask."""
    operators = tuple(
        Operator(op.name, tuple(np.array(op.labels, dtype=object)[idx]), op.seconds[idx], op.bytes[idx])
        for op, idx in zip(problem.operators, alive)
    )
    edges = tuple(
        replace(e, source=e.source[alive[e.producer]], consumers=tuple((k, t[alive[k]]) for k, t in e.consumers))
        for e in problem.edges
    )
    return Problem(operators, edges)


def _drop_impossible(e: Edge, alive: list[np.ndarray], keep: Callable[[int, np.ndarray], bool]) -> bool:
    """Drop choices that meet no finite entry of the edge; whether any went."""
    finite = np.isfinite(e.seconds)
    if finite.all():
        return False
    changed = False
    sources = np.zeros(len(finite), dtype=bool)
    sources[e.source[alive[e.producer]]] = True
    for k, target in e.consumers:
        wanted = target[alive[k]]
        changed |= keep(k, finite[sources].any(axis=0)[wanted])
        reachable = finite[:, target[alive[k]]].any(axis=1)
        changed |= keep(e.producer, reachable[e.source[alive[e.producer]]])
    return changed


def _merge_states(e: Edge, alive: list[np.ndarray]) -> Edge:
    """Only states in use, equal rows merged; equal columns too where nobody shares, else just those that are free."""
    used_source = np.unique(e.source[alive[e.producer]])
    used_target = np.unique(np.concatenate([target[alive[k]] for k, target in e.consumers]))
    both = np.stack([e.seconds, e.bytes])[:, used_source][:, :, used_target]
    columns: dict[bytes, int] = {}
    target_of = np.zeros(e.seconds.shape[1], dtype=np.int64)
    first_columns = []
    for j, g in enumerate(used_target):
        column = both[:, :, j]
        shared = len(e.consumers) > 1 and column.any()
        key = column.tobytes() + (int(g).to_bytes(8, "little") if shared else b"")
        if key not in columns:
            columns[key] = len(columns)
            first_columns.append(j)
        target_of[g] = columns[key]
    both = both[:, :, first_columns]
    rows: dict[bytes, int] = {}
    source_of = np.zeros(e.seconds.shape[0], dtype=np.int64)
    first_rows = []
    for j, s in enumerate(used_source):
        key = both[:, j].tobytes()
        if key not in rows:
            rows[key] = len(rows)
            first_rows.append(j)
        source_of[s] = rows[key]
    both = both[:, first_rows]
    consumers = tuple((k, target_of[target]) for k, target in e.consumers)
    return replace(e, source=source_of[e.source], consumers=consumers, seconds=both[0], bytes=both[1])


def _undominated(states: list[np.ndarray], seconds: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Among choices of equal states, those that no other one equals or beats in seconds and in bytes: a mask."""
    profiles = [*zip(*(s.tolist() for s in states))] if states else [()] * len(seconds)
    leanest: dict[tuple[int, ...], float] = {}
    mask = np.zeros(len(seconds), dtype=bool)
    for c in np.lexsort((num_bytes, seconds)).tolist():
        if num_bytes[c] < leanest.get(profiles[c], math.inf):
            leanest[profiles[c]] = num_bytes[c]
            mask[c] = True
    return mask
