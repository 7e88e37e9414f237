"""What no plan of the space undercuts: bounds of all microbatch counts and families, proven beside the rest of a search
where it has workers.

The bound of the search is the least of all, so what is least is lifted, until it is one that nothing lifts further. Of
every count there is a quick bound: for the guide from the search, for the others from ``schedule_bounds``. Then, least
first and each up to what is known to be enough:

    interleaved, zb-v     chunk_bounds: these take little, and the least of them is enough for the others
    the others            pipeline_bound

each first by the floors that there are, then by those at more prices of a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from .asynchronous import PIPEDREAM
from .chunk_bounds import chunk_bound
from .exposure import lowered, raised
from .forked import Forked
from .other_schedules import chunk_numbers
from .pipeline_chunks import at_most
from .pipeline_dp import bound_of
from .pipeline_table import Floors
from .plan import Plan
from .schedule_bounds import family_bounds
from .search_floors import LOOSE
from .search_state import INTERRUPTED, Search
from .search_tables import tables_of
from .space import CHUNKED

__all__ = ["bounded", "prove", "proving"]

LAX, STRICT = "zb-h1", "gpipe"  # what no pipeline of the first undercuts, none of the second does: it holds as much or
# more, and its backwards are whole


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
        search.proof = None
    search.bounds.update({(m, name): 0.0 for m in tables_of(search).counts for name in _others(search)})

    def work() -> dict[tuple[int, str], float]:
        with search.keeping():
            _lift_least(search, most_s)
        return dict(search.bounds)

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


def _others(search: Search) -> list[str]:
    return [name for name in search.space.schedules if name != search.space.guide]


def _lift_least(search: Search, most_s: float) -> None:
    """Lift the least of ``search.bounds``. most_s: what is above does not matter."""
    tables, space, others = tables_of(search), search.space, _others(search)
    tables.best = min(tables.best, most_s)
    for m in tables.counts if others else ():
        messages = not any(name in CHUNKED for name in others)
        _lift(search, m, partial(_quickly, search, m, others), messages, most_s)
    chunked = [name for name in others if name in CHUNKED]
    single = [name for name in others if name not in CHUNKED]
    enough = most_s
    if space.guide in space.schedules and search.cut_short:
        enough = min([most_s, *(tables.bound(m) for m in tables.counts)])
    elif space.guide in space.schedules:
        single.append(space.guide)
        for m in tables.counts if search.small else ():  # of which all that may be faster will be assembled
            _lift_closely(search, m, space.guide, most_s)
    for names in (chunked, single):
        left = [(m, name) for m in tables.counts for name in names]
        while left and search.bounds[case := min(left, key=lambda one: (search.bounds[one], one[1] != LAX))] < enough:
            left.remove(case)
            _lift_closely(search, *case, enough)
            enough = min(enough, search.bounds[case])


def _lift_closely(search: Search, m: int, name: str, most_s: float) -> None:
    """Lift the bound of one family with m microbatches, up to ``most_s``, by all that there is."""
    tables, guides = tables_of(search), name == search.space.guide
    if guides and search.bounds[m, name] >= (1 - LOOSE) * tables.best:
        return
    closely = partial(_closely, search, m, name)
    _lift(search, m, closely, name not in CHUNKED, most_s)
    if search.bounds[m, name] < most_s:
        more = tables.lean_levels(m, split=name == "zb-h1", ends=guides and not tables.hides(m))
        _lift(search, m, closely, name not in CHUNKED, most_s, more)


def _lift(
    search: Search,
    m: int,
    of: Callable[[Floors, float], Mapping[str, float]],
    messages: bool,
    most_s: float,
    more: Sequence[int] = (),
) -> None:
    """Lift bounds of families with m microbatches to what ``of`` (floors, most) says; more: prices of a byte."""
    tables, cluster = tables_of(search), search.cluster
    paced = tables.hides(m)  # with few microbatches much of a step's other work may hide: then by paces alone
    levels = list(dict.fromkeys([*more, *tables.known_levels(m)]))
    most = most_s if paced else raised(most_s, m, cluster, tables.hidden_s)
    for name, bound in of(tables.floors_of(m, levels, messages=messages), most).items():
        true = bound if paced else lowered(bound, m, cluster, tables.hidden_s)
        search.bounds[m, name] = max(true, search.bounds[m, name], tables.least_share(m))
    if {LAX, STRICT} <= {*_others(search)}:
        search.bounds[m, STRICT] = max(search.bounds[m, STRICT], search.bounds[m, LAX])


def _quickly(search: Search, m: int, names: Sequence[str], floors: Floors, most: float) -> Mapping[str, float]:
    return family_bounds(floors, m, names, tables_of(search).cuts, tables_of(search).usable * search.share, most)


def _closely(search: Search, m: int, name: str, floors: Floors, most: float) -> dict[str, float]:
    """A bound of one family that takes longer than ``family_bounds``."""
    tables = tables_of(search)
    if name == PIPEDREAM:  # its pipelines have no fill: what is proven of the slowest stage is all
        return {name: 0.0}
    if name in CHUNKED:
        return {name: chunk_bound(floors, m, name, chunk_numbers(search, name), at_most(m, tables.cuts), most)}
    return {name: bound_of(floors.alone(len(tables.usable)), m, name, tables.cuts, most, 1)}
