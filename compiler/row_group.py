"""Submeshes of equally many axes, whose rows (case, price of a byte) one composer makes: floors and intervals by
(submesh, microbatches, level)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf

import numpy as np

from .batch_compose import BatchComposer, BatchIntervals, Row
from .batch_section import build_batch_section
from .batch_tables import Level
from .search_state import Search
from .space import Submesh
from .variants import Case, Samples, Variants

__all__ = ["RowGroup", "row_groups"]


class RowGroup:
    """Submeshes with equally many axes of equal roles: one composer for all their cases."""

    def __init__(self, search: Search, subs: Sequence[Submesh], counts: Sequence[int], levels: Sequence[Level]) -> None:
        self.submeshes = list(subs)
        self.places = {sub: index for index, sub in enumerate(subs)}
        kin = {(sub.shape, sub.roles, sub.site): sub for sub in reversed(self.submeshes)}
        self.alike = {sub: kin.get((sub.shape, sub.roles, sub.alike), sub) for sub in subs}
        self.counts = {m: index for index, m in enumerate(counts)}
        cases = tuple(Case(sub.shape, sub.site, m) for m in counts for sub in subs)
        space = search.space
        assert search.samples is not None
        variants = Variants(
            search.graph, search.layering, search.cluster, search.optimizer, search.global_batch, cases,
            space.schedules[0], search.samples, communication=space.communication,
        )  # fmt: skip
        restriction = search.restriction(subs[0].roles)
        self.composer = BatchComposer(variants, restriction, levels, space.recompute, build_batch_section)
        self.composer.alike = [self.variant(self.alike[sub], m) for m in self.counts for sub in self.submeshes]
        self.composer.kept = search.kept
        self._at: dict[Row, tuple[BatchIntervals, int]] = {}
        self._floors: dict[Row, np.ndarray] = {}

    def variant(self, sub: Submesh, m: int) -> int:
        """The case's number."""
        return self.counts[m] * len(self.submeshes) + self.places[sub]

    def row(self, sub: Submesh, m: int, price: int) -> Row:
        """The row of the composer."""
        return self.variant(sub, m), price

    def uncomposed(self, cases: Sequence[tuple[Submesh, int, int]]) -> list[Row]:
        """The rows of these (submesh, microbatches, level) whose intervals are not there."""
        return [row for row in (self.row(*case) for case in cases) if row not in self._at]

    def compose(self, made: BatchIntervals) -> None:
        """Take the composer's intervals."""
        self._at |= {row: (made, place) for place, row in enumerate(made.rows)}

    def unbounded(self, cases: Sequence[tuple[Submesh, int, int]]) -> list[Row]:
        """The rows that ``floor`` of these (submesh, microbatches, level) lacks."""
        rows = dict.fromkeys((self.variant(self.alike[sub], m), level) for sub, m, level in cases)
        return [row for row in rows if row not in self._floors]

    def bound(self, rows: Sequence[Row], values: np.ndarray, run: np.ndarray) -> None:
        """Take the composer's floors of these rows."""
        padded = np.concatenate([values, np.full((1, len(rows)), inf)])
        self._floors |= {row: padded[:, place].take(run, mode="wrap") for place, row in enumerate(rows)}

    def floor(self, sub: Submesh, m: int, level: int) -> np.ndarray | None:
        """[L, L + 1] the least of the objective at a level, messages not counted; None where it was not made."""
        found = self._floors.get((self.variant(self.alike[sub], m), level))
        return self.array("floor_s", sub, m, level) if found is None and self.knows(sub, m, level) else found

    def actions(self, sub: Submesh, m: int) -> float:
        """Seconds of a stage's two actions."""
        return float(self.composer.actions[self.variant(sub, m)])

    def least_messages(self, sub: Submesh, m: int) -> np.ndarray:
        """[2, borders] the least seconds to receive what crosses each border, and to get its gradients back."""
        v, num = self.variant(sub, m), len(self.composer.variants.layering.crossing)
        both, known = np.zeros((2, num)), dict[Hashable, list[float]]()
        for border in range(1, num - 1):
            key = self.composer.variants.border_key(border)
            if key not in known:
                possible = self.composer.states(border)[1][v]
                seconds = self.composer.border_seconds(border)
                known[key] = [one[possible, v].min() for one in seconds] if possible.any() else [0.0, 0.0]
            both[:, border] = known[key]
        return both

    def knows(self, sub: Submesh, m: int, price: int) -> bool:
        """Whether these intervals were made."""
        return self.row(sub, m, price) in self._at

    def array(self, name: str, sub: Submesh, m: int, price: int) -> np.ndarray:
        """One array [L, L + 1] of the intervals."""
        made, place = self._at[self.row(sub, m, price)]
        found: np.ndarray = made.of(name, [place])[0]
        return found


def row_groups(
    search: Search, subs: Sequence[Submesh], counts: Sequence[int], levels: Sequence[Level]
) -> list[RowGroup]:
    """The groups of these submeshes, for all microbatch counts."""
    by_kind: dict[tuple[int, tuple[str | None, ...]], list[Submesh]] = {}
    for sub in subs:
        by_kind.setdefault((len(sub.shape), sub.roles), []).append(sub)
    if search.samples is None:
        search.samples = Samples(search.graph, search.layering)
    return [RowGroup(search, members, counts, levels) for members in by_kind.values()] if counts else []
