"""Presolve for many problems of one shape: what goes, goes from all of them; what stays, keeps every one's optimum.

The problems differ in numbers only: operators, choices, tensors and states are shared, tables have the batch (rows) as
their *last* axis, so that every pass over a table runs along rows. A choice goes

    where it is inf, or meets nothing but inf, in every row
    where another choice with the same states costs no more in every row

and the states of a tensor are merged where all rows price them alike: sources always, targets where nobody shares a
copy (or it is free), as in ``problem``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["TensorEdges", "simplify_links"]

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

    def keep(i: int, mask: np.ndarray) -> bool:
        if i in frozen or mask.all() or len(mask) == 1:
            return False
        alive[i] = alive[i][mask] if mask.any() else alive[i][:1]
        return True

    for i, cost in enumerate(costs):
        keep(i, np.isfinite(cost).any(axis=1))
    merged, changed = list(links), True
    while changed:
        changed = False
        for link, possible in zip(links, finite):
            changed |= _drop_impossible(link, possible, alive, keep)
        merged = [_merge_states(link, alive) for link in links]
        profiles: list[list[np.ndarray]] = [[] for _ in alive]
        for link in merged:
            profiles[link.producer].append(link.source[alive[link.producer]])
            for k, target in link.consumers:
                profiles[k].append(target[alive[k]])
        for i, index in enumerate(alive):
            if len(index) > 1 and i not in frozen:
                changed |= keep(i, _undominated(profiles[i], costs[i][index]))
    return alive, [_restricted(link, alive) for link in merged]


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


def _merge_states(link: TensorEdges, alive: Sequence[np.ndarray]) -> TensorEdges:
    """The link with only the states in use, equal ones merged; its maps stay over all choices."""
    rows = np.unique(link.source[alive[link.producer]])
    columns = np.unique(np.concatenate([target[alive[k]] for k, target in link.consumers]))
    shared = len(link.consumers) > 1
    free = replace(link, rows=rows, columns=columns).free()
    by_column = [table[rows].swapaxes(0, 1) for table in link.tables]
    first, of_column = _classes(by_column, columns, [shared and not f for f in free])
    columns = columns[first]
    target_of = np.zeros(link.tables[0].shape[1], dtype=np.int64)
    target_of[np.unique(np.concatenate([t[alive[k]] for k, t in link.consumers]))] = of_column
    by_row = [table[:, columns] for table in link.tables]
    first, of_row = _classes(by_row, rows, [False] * len(rows))
    source_of = np.zeros(link.tables[0].shape[0], dtype=np.int64)
    source_of[rows] = of_row
    consumers = tuple((k, target_of[target]) for k, target in link.consumers)
    return replace(link, source=source_of[link.source], consumers=consumers, rows=rows[first], columns=columns)


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
    for c in range(len(cost)):
        groups.setdefault(tuple(int(s[c]) for s in states), []).append(c)
    mask = np.ones(len(cost), dtype=bool)
    for members in groups.values():
        if len(members) == 1:
            continue
        # who costs no more in every row is inf no more often, and adds up to no more where both are finite
        key = {c: (int(np.isinf(cost[c]).sum()), float(cost[c][np.isfinite(cost[c])].sum())) for c in members}
        kept: list[int] = []
        for c in sorted(members, key=lambda c: (key[c], c)):
            mask[c] = not any((cost[k] <= cost[c]).all() for k in kept)
            if mask[c]:
                kept.append(c)
    return mask
