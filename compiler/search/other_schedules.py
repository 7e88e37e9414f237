"""The schedules other than the base schedule, on the same cost tables.

Pipelines are searched under one schedule, 1F1B if it is open (``Space.base_schedule``). When its best ones are known,
the other open schedules are tried on the tables of the microbatch counts that matter: those with the fastest pipelines,
and the one whose slowest stage has the least work, because the others save idle time alone. Nothing is composed for
these. The less idle time, the fewer microbatches are best: so smaller counts than the best one with several chunks are
tried in turn, until one is no faster; tables of the options that may win are made for these. In small graphs every
count with tables is tried for chunks, since the best count of the base schedule may be far from theirs.

    gpipe, zb-h1           the best pipelines as they are cut; every stage takes the row of its submesh that is fastest
                           among those that fit with the microbatches in flight of the schedule
    interleaved, zb-v      the best divisions into chunks under one option, of no more stages than microbatches
                           (``virtual_stages``)

The clock counts a third of a stage's pace each for forward, backward of inputs and of weights. The best pipeline of
each schedule is offered if it is faster than the base schedule's best by more than ``TIE_TOLERANCE``; the built plans
decide. ``optimality`` has the bounds of these schedules.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from ..errors import InfeasibleError
from ..pipeline.families import PIPEDREAM, in_flight_formula
from ..pipeline.stage_dp import RankingLimits, describe_pipeline, solve
from ..pipeline.table import InfeasiblePipeline, Pipeline, PipelineSolution, PipelineTable, StageChoice
from ..pipeline.virtual_stages import least_sums, limit_groups, solve_chunked
from .space import CHUNKED, SCHEDULES, Submesh
from .state import INTERRUPTED, Candidate, SearchState
from .tables import ABOVE_LIMIT, NO_LIMIT, tables_of

__all__ = [
    "TIE_TOLERANCE",
    "chunk_numbers",
    "divisions_above_limit",
    "faster_without_limit",
    "schedule_error",
    "simplest_index",
    "with_other_schedules",
]  # fmt: skip

TIE_TOLERANCE = 1e-3  # of a step: schedules within this are as good, and the simpler one is taken
MAX_COUNTS = 2  # microbatch counts to try: those with the fastest pipelines of the base schedule
MAX_REFITTED = 6  # pipelines of a count that get other rows
MAX_PER_FAMILY = 4  # candidates of a schedule where the base schedule is not open
MAX_PER_STAGE_COUNT = 4  # pipelines of a number of stages
MAX_VISITS = 200  # partial pipelines to expand
MAX_DIVISIONS = 3  # divisions into chunks to time, per schedule and count

Pairs = Sequence[tuple[Submesh, int]]  # (submesh, number of a level)


def with_other_schedules(
    search: SearchState,
    base: Sequence[Candidate],
    earlier: Sequence[Candidate] = (),
    counts: Collection[int] | None = None,
) -> list[Candidate]:
    """The pipelines of the base schedule and those that the other open schedules make of its tables, fastest first.

    earlier: the other schedules' pipelines from an earlier call; then ``counts`` are the microbatch counts with new
    tables.
    """
    open_ = search.space.schedules
    open_base = [candidate for candidate in base if candidate.schedule in open_]
    others = [name for name in open_ if name != search.space.base_schedule]
    offered = list(earlier)
    if others and base and (counts is None or counts):
        with search.timed("schedules"):
            try:
                if not open_base or not (search.cut_short or time.perf_counter() > search.deadline):
                    best_s = min((candidate.clock_s for candidate in open_base), default=inf)
                    offered = _offered(search, base, others, best_s * (1 - TIE_TOLERANCE), earlier, counts)
            except KeyboardInterrupt:
                if not open_base and not earlier:
                    raise
                search.cut_short = INTERRUPTED
    return sorted([*open_base, *offered], key=lambda candidate: candidate.clock_s)


def divisions_above_limit(search: SearchState) -> list[Candidate]:
    """The best divisions into chunks slightly above the memory limit, for searches in which no estimate fits. Estimates
    of several chunks are too high: they add up temporary bytes that are not held together."""
    tables, names = tables_of(search), [name for name in search.space.schedules if name in CHUNKED]
    with search.timed("schedules"):
        limits = dict.fromkeys(names, inf)
        divisions = [
            candidate
            for m, rows in (sorted(tables.rows_in_use.items()) if names else ())
            for candidate in _divided(search, m, rows, limits, ABOVE_LIMIT)
        ]
    return sorted(divisions, key=lambda candidate: candidate.clock_s)


def faster_without_limit(search: SearchState, m: int, base: Sequence[Candidate], limit_s: float) -> bool:
    """True if another open schedule would be faster than ``limit_s`` with m microbatches and no memory limit. Otherwise
    leaner rows do not help it. base: pipelines of the base schedule."""
    tables = tables_of(search)
    limits = {name: limit_s for name in search.space.schedules if name != search.space.base_schedule}
    with search.timed("schedules"):
        return bool(limits) and any(True for _ in _with_count(search, m, base, limits, tables.rows(m), NO_LIMIT))


def simplest_index(schedules: Sequence[str], steps_s: Sequence[float]) -> int:
    """The index of the plan to take: the fastest, or of those as good the one with the simplest schedule."""
    least = min(steps_s)
    ties = [index for index, step_s in enumerate(steps_s) if step_s <= least * (1 + TIE_TOLERANCE)]
    ranks = [*SCHEDULES, PIPEDREAM]
    return min(ties, key=lambda index: (ranks.index(schedules[index]), steps_s[index]))


# ---- candidates


def _offered(
    search: SearchState, base: Sequence[Candidate], others: Sequence[str], most: float, earlier: Sequence[Candidate],
    counts: Collection[int] | None,
) -> list[Candidate]:  # fmt: skip
    """The best candidates of each schedule: one if they compete with the base schedule, more if they stand alone."""
    tables, competing = tables_of(search), search.space.base_schedule in search.space.schedules
    by_family: dict[str, list[Candidate]] = {name: [] for name in others}
    limits = dict.fromkeys(others, most)

    def offer(candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            by_family[candidate.schedule].append(candidate)
            if competing:
                limits[candidate.schedule] = min(limits[candidate.schedule], candidate.clock_s)

    offer(earlier)
    for m in (m for m in _counts(base, most) if counts is None or m in counts):
        guided = [candidate for candidate in base if candidate.microbatches == m]
        offer(_with_count(search, m, guided, limits, tables.rows_in_use[m]))
    for m in (m for m in _others_known(search, base, most) if counts is None or m in counts):
        offer(_divided(search, m, tables.rows_in_use[m], {name: limits[name] for name in others if name in CHUNKED}))
    divided = [candidate for name in CHUNKED for candidate in by_family.get(name, ())]
    best = min(divided, key=lambda candidate: candidate.clock_s, default=None)
    for candidate in _with_fewer(search, best, limits) if best not in earlier else ():
        by_family[candidate.schedule].append(candidate)
    count = 1 if competing else MAX_PER_FAMILY
    return [
        candidate
        for some in by_family.values()
        for candidate in sorted(some, key=lambda candidate: candidate.clock_s)[:count]
    ]


def _with_fewer(search: SearchState, best: Candidate | None, limits: Mapping[str, float]) -> Iterator[Candidate]:
    """Divisions into chunks with fewer microbatches than the best one, as long as they get faster."""
    tables = tables_of(search)
    names = [name for name in limits if name in CHUNKED]
    while best is not None:
        best_s, m = best.clock_s, max((m for m in tables.counts if m < best.microbatches), default=0)
        if not m or search.cut_short or tables.least_share(m) >= best_s:
            return
        pairs = tables.uniform_rows(m, best_s * (1 - TIE_TOLERANCE))
        faster = list(_divided(search, m, pairs, dict.fromkeys(names, best_s * (1 - TIE_TOLERANCE)))) if pairs else []
        yield from faster
        best = min(faster, key=lambda one: one.clock_s, default=None)


def _counts(base: Sequence[Candidate], limit_s: float) -> list[int]:
    """The microbatch counts to look at: those of the fastest pipelines, and of the one whose slowest stage has the
    least work, if that leaves hope."""
    works = {candidate: candidate.microbatches * candidate.pace_s + candidate.once_s for candidate in base}
    hopeful = [
        candidate for candidate in sorted(base, key=lambda candidate: candidate.clock_s) if works[candidate] < limit_s
    ]
    counts = list(dict.fromkeys(candidate.microbatches for candidate in hopeful))[:MAX_COUNTS]
    least = [min(hopeful, key=works.__getitem__).microbatches] if hopeful else []
    return list(dict.fromkeys([*counts, *least]))


def _others_known(search: SearchState, base: Sequence[Candidate], limit_s: float) -> list[int]:
    """The other counts with tables, if the graph is small: its best division into chunks may have a count for which the
    base schedule has no pipeline."""
    tables = tables_of(search)
    if not search.small or not any(name in CHUNKED for name in search.space.schedules):
        return []
    return sorted(set(tables.rows_in_use).difference(_counts(base, limit_s)))


def _with_count(
    search: SearchState,
    m: int,
    found: Sequence[Candidate],
    limits: Mapping[str, float],
    known: Pairs,
    room: float = 1.0,
) -> Iterator[Candidate]:
    """Pipelines with m microbatches of every schedule, faster on the clock than its limit. found: the base schedule's;
    known: the rows they are made of; room: the fraction of the memory that they may fill."""
    tables = tables_of(search)
    best = sorted(found, key=lambda pipeline: pipeline.clock_s)[:MAX_REFITTED]
    used = {row.submesh for pipeline in best for row in pipeline.rows}
    pairs = [pair for pair in known if pair[0] in used]
    single = [name for name in limits if name not in CHUNKED]
    table = tables.table(m, pairs, room) if single and pairs else None
    for schedule in single if table is not None else ():
        assert table is not None
        tried = {pipeline.stages: pipeline for pipeline in _refitted(table, m, schedule, pairs, best)}
        for p in sorted({len(pipeline.rows) for pipeline in best}):
            tried |= {
                pipeline.stages: pipeline for pipeline in _searched(search, table, m, schedule, p, limits[schedule])
            }
        if not tried and search.space.base_schedule not in search.space.schedules:
            tried = {
                pipeline.stages: pipeline for pipeline in _searched(search, table, m, schedule, None, limits[schedule])
            }
        candidates = [tables.candidate(m, schedule, pipeline, pairs, table) for pipeline in tried.values()]
        yield from (pipeline for pipeline in candidates if pipeline.clock_s < limits[schedule])
    chunked_ = {name: limit for name, limit in limits.items() if name in CHUNKED}
    if chunked_:
        yield from _divided(search, m, known, chunked_, room)


def _refitted(
    table: PipelineTable, m: int, schedule: str, pairs: Pairs, candidates: Iterable[Candidate]
) -> Iterable[Pipeline]:
    """These pipelines with rows that fit under another schedule."""
    rows: dict[Submesh, list[int]] = {}
    for index, (sub, _) in enumerate(pairs):
        rows.setdefault(sub, []).append(index)
    for candidate in candidates:
        p, stages = len(candidate.rows), []
        for k, (stage, row) in enumerate(zip(candidate.pipeline.stages, candidate.rows)):
            entries = np.array(rows.get(row.submesh, []), dtype=np.intp), stage.first_layer, stage.end_layer
            q = in_flight_formula(schedule, k, p, m)
            bytes_held = table.resident[entries] + table.transient[entries] + q * table.saved[entries]
            limit = table.options[entries[0][0]].limit(stage.device_offset) if len(entries[0]) else 0.0
            seconds = np.where(
                bytes_held <= limit, m * table.pace_s[entries] + table.step_s[entries] + table.transfer_s[entries], inf
            )
            if not np.isfinite(seconds).any():
                break
            stages.append(StageChoice(*stage[:2], int(entries[0][seconds.argmin()]), stage.device_offset))
        else:
            yield describe_pipeline(table, m, schedule, stages)


def _searched(
    search: SearchState, table: PipelineTable, m: int, schedule: str, p: int | None, limit_s: float
) -> Sequence[Pipeline]:
    """The best pipelines of p stages, or of any number."""
    tables = tables_of(search)
    cuts = tables.cuts if p is None else replace(tables.cuts, stages=(p, p))
    limits = RankingLimits(MAX_PER_STAGE_COUNT, visits=MAX_VISITS, most=limit_s)
    answer = solve(table, m, schedule, cuts, limits, explain=False)
    return answer.pipelines if isinstance(answer, PipelineSolution) else ()


def _divided(
    search: SearchState, m: int, known: Pairs, limits: Mapping[str, float], room: float = 1.0
) -> Iterator[Candidate]:
    """The fastest divisions into chunks."""
    tables = tables_of(search)
    pairs = _uniform(search, m, known, max(limits.values()))
    table = tables.table(m, pairs, room) if pairs else None
    for schedule, limit_s in limits.items() if table is not None else ():
        assert table is not None
        answer = solve_chunked(
            table, m, schedule, chunk_numbers(search, schedule), limit_groups(m, tables.cuts), MAX_DIVISIONS, limit_s
        )
        for pipeline in answer.pipelines if isinstance(answer, PipelineSolution) else ():
            candidate = tables.candidate(m, schedule, pipeline, pairs, table)
            if candidate.clock_s < limit_s:
                yield candidate


def chunk_numbers(search: SearchState, schedule: str) -> tuple[int, ...]:
    """The numbers of chunks per stage that a schedule may have."""
    return search.space.chunks if schedule == "interleaved" else (2,)


def _uniform(search: SearchState, m: int, known: Pairs, most: float) -> Pairs:
    """The options that alone may make a pipeline in less than ``most`` seconds."""
    tables, total = tables_of(search), search.cluster.num_devices
    room = [(min(len(pair[0].offsets), total // pair[0].num_devices), pair) for pair in known]
    room = [(groups, pair) for groups, pair in room if groups > 1 and pair[0].place is None]
    if not room:
        return []
    pace = np.stack([tables.array("pace_s", sub, m, price) for _, (sub, price) in room])
    cost = np.stack([tables.array("cost", sub, m, price) for _, (sub, price) in room])
    work = least_sums(np.where(np.isfinite(cost), pace, inf), tables.cuts)
    return [pair for (groups, pair), seconds in zip(room, work) if m * seconds / groups < most]


def schedule_error(search: SearchState, found: Sequence[Candidate]) -> InfeasibleError:
    """The error where pipelines of the base schedule fit but none of the schedules that were asked for."""
    tables, others = tables_of(search), search.space.schedules
    names = " or ".join(others)
    m = min(found, key=lambda one: one.clock_s).microbatches
    reason = ""
    for schedule in (name for name in others if name in CHUNKED):
        pairs = _uniform(search, m, tables.rows_in_use[m], inf)
        table = tables.table(m, pairs) if pairs else None
        chunks = chunk_numbers(search, schedule)
        answer = (
            solve_chunked(table, m, schedule, chunks, limit_groups(m, tables.cuts), 1) if table is not None else None
        )
        if isinstance(answer, InfeasiblePipeline):
            reason = f": {answer.reason}"
    return InfeasibleError(
        f"no plan under schedule {names} fits {search.cluster.name}, but got one under "
        f"{search.space.base_schedule}{reason}; ask for schedule {search.space.base_schedule} or auto, more "
        "microbatches, or more devices"
    )
