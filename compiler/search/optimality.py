"""Lower bounds on the step time of every plan in the space, for all microbatch counts and schedules.

With workers a fork proves them while the search goes on. The bound of the search is the least of all. So the least one
is lifted again and again, until nothing lifts it further. Every count has a quick bound: the search makes that of the
base schedule, this module those of the others. Then, least first and each up to what is known to be enough:

    interleaved, zb-v     ``chunk_bound``: these take little, and the least of them is enough for the others
    the others            ``stage_dp.bound_of``

first by the lower bounds of stages that exist, then by those at more memory multipliers.

**Schedules with virtual stages** (``chunk_bound``). As in ``virtual_stages``, p groups run under one option with M
bytes per device, group k has v chunks D_k of the p v, and the makespan is at least m T_k + σ_k, T_k = Σ_{c ∈ D_k} t_c.
At some time group k holds h_c microbatches of each of its chunks c at once (``concurrent_microbatches``), so that Σ_{c
∈ D_k} (r_c + h_c s_c) ≤ M. A Lagrangian pair (λ, μ) of ``bounds`` says t_c ≥ value_c − λ r_c − μ s_c, and t_c ≥ pace_c.
With θ_c = min(1, λ h_c / μ),

    T_k ≥ Σ_{c ∈ D_k} (pace_c + θ_c (value_c − pace_c)) − λ M,      as  θ_c λ r_c + θ_c μ s_c ≤ λ (r_c + h_c s_c).

The sum of these over all groups is p max_k T_k at most. Its left side depends on the cuts alone, chunk by chunk: its
least is a dynamic program over chunks and layers (``_least``), where no chunk takes longer than the makespan that is of
interest. Where values count the per-step work, divided by m, it is m T_k + σ_k that is bounded so.

Options, p and v are tried best first: the terms of ``quick_bound`` (h = 1, any number of chunks) rank them, and the
loop ends where these are no less than the bound so far.

**Quick bounds of the other schedules** (``family_bounds``). A stage does all its actions one at a time and then its end
of step: under every schedule the makespan is at least m t_k + σ_k. With several chunks per stage, and no more stages
than microbatches, ``virtual_stages.quick_bound`` counts on that; with one:

    work       Σ n_k (m t_k + σ_k) / N for stages on n_k of N devices. For p stages, a Lagrangian pair (λ, μ) of
               ``bounds`` and at least q microbatches in flight, n_k t_k ≥ n_k value_k − n_k M_k max(λ, μ/q);
               Σ n_k M_k is at most all devices' bytes. The least Σ n_k value_k of p runs of layers is a shortest path.
    slowest    for a limit on every m t_k + σ_k, each run of layers needs so many devices, by the fastest submesh of
               each size; where the shortest path through these needs more than N, no makespan is within the limit

Under GPipe, if no schedule with chunks is asked for too, the bound of ``bounds`` is taken as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop
from math import inf, isfinite

import numpy as np

from ..cost.gradient_reduction import lower_by_overlap, raise_by_overlap
from ..pipeline.families import PIPEDREAM, in_flight_formula, virtual_order
from ..pipeline.stage_dp import bound_of
from ..pipeline.table import Floats, LagrangianBound, LowerBounds, StageConstraints
from ..pipeline.virtual_stages import group_counts, least_sums, limit_groups, mask_forbidden, quick_bound, sums_by_count
from ..plan.plan import Plan
from ..workers import ForkedTask
from .lower_bounds import PROOF_GAP
from .other_schedules import chunk_numbers
from .space import CHUNKED
from .state import INTERRUPTED, SearchState
from .tables import tables_of

__all__ = ["chunk_bound", "concurrent_microbatches", "family_bounds", "proof_processes", "start_proof", "with_bounds"]


LEAST_MEMORY_SCHEDULE, MOST_MEMORY_SCHEDULE = (
    "zb-h1",
    "gpipe",
)  # what no pipeline of the first undercuts, none of the second does: it holds as much or
# more, and its backwards are whole


@contextmanager
def proof_processes(search: SearchState) -> Iterator[None]:
    """A scope in which the search's proof and pure plans may be tasks of forks; at its end all forks are gone."""
    try:
        yield
    finally:
        for forked in (search.proof_task, search.pure_task):
            if forked is not None:
                forked.drop()
        search.proof_task = search.pure_task = None


