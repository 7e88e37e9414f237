"""Presolve for many problems of one shape: what goes, goes from all of them; what stays, keeps every one's optimum.

The problems differ in numbers only: operators, choices, tensors and states are shared, tables have the batch (rows) as
their *last* axis, so that every pass over a table runs along rows. A choice goes

    where it is inf, or meets nothing but inf, in every row
    where another choice with the same states costs no more in every row

and the states of a tensor are merged where all rows price them alike: sources always, targets only where nobody shares
a copy or where it is free. These steps repeat until nothing changes. Parallel edges are not summed: of two consumers
that want one layout, both may be served by one copy.

``simplify`` does this to one problem, whose rows are its seconds and its bytes: the optimum for every limit stays.
``without_fixed`` takes out of one problem what is decided: nearly all of a stage whose ops keep their labels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .problem import Edge, Operator, Problem

__all__ = ["TensorEdges", "simplify", "simplify_links", "without_fixed"]

KNOWN_BYTES = 1 << 14  # of a tensor's tables, up to which what came of them is kept

Consumers = tuple[tuple[int, np.ndarray], ...]


@dataclass(frozen=True, eq=False)
class TensorEdges:
    """One tensor from its producer to all its consumers, in all rows.

    source: [choices of the producer] → source state; consumers: (operator, [its choices] → target state). rows,
    columns: the states of the original tables that are left. tables: [S, T, N] each, in the original states (the first
    says with inf what is impossible); states are equal where they are in all of these.
    """

    producer: int
    source: np.ndarray
    consumers: Consumers
    rows: np.ndarray
    columns: np.ndarray
    tables: tuple[np.ndarray, ...]

    @staticmethod
    def of(producer: int, source: np.ndarray, consumers: Consumers, tables: Sequence[np.ndarray]) -> TensorEdges:
        """A link all of whose states are left."""
        num_sources, num_targets = tables[0].shape[:2]
        return TensorEdges(producer, source, consumers, np.arange(num_sources), np.arange(num_targets), tuple(tables))

    def free(self) -> np.ndarray:
        """[columns] mask of the targets that cost nothing in any row."""
        used = [table[np.ix_(self.rows, self.columns)].any(axis=(0, 2)) for table in self.tables]
        return ~np.any(used, axis=0)


def simplify_links(
    costs: Sequence[np.ndarray], links: Sequence[TensorEdges], frozen: Collection[int] = ()
) -> tuple[list[np.ndarray], list[TensorEdges]]:
    """(per operator the choices that stay, links with reduced states whose maps are over those choices).

    costs: [choices, rows] per operator. Choices of ``frozen`` operators all stay; an operator with no possible choice
    keeps its first.
    """
    alive = [np.arange(len(cost)) for cost in costs]
    finite = [np.asarray(np.isfinite(link.tables[0]).any(axis=2)) for link in links]
    limiting = [(link, possible) for link, possible in zip(links, finite) if not possible.all()]
    ends = [{link.producer, *(k for k, _ in link.consumers)} for link in links]

    def keep(i: int, mask: np.ndarray) -> bool:
        if i in frozen or mask.all() or len(mask) == 1:
            return False
        alive[i] = alive[i][mask] if mask.any() else alive[i][:1]
        changed.add(i)
        return True

    changed = set(range(len(alive)))  # operators that lost choices
    for i, cost in enumerate(costs):
        keep(i, np.isfinite(cost).any(axis=1))
    merged, known = list(links), dict[bytes, _Merged]()
    while changed:
        while any(_drop_impossible(link, possible, alive, keep) for link, possible in limiting):
            pass
        near = [bool(some & changed) for some in ends]
        merged = [_merge_states(link, alive, known) if anew else old for link, old, anew in zip(links, merged, near)]
        profiles: list[list[np.ndarray]] = [[] for _ in alive]
        for link in merged:
            profiles[link.producer].append(link.source[alive[link.producer]])
            for k, target in link.consumers:
                profiles[k].append(target[alive[k]])
        touched = changed.union(*(some for some, anew in zip(ends, near) if anew)).difference(frozen)
        changed.clear()
        for i in sorted(touched):
            if len(index := alive[i]) > 1:
                keep(i, _undominated(profiles[i], costs[i][index]))
    return alive, [_restricted(link, alive) for link in merged]


def without_fixed(problem: Problem, frozen: Collection[int] = ()) -> tuple[Problem, list[int]]:
    """A problem of the operators that have a choice, in order, with the costs of every assignment; and which they are.

    A tensor with one such operator, or none, is a part of its costs. Operators of one choice stay where they share a
    tensor with several others, and those of ``frozen``. The first that stays also carries the costs of those that go.
    """
    has_choice = [len(op.labels) > 1 or i in frozen for i, op in enumerate(problem.operators)]
    seconds, num_bytes = [op.seconds for op in problem.operators], [op.bytes for op in problem.operators]
    edges, stays = list[Edge](), set(np.flatnonzero(has_choice).tolist()) or {0}
    for edge in problem.edges:
        ends = {edge.producer, *(k for k, _ in edge.consumers)}
        several = [i for i in ends if has_choice[i]]
        if len(several) > 1:
            edges.append(edge)
            stays |= ends
            continue
        (i,) = several or [edge.producer]
        number = len(seconds[i])  # what is fixed has one state, for all choices of i
        sources = np.broadcast_to(edge.source, number)
        targets = [np.broadcast_to(target, number) for _, target in edge.consumers]
        for k, wanted in enumerate(targets):
            fresh = np.all([wanted != other for other in targets[:k]], axis=0)
            seconds[i] = seconds[i] + np.where(fresh, edge.seconds[sources, wanted], 0.0)
            num_bytes[i] = num_bytes[i] + np.where(fresh, edge.bytes[sources, wanted], 0.0)
    left = sorted(stays)
    for costs in (seconds, num_bytes):
        rest = sum(float(cost[0]) for i, cost in enumerate(costs) if i not in stays)
        costs[left[0]] = costs[left[0]] + rest
    place = {i: k for k, i in enumerate(left)}
    operators = [replace(problem.operators[i], seconds=seconds[i], bytes=num_bytes[i]) for i in left]
    moved = [
        replace(e, producer=place[e.producer], consumers=tuple((place[k], target) for k, target in e.consumers))
        for e in edges
    ]
    return Problem(tuple(operators), tuple(moved)), left


def simplify(problem: Problem, frozen: Collection[int] = ()) -> tuple[Problem, list[np.ndarray]]:
    """A smaller problem with the same optimum for every limit, and per operator the original indices of its choices.

    Choices of ``frozen`` operators all stay, in order. An operator none of whose choices is possible keeps one.
    """
    edges = [e for e in problem.edges if e.consumers]
    links = [TensorEdges.of(e.producer, e.source, e.consumers, [_rows(e.seconds, e.bytes)]) for e in edges]
    costs = [_rows(op.seconds, op.bytes) for op in problem.operators]
    alive, reduced = simplify_links(costs, links, frozen)
    operators = tuple(
        Operator(op.name, tuple(op.labels[c] for c in index.tolist()), *_columns(cost[index]))
        for op, cost, index in zip(problem.operators, costs, alive)
    )
    tables = (_columns(link.tables[0][np.ix_(link.rows, link.columns)]) for link in reduced)
    smaller = (
        Edge(e.name, e.producer, link.source, link.consumers, seconds, num_bytes)
        for e, link, (seconds, num_bytes) in zip(edges, reduced, tables)
    )
    return Problem(operators, tuple(e for e in smaller if e.seconds.any() or e.bytes.any())), alive


def _rows(seconds: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Both as the last axis; inf in both where either is."""
    both = np.empty((*seconds.shape, 2))
    both[..., 0], both[..., 1] = seconds, num_bytes
    finite = np.isfinite(both)
    if not finite.all():
        both[~finite.all(axis=-1)] = np.inf
    return both


