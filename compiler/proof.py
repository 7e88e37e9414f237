"""What no plan of the space undercuts: bounds of all microbatch counts and families, proven beside the rest of a search
where it has workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from .forked import Forked
from .other_schedules import prove_others
from .plan import Plan
from .search_state import INTERRUPTED, Search

__all__ = ["bounded", "prove", "proving"]


@contextmanager
def proving(search: Search) -> Iterator[None]:
    """Within it, ``search.proof`` and ``search.aside`` may be of forks; afterwards nobody is left."""
    try:
        yield
    finally:
        for forked in (search.proof, search.aside):
            if forked is not None:
                forked.drop()
        search.proof = search.aside = None


def prove(search: Search, most_s: float) -> None:
    """Bound all counts under all open families as far as that is less than ``most_s``, if nobody is at it already;
    ``bounded`` takes what a fork finds."""
    if search.proof is not None:
        if search.proven_s >= most_s:
            return
        search.proof.drop()
    tables, space = search.tables, search.space
    assert tables is not None
    search.bounds.update({(m, name): 0.0 for m in tables.counts for name in space.schedules if name != space.guide})

    def work() -> dict[tuple[int, str], float]:
        with search.keeping():
            tables.best = min(tables.best, most_s)
            if not search.cut_short:
                tables.bound_the_rest()
            prove_others(search, most_s)
        return search.bounds

    with search.timed("bounds"):
        try:
            search.proof, search.proven_s = Forked(work, search.workers > 1, later=True), most_s
        except KeyboardInterrupt:
            search.cut_short = INTERRUPTED


def bounded(search: Search, plans: Sequence[Plan]) -> list[Plan]:
    """The plans of a search with what is proven of it by now."""
    if search.proof is not None:
        with search.timed("bounds"):
            try:
                for case, bound_s in search.proof.result().items():  # others were lifted here meanwhile
                    search.bounds[case] = max(search.bounds.get(case, 0.0), bound_s)
                search.proof = None
            except KeyboardInterrupt:  # the plans are there
                search.cut_short = f"{INTERRUPTED} while bounds were proven"
    return [
        replace(p, prediction=replace(p.prediction, bound_s=min(p.prediction.step_s, search.bound_s))) for p in plans
    ]