def start_proof(search: SearchState, most_s: float) -> None:
    """Begin to lift the bounds of all counts under all open schedules, up to ``most_s``, unless a task is at it
    already. ``with_bounds`` takes the result."""
    if search.proof_task is not None:
        if search.proof_limit_s >= most_s:
            return
        search.proof_task.drop()
        search.proof_task = None
    search.bounds.update({(m, name): 0.0 for m in tables_of(search).counts for name in _others(search)})

    def work() -> dict[tuple[int, str], float]:
        with search.keeping():
            _lift_least(search, most_s)
        return dict(search.bounds)

    with search.timed("bounds"):
        try:
            search.proof_task, search.proof_limit_s = ForkedTask(work, search.workers > 1, later=True), most_s
        except KeyboardInterrupt:
            search.cut_short = INTERRUPTED


def with_bounds(search: SearchState, plans: Sequence[Plan]) -> list[Plan]:
    """The plans with the bound of the search, as far as it is proven by now."""
    if search.proof_task is not None:
        with search.timed("bounds"):
            try:
                for case, bound_s in search.proof_task.result().items():  # others were lifted here meanwhile
                    search.bounds[case] = max(search.bounds.get(case, 0.0), bound_s)
                search.proof_task = None
            except KeyboardInterrupt:  # the plans are there
                search.cut_short = f"{INTERRUPTED} while bounds were proven"
    return [
        replace(p, prediction=replace(p.prediction, bound_s=min(p.prediction.step_s, search.bound_s))) for p in plans
    ]


def _others(search: SearchState) -> list[str]:
    return [name for name in search.space.schedules if name != search.space.base_schedule]


def _lift_least(search: SearchState, most_s: float) -> None:
    """Lift the least of ``search.bounds``. most_s: what is above does not matter."""
    tables, space, others = tables_of(search), search.space, _others(search)
    tables.best = min(tables.best, most_s)
    for m in tables.counts if others else ():
        messages = not any(name in CHUNKED for name in others)
        _lift(search, m, partial(_quickly, search, m, others), messages, most_s)
    chunked = [name for name in others if name in CHUNKED]
    single = [name for name in others if name not in CHUNKED]
    enough = most_s
    if space.base_schedule in space.schedules and search.cut_short:
        enough = min([most_s, *(tables.bound(m) for m in tables.counts)])
    elif space.base_schedule in space.schedules:
        single.append(space.base_schedule)
        for m in tables.counts if search.small else ():  # of which all that may be faster will be assembled
            _lift_closely(search, m, space.base_schedule, most_s)
    for names in (chunked, single):
        left = [(m, name) for m in tables.counts for name in names]
        while (
            left
            and search.bounds[case := min(left, key=lambda one: (search.bounds[one], one[1] != LEAST_MEMORY_SCHEDULE))]
            < enough
        ):
            left.remove(case)
            _lift_closely(search, *case, enough)
            enough = min(enough, search.bounds[case])


def _lift_closely(search: SearchState, m: int, name: str, most_s: float) -> None:
    """Lift the bound of one schedule with m microbatches, up to ``most_s``, by all means that there are."""
    tables, guides = tables_of(search), name == search.space.base_schedule
    if guides and search.bounds[m, name] >= (1 - PROOF_GAP) * tables.best:
        return
    closely = partial(_closely, search, m, name)
    _lift(search, m, closely, name not in CHUNKED, most_s)
    if search.bounds[m, name] < most_s:
        more = tables.lean_levels(m, split=name == "zb-h1", ends=guides and not tables.overlaps_reduction(m))
        _lift(search, m, closely, name not in CHUNKED, most_s, more)


def _lift(
    search: SearchState,
    m: int,
    of: Callable[[LowerBounds, float], Mapping[str, float]],
    messages: bool,
    most_s: float,
    more: Sequence[int] = (),
) -> None:
    """Lift the bounds of schedules with m microbatches to the values of ``of`` (lower bounds of stages, most). more:
    further levels."""
    tables, cluster = tables_of(search), search.cluster
    paced = tables.overlaps_reduction(
        m
    )  # with few microbatches much of a step's other work may hide: then by paces alone
    levels = list(dict.fromkeys([*more, *tables.bounded_levels(m)]))
    most = most_s if paced else raise_by_overlap(most_s, m, cluster, tables.hidden_s)
    for name, bound in of(tables.lower_bounds_of(m, levels, messages=messages), most).items():
        true = bound if paced else lower_by_overlap(bound, m, cluster, tables.hidden_s)
        search.bounds[m, name] = max(true, search.bounds[m, name], tables.least_share(m))
    if {LEAST_MEMORY_SCHEDULE, MOST_MEMORY_SCHEDULE} <= {*_others(search)}:
        search.bounds[m, MOST_MEMORY_SCHEDULE] = max(
            search.bounds[m, MOST_MEMORY_SCHEDULE], search.bounds[m, LEAST_MEMORY_SCHEDULE]
        )