def _columns(both: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``_rows`` taken apart; what is impossible has inf seconds and no bytes."""
    seconds, num_bytes = both[..., 0].copy(), both[..., 1].copy()
    num_bytes[np.isinf(seconds)] = 0.0
    return seconds, num_bytes


def _restricted(link: TensorEdges, alive: Sequence[np.ndarray]) -> TensorEdges:
    consumers = tuple((k, target[alive[k]]) for k, target in link.consumers)
    return replace(link, source=link.source[alive[link.producer]], consumers=consumers)


def _drop_impossible(
    link: TensorEdges, possible: np.ndarray, alive: Sequence[np.ndarray], keep: Callable[[int, np.ndarray], bool]
) -> bool:
    """Drop choices that meet no entry that is finite in some row; whether any went."""
    if possible.all():
        return False
    changed, i = False, link.producer
    for k, target in link.consumers:
        reached = np.asarray(possible[np.unique(link.source[alive[i]])].any(axis=0))
        changed |= keep(k, reached[target[alive[k]]])
        reaches = np.asarray(possible[:, np.unique(target[alive[k]])].any(axis=1))
        changed |= keep(i, reaches[link.source[alive[i]]])
    return changed


#: (new source states, new target states, rows and columns that are left) of a table
_Merged = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _merge_states(link: TensorEdges, alive: Sequence[np.ndarray], known: dict[bytes, _Merged]) -> TensorEdges:
    """The link with only the states in use, equal ones merged; its maps stay over all choices. known: what came of
    equal small tables, of which deep models have many."""
    rows = np.flatnonzero(np.bincount(link.source[alive[link.producer]]))
    columns = np.flatnonzero(np.bincount(np.concatenate([target[alive[k]] for k, target in link.consumers])))
    shared, size = len(link.consumers) > 1, sum(table.nbytes for table in link.tables)
    if size > KNOWN_BYTES:
        found = _merged_states(link, rows, columns, shared)
    else:
        parts = np.array([shared, *link.tables[0].shape]), rows, columns, *link.tables
        key = b"".join(part.tobytes() for part in parts)
        found = known.get(key) or known.setdefault(key, _merged_states(link, rows, columns, shared))
    source_of, target_of, rows, columns = found
    consumers = tuple((k, target_of[target]) for k, target in link.consumers)
    return replace(link, source=source_of[link.source], consumers=consumers, rows=rows, columns=columns)


def _merged_states(link: TensorEdges, rows: np.ndarray, columns: np.ndarray, shared: bool) -> _Merged:
    free = replace(link, rows=rows, columns=columns).free()
    by_column = [table[rows].swapaxes(0, 1) for table in link.tables]
    first, of_column = _classes(by_column, columns, [shared and not f for f in free])
    target_of = np.zeros(link.tables[0].shape[1], dtype=np.int64)
    target_of[columns] = of_column
    columns = columns[first]
    by_row = [table[:, columns] for table in link.tables]
    first, of_row = _classes(by_row, rows, [False] * len(rows))
    source_of = np.zeros(link.tables[0].shape[0], dtype=np.int64)
    source_of[rows] = of_row
    return source_of, target_of, rows[first], columns


def _classes(tables: Sequence[np.ndarray], states: np.ndarray, alone: Sequence[bool]) -> tuple[list[int], list[int]]:
    """(positions of the first state of each class, class of each state) among ``states`` of the leading axis, equal in
    all tables; those of ``alone`` equal none."""
    first: list[int] = []
    classes: list[int] = []
    by_sample: dict[bytes, list[int]] = {}
    for position, (state, single) in enumerate(zip(states.tolist(), alone)):
        sample = b"".join(table[state, :, :: max(1, table.shape[2] - 1)].tobytes() for table in tables)
        like = [] if single else by_sample.setdefault(sample, [])
        for other in like:
            if all(np.array_equal(table[state], table[states[first[other]]]) for table in tables):
                classes.append(other)
                break
        else:
            like.append(len(first))
            classes.append(len(first))
            first.append(position)
    return first, classes


def _undominated(states: Sequence[np.ndarray], cost: np.ndarray) -> np.ndarray:
    """Among choices of equal states, those that no other one equals or beats in every row: a mask. cost: [C, rows]."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for c, profile in enumerate(zip(*(s.tolist() for s in states), range(len(cost)))):
        groups.setdefault(profile[:-1], []).append(c)
    mask = np.ones(len(cost), dtype=bool)
    for members in groups.values():
        if len(members) == 1:
            continue
        # who costs no more in every row is inf no more often, and adds up to no more where both are finite
        some = cost[members]
        infinite = np.isinf(some)
        order = np.lexsort((np.where(infinite, 0.0, some).sum(axis=1), some[:, 0], infinite.sum(axis=1)))
        kept = np.empty_like(some)
        number = 0
        for c in order.tolist():
            mask[members[c]] = stays = not (kept[:number] <= some[c]).all(axis=1).any()
            if stays:
                kept[number] = some[c]
                number += 1
    return mask