def _quickly(
    search: SearchState, m: int, names: Sequence[str], floors: LowerBounds, most: float
) -> Mapping[str, float]:
    return family_bounds(floors, m, names, tables_of(search).cuts, tables_of(search).usable * search.memory_share, most)


def _closely(search: SearchState, m: int, name: str, floors: LowerBounds, most: float) -> dict[str, float]:
    """A bound of one schedule that takes longer than ``family_bounds``."""
    tables = tables_of(search)
    if name == PIPEDREAM:  # its pipelines have no fill: what is proven of the slowest stage is all
        return {name: 0.0}
    if name in CHUNKED:
        return {name: chunk_bound(floors, m, name, chunk_numbers(search, name), limit_groups(m, tables.cuts), most)}
    return {name: bound_of(floors, len(tables.usable), m, name, tables.cuts, most, 1)}


MAX_ROWS = 2  # pairs of prices that a case is looked at with


def concurrent_microbatches(schedule: str, p: int, m: int, v: int) -> list[int]:
    """Per chunk, in the order of the layers, how many microbatches of it its group holds when it holds as many of each
    of its other chunks.

    Interleaved at the end of the warm-up: n forwards are done, g of a chunk at a time, and then of the next group of
    microbatches, which may be one smaller. zb-v, from m = 2p − 1 on, as stage s runs its first I: 2p − s − 1 and
    s + 1. Else one of each, while the last chunk runs the first.
    """
    places = virtual_order(schedule, p, v)
    if schedule != "interleaved":
        steady = m >= 2 * p - 1
        return [(s + 1 if chunk else 2 * p - s - 1) if steady else 1 for s, chunk in places]
    size = min(m, (in_flight_formula(schedule, p - 1, p, m, v) - 1) // (v - 1))
    held = []
    for k, chunk in places:
        done = min(m * v, in_flight_formula(schedule, k, p, m, v))
        first = min(size, max(0, done - chunk * size))
        second = min(max(0, done - v * size), size - 1) if chunk == 0 else 0
        held.append(first + second)
    return held


def chunk_bound(
    floors: LowerBounds, m: int, schedule: str, chunks: Sequence[int], constraints: StageConstraints, most: float = inf
) -> float:
    """A lower bound on pipelines with m microbatches and any of these numbers of chunks, or ``most`` where that is
    less; inf where no such pipeline exists."""
    layers = floors.pace_s.shape[1]
    limits = [max(option.limit_bytes, default=0.0) for option in floors.options]
    pace = least_sums(floors.pace_s, constraints)
    sums = [least_sums(row.value, constraints) for row in floors.rows]
    cases = []
    for o, option in enumerate(floors.options):
        for p, _ in group_counts(layers, option, (min(chunks),), constraints):
            priced = [one[o] - p * limits[o] * max(row.byte, row.saved_byte) for one, row in zip(sums, floors.rows)]
            cases.append((m * max(float(pace[o]), *map(float, priced), 0.0) / p, o, p))
    if not cases:
        return inf
    heapify(cases)
    bound = most
    while cases and cases[0][0] < bound:
        low, o, p = heappop(cases)
        hopeful = [(float(one[o]) - p * limits[o] * row.byte, row) for one, row in zip(sums, floors.rows) if row.byte]
        rows = [row for value, row in sorted(hopeful, key=lambda one: -one[0])[:MAX_ROWS] if m * value / p > low]
        for v in (v for v in chunks if p * v <= layers):
            sum_s = _with_rows(floors, o, (schedule, p, m, v), rows, constraints, most)
            bound = min(bound, max(low, m * sum_s / p))
    return bound


def _with_rows(
    floors: LowerBounds, o: int, case: tuple[str, int, int, int], rows: Sequence[LagrangianBound],
    constraints: StageConstraints, most: float,
) -> float:  # fmt: skip
    """Σ_k T_k at least, by the best of some rows: one option, and (schedule, p, m, v)."""
    _, p, m, _ = case
    in_flight = np.array(concurrent_microbatches(*case), dtype=float)
    limit = max(floors.options[o].limit_bytes, default=0.0)
    pace = mask_forbidden(floors.pace_s[o], constraints)
    pace = np.where(m * pace <= most, pace, inf)
    best_s = 0.0
    for row in rows:
        theta = np.minimum(1.0, row.byte * in_flight / row.saved_byte) if row.saved_byte else np.ones(len(in_flight))
        best_s = max(best_s, _least(pace, row.value[o], theta) - p * limit * row.byte)
    return best_s


def _least(pace: Floats, value: Floats, theta: Floats) -> float:
    """The least Σ_c pace + θ_c (value − pace) of as many runs of layers as there are θ; pace: inf where none may be."""
    at = np.isfinite(pace)
    more = np.where(at, value, 0.0) - np.where(at, pace, 0.0)
    paces = {share: pace + share * more for share in set(theta.tolist())}
    reached = np.full(len(pace) + 1, inf)
    reached[0] = 0.0
    for share in theta.tolist():
        reached = (reached[:-1, None] + paces[share]).min(axis=0)
    return float(reached[-1])


HALVINGS = 6  # of the range of a bound


def family_bounds(
    floors: LowerBounds, m: int, schedules: Sequence[str], cuts: StageConstraints, usable: Floats, most: float = inf
) -> dict[str, float]:
    """Schedule → seconds that bound every pipeline with m microbatches from below, or that are at least ``most``.
    schedules: from simple to involved; usable [devices]: bytes of each."""
    single_only = not any(name in CHUNKED for name in schedules)
    quick = inf if single_only else quick_bound(floors, m, limit_groups(m, cuts))
    bounds = dict.fromkeys(schedules, quick)
    single = [name for name in schedules if name not in CHUNKED]
    for name in single if single_only else single[-1:]:  # zb-h1 holds the least and comes last
        bounds[name] = work = _work(floors, m, name, cuts, usable)
        if work < quick and isfinite(most):
            bounds[name] = _slowest(floors, m, name, cuts, len(usable), work, most)
        if single_only and name == "gpipe" and isfinite(most):
            bounds[name] = max(bounds[name], _exact(floors, m, name, cuts, len(usable), most))
    if not single_only:
        bounds |= dict.fromkeys(single, bounds[single[-1]] if single else 0.0)
    return bounds


def _work(floors: LowerBounds, m: int, schedule: str, cuts: StageConstraints, usable: Floats) -> float:
    """Seconds of all work, spread evenly over the devices."""
    possible = min(floors.pace_s.shape[1], len(usable))
    devices = np.array([option.num_devices for option in floors.options])[:, None, None]
    values = [floors.pace_s, *(row.value for row in floors.rows)]
    sums = [sums_by_count((devices * value).min(axis=0), possible, cuts) for value in values]
    least, most = cuts.stages
    works = []
    for p in range(least, min(most or possible, possible) + 1):
        q = min(in_flight_formula(schedule, k, p, m) for k in range(p))
        prices = [0.0, *(max(row.byte, row.saved_byte / q) for row in floors.rows)]
        works.append(max(float(one[p]) - float(usable.sum()) * price for one, price in zip(sums, prices)))
    return m * max(min(works, default=inf), 0.0) / len(usable)


def _slowest(
    floors: LowerBounds, m: int, schedule: str, cuts: StageConstraints, num_devices: int, low_s: float, high_s: float
) -> float:
    """The least seconds of the slowest stage, by bisection from ``low_s``, which is proven, to ``high_s``."""
    sizes, heads = _by_size(floors, m, schedule, cuts)
    counts = np.array([*sizes, np.inf])

    def enough(limit_s: float) -> bool:
        fits = np.concatenate([heads <= limit_s, np.ones((1, *heads.shape[1:]), dtype=bool)])
        needed = counts[fits.argmax(axis=0)]
        return bool(least_sums(needed[None], cuts)[0] <= num_devices)

    if low_s >= high_s or not enough(high_s):
        return max(low_s, high_s)
    for _ in range(HALVINGS):
        middle = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle) if enough(middle) else (middle, high_s)
    return low_s


def _by_size(floors: LowerBounds, m: int, schedule: str, cuts: StageConstraints) -> tuple[list[int], Floats]:
    """(numbers of devices, ascending; [numbers, L, L + 1] the least m t + σ of a stage on so many)."""
    layers = floors.pace_s.shape[1]
    allowed = cuts.allowed(*np.indices((layers, layers + 1)))
    alone, others = (min(in_flight_formula(schedule, k, p, m) for k in range(p)) for p in (1, 2))
    by_devices: dict[int, Floats] = {}
    for o, option in enumerate(floors.options):
        pace = floors.pace_s[o]
        for row in floors.rows:
            price = np.full(pace.shape, max(row.byte, row.saved_byte / others))  # two stages or more
            price[0, layers] = max(row.byte, row.saved_byte / alone)
            pace = np.maximum(pace, row.value[o] - max(option.limit_bytes, default=0.0) * price)
        pace = np.where(allowed, m * pace, inf)
        by_devices[option.num_devices] = np.minimum(by_devices.get(option.num_devices, pace), pace)
    return sorted(by_devices), np.stack([by_devices[size] for size in sorted(by_devices)])


def _exact(floors: LowerBounds, m: int, schedule: str, cuts: StageConstraints, num_devices: int, most: float) -> float:
    return bound_of(floors, num_devices, m, schedule, cuts, most, 2)
