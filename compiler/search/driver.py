"""The passes of the planner, from a graph to plans.

``make_plans`` is the list of them, ``search_plans`` the loop in its middle. ``provenance["passes"]`` has the seconds of
every pass by its name.

    name          what the pass does                                                      modules
    layouts       note the strides of tensors, if a cluster has measured exact ops        frontend/strides
    layers        cluster the ops of the graph into layers and classes of layers          frontend/layers
    floors        bound the seconds of all runs of layers, per submesh and microbatches   lower_bounds
    compose       make cost tables at several memory multipliers                          tables, intra_op/vectorised
    regular       solve cases of equal device groups, least lower bound first             regular, pipeline/regular
    stages        cut irregular pipelines by dynamic programming                          irregular, pipeline/stage_dp
    refine        solve each chosen stage as one problem under its memory limit           build_plan, intra_op/stage
    simulate      price messages between stages and time the schedule                     predict, pipeline/simulate
    memory        count the peak bytes of each stage by a run without data                memory/stage
    alternatives  find a fast data-, tensor- and pipeline-parallel plan each              alternatives

The loop::

    explore (floors, compose, regular) → build (refine, simulate) → count memory → explore on, with a plan to beat
                                           ↑                             │ it holds too much
                                           └─ correct the estimate, solve its cases again

It ends where the least bound of all cases that were not solved is no less than the best plan. Irregular plans follow
where they may gain (compose, stages; then built and counted as the others are). If estimates leave nothing, pipelines
slightly above the memory limit are tried. Small graphs then go through refine, simulate and memory once more
(``refine``), for what tables leave out.

With more than one worker a fork searches for the alternatives beside all that. The pass then has the seconds for which
the search waited.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from typing import Any

import torch

from ...costmodel.cluster import Cluster
from ...costmodel.memory import state_tensors
from ..cost.gradient_reduction import lossy_notes
from ..errors import InfeasibleError, OverfullError
from ..intra_op.vectorised.row_cache import RowCache
from ..ir.graph import Graph, op_name
from ..ir.opaque_module import opaque_notes
from ..pipeline.families import PIPEDREAM
from ..plan.plan import Plan
from ..plan.validation import notes as asynchronous_notes
from ..plan.validation import precision_notes
from ..rules import rule_for
from ..workers import ForkedTask, run_all
from .alternatives import find_alternatives, pure_strategies, why_excluded, why_far, why_infeasible, why_overfull
from .build_plan import BuiltStages, build_plan, within_memory
from .infeasible import infeasible_error
from .irregular import ABOVE_LIMIT, LEAST_GAIN, IrregularSearch
from .local_sgd import delay_notes
from .parallel_shape import Strategy
from .refine import can_refine, refine_plans, time_to_beat
from .regular import RegularSearch, is_regular_enough, is_regular_only
from .request import PlanRequest
from .space import CHUNKED, SCHEDULES, microbatch_counts
from .state import (
    INTERRUPTED,
    MIN_HIDDEN_FRACTION,
    TIE_TOLERANCE,
    TIMED_OUT,
    Candidate,
    PurePlan,
    SearchState,
    prepare_search,
    same_decisions,
)
from .tables import tables_of

__all__ = [
    "best_plans",
    "make_plan",
    "make_plans",
    "search_plans",
    "start_search",
    "with_provenance",
    "without_gc",
]

#: clock seconds per simulated second, at least, that tell of other candidates: less is due to memory
LEAST_CLOCK_RATIO = 0.98
#: candidates that are built
MAX_TRIES = 5
#: times that the stages of one candidate are solved again under a lower memory limit
MAX_MEMORY_RETRIES = 3
#: memory corrections that do not count as a try, and searches that end with corrections alone
MAX_CORRECTIONS = 8
#: times that more regular cases are explored, as what was built is slower than its clock or holds too much
MAX_ROUNDS = 8
#: pure plans whose clock is more than so many times that of the fastest one are not built
MAX_PURE_RATIO = 1.5
#: by candidate of a pure strategy, each leaner than the one before: how often its stages are solved again
PURE_RETRIES = (0, 1, 1, 1)


def make_plan(graph: Graph, cluster: Cluster, request: PlanRequest) -> Plan:
    """The best plan for ``graph`` on ``cluster``. Raises ValueError for bad input, InfeasibleError if nothing fits."""
    return make_plans(graph, cluster, request)[0]


def make_plans(
    graph: Graph,
    cluster: Cluster,
    request: PlanRequest,
    *,
    capture_s: float = 0.0,
    progress: Callable[[str, float], None] = lambda name, fraction: None,
    row_cache: RowCache | None = None,
) -> list[Plan]:
    """The ``request.count`` best plans of distinct cuts, meshes or microbatch counts, fastest first; see ``make_plan``.

    capture_s: seconds that the capture took, for the record. progress(pass, fraction) is called along the way.
    row_cache: cost-table rows of other searches, read and added to.
    """
    begin = time.perf_counter()
    search = start_search(graph, cluster, request, capture_s, progress)  # layouts, layers
    search.row_cache = row_cache
    search.alternatives = request.alternatives and cluster.num_devices > 1 and request.strategy is None
    with without_gc(), forks(search):
        start_pure_plans(search)  # alternatives, in a fork
        plans = best_plans(search, request.count)  # floors to memory
        alternatives = compare_pure_plans(search, plans[0])  # alternatives
    search.passes["total"] = time.perf_counter() - begin
    return [with_provenance(search, plan, [] if index else alternatives) for index, plan in enumerate(plans)]


def best_plans(search: SearchState, top_k: int = 1) -> list[Plan]:
    """The best plans of a search, fastest first. Raises InfeasibleError if nothing fits."""
    plans, error = search_plans(search, top_k)
    if not plans:
        raise error or schedule_error(search) or infeasible_error(search)
    return plans


def search_plans(search: SearchState, top_k: int = 1) -> tuple[list[Plan], InfeasibleError | None]:
    """(the best plans, fastest first; if there are none, the error of the last candidate)."""
    plans: list[Plan] = []
    error: InfeasibleError | None = None
    tried: set[tuple[Any, ...]] = set()
    regular, irregular = RegularSearch(search), IrregularSearch(search)
    for _ in range(MAX_ROUNDS):
        candidates: list[Candidate] = []
        hurried = isfinite(search.deadline) and not plans
        with _keeping(plans, search):
            candidates = regular.explore(time_to_beat(plans, top_k), top_k, hurried)  # floors, compose, regular
        if not candidates:
            break
        plans, missed = _build_plans(search, candidates, top_k, tried, plans, regular.solved_again)
        error = missed or error
    search.bound_s, search.cases = regular.bound_s(time_to_beat(plans, 1)), regular.record
    if not is_regular_enough(search) or not (plans or is_regular_only(search)):
        any_plan = search.request is not None and search.request.regular == "any"
        limit_s = time_to_beat(plans, top_k) * (1 - (0.0 if any_plan else LEAST_GAIN))
        search.regular_s = plans[0].prediction.step_s if plans else inf
        again = partial(irregular.solved_again, limit_s=limit_s)
        candidates = []
        with _keeping(plans, search):
            candidates = irregular.candidates(limit_s)  # compose, stages
        search.bound_s = min(search.bound_s, irregular.bound_s)
        every, missed = _build_plans(search, candidates, top_k, tried, plans, again)
        better = [plan for plan in every if plan.prediction.step_s < limit_s and not any(plan is one for one in plans)]
        if better:
            plans = sorted([*plans, *better], key=lambda plan: plan.prediction.step_s)[:top_k]
        error = missed or error
    if not plans:  # estimates may be too high
        queue = [] if is_regular_only(search) else list(irregular.above_limit())
        regular = RegularSearch(search, ABOVE_LIMIT)
        for _ in range(MAX_ROUNDS):
            if plans or not (queue := queue or regular.explore(inf)):
                break
            plans, missed = _build_plans(search, queue, top_k, tried)
            error, queue = missed or error, []
    if can_refine(search):
        plans = refine_plans(search, plans, top_k)  # refine, simulate, memory
    return with_bound(search, plans), None if plans else error


@contextmanager
def _keeping(plans: Sequence[Plan], search: SearchState) -> Iterator[None]:
    """A scope in which Ctrl-C ends the search for more where there are plans already."""
    try:
        yield
    except KeyboardInterrupt:
        if not plans:
            raise
        search.cut_short = INTERRUPTED


def with_bound(search: SearchState, plans: Sequence[Plan]) -> list[Plan]:
    """The plans with the bound of the search."""
    return [
        replace(p, prediction=replace(p.prediction, bound_s=min(p.prediction.step_s, search.bound_s))) for p in plans
    ]


def schedule_error(search: SearchState) -> InfeasibleError | None:
    """The error where nothing fits under the schedules that were asked for, but something under 1F1B; else None."""
    base, names = search.space.base_schedule, search.space.schedules
    if base in names or not tables_of(search).fits():
        return None
    reason, strategy, layers = "", search.strategy, len(search.layering.layers)
    chunks = [2 if name == "zb-v" else min(search.space.chunks) for name in names if name in CHUNKED]
    if chunks and len(chunks) == len(names):
        stages = strategy.num_stages if strategy is not None else 2
        if stages == 1:
            reason = ": virtual stages need two stages or more"
        elif stages * min(chunks) > layers:
            needed = f"{stages} stages of {min(chunks)} virtual stages each need {stages * min(chunks)} layers"
            reason = f": {needed}, but the model has {layers}"
    return InfeasibleError(
        f"no plan under schedule {' or '.join(names)} fits {search.cluster.name}, but got one under {base}{reason}; "
        f"ask for schedule {base} or auto, more microbatches, or more devices"
    )


def start_search(
    graph: Graph, cluster: Cluster, request: PlanRequest, capture_s: float, progress: Callable[[str, float], None]
) -> SearchState:
    """The state of a search before its first pass. Raises ValueError for what can be refused at once."""
    begin = time.perf_counter()
    with without_gc():
        search = prepare_search(graph, cluster, request)
    limit = request.time_limit_s
    search.passes["capture"], search.workers = capture_s, request.workers
    search.progress, search.deadline = progress, inf if limit is None else begin + limit
    return search


def start_pure_plans(search: SearchState) -> None:
    """Search for the pure plans in a fork if alternatives are wanted and there is a worker for it."""
    if search.alternatives and search.workers > 1:
        search.pure_task = ForkedTask(partial(_pure_plans, search, True), True)


def _pure_plans(search: SearchState, forks: bool = False) -> dict[str, PurePlan]:
    """The best plan of each pure strategy. forks: whether each is built in a process of its own."""
    with search.keeping():
        explored = {name: _explore_pure(search, strategy) for name, strategy in pure_strategies(search).items()}
        least_s = min(
            (one.candidate.clock_s for one in explored.values() if isinstance(one, _ExploredPure)), default=inf
        )
        works = [partial(_build_pure, one, MAX_PURE_RATIO * least_s) for one in explored.values()]
        return dict(zip(explored, run_all(works) if forks else [work() for work in works]))


@dataclass(frozen=True, eq=False)
class _ExploredPure:
    """The search for the plan of a pure strategy, and the candidate that is fastest on the clock."""

    search: SearchState
    regular: RegularSearch
    candidate: Candidate


def _explore_pure(search: SearchState, strategy: Strategy) -> _ExploredPure | PurePlan:
    """The fastest candidate of a pure strategy, or the reason why there is none."""
    if why := why_excluded(search, strategy):
        return PurePlan(why=why)
    inner = replace(
        search,
        strategy=strategy,
        counts=tuple(microbatch_counts(search.global_batch, strategy)),
        passes={},
        tables=None,
        workers=1,
        pure_task=None,
        memory_corrections={},
        solved_stages={},
    )
    regular = RegularSearch(inner)
    try:
        found = regular.explore(inf)
        if inner.cut_short == INTERRUPTED:  # all alternatives are
            raise KeyboardInterrupt
        return _ExploredPure(inner, regular, found[0]) if found else PurePlan(why=why_infeasible(inner))
    except ValueError as refused:
        return PurePlan(why=str(refused))


def _build_pure(explored: _ExploredPure | PurePlan, most_s: float) -> PurePlan:
    """The plan of a pure strategy, or of a leaner candidate where the fastest does not fit. One whose clock is above
    ``most_s`` is not built."""
    if isinstance(explored, PurePlan):
        return explored
    search, regular, candidate = explored.search, explored.regular, explored.candidate
    if candidate.clock_s > most_s:
        return PurePlan(why=why_far(candidate.clock_s))
    why, missed = "", None
    try:
        for retries in PURE_RETRIES:
            if missed is not None:
                if not (again := regular.solved_again(candidate, missed, between=False)):
                    break
                candidate = min([again[0], *regular.explore(again[0].clock_s)], key=lambda one: one.clock_s)
            built: BuiltStages = {}
            plan = build_plan(search, candidate, built=built)
            fitting, missed = _fit_memory(search, plan, candidate, inf, built, retries)
            if fitting is not None or missed is None:
                return PurePlan(fitting)
            why = why or why_overfull(plan, missed)
    except ValueError as refused:
        return PurePlan(why=str(refused))
    return PurePlan(why=why)


def compare_pure_plans(search: SearchState, plan: Plan) -> list[dict[str, Any]]:
    """The best plan of each pure strategy beside ``plan``; none if they are not wanted or there was no time."""
    if not search.alternatives or search.cut_short:
        return []
    with search.timed("alternatives"):
        task, left_s = search.pure_task, search.deadline - time.perf_counter()
        try:
            if task is not None and task.ready(left_s):
                return find_alternatives(plan, task.result())
            if task is None and left_s > len(pure_strategies(search)) * search.build_s:
                return find_alternatives(plan, _pure_plans(search))
            why = TIMED_OUT
        except KeyboardInterrupt:  # the plan itself is complete
            why = INTERRUPTED
        search.cut_short = f"{why} while alternatives were looked for"
        return []


@contextmanager
def forks(search: SearchState) -> Iterator[None]:
    """A scope in which the pure plans may be searched by a fork; at its end it is gone."""
    try:
        yield
    finally:
        if search.pure_task is not None:
            search.pure_task.drop()
        search.pure_task = None


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector. The search makes millions of small acyclic objects, and the collector would go
    through them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ---- from candidates to plans


def _build_plans(
    search: SearchState,
    queue: Sequence[Candidate],
    top_k: int,
    tried: set[tuple[Any, ...]],
    plans: Sequence[Plan] = (),
    solved_again: Callable[[Candidate, OverfullError], list[Candidate]] = lambda candidate, missed: [],
) -> tuple[list[Plan], InfeasibleError | None]:
    """(plans that fit, fastest first; the error of the last candidate that does not). queue: candidates, fastest first.
    tried: the keys of candidates that were built before, which is added to. plans: those that were built before.
    solved_again: the candidates that take the place of one that holds too much, and of others like it.

    A candidate is built and simulated unless its clock, which counts a little less than the simulation, shows that it
    loses, even if all that may overlap does. The memory of those that are then among the best is counted. An excess
    corrects the memory estimates of the shape, and with them the candidates that are left.
    """
    queue, plans = list(queue), list(plans)
    error: InfeasibleError | None = None
    base_schedule = search.space.base_schedule
    tries, corrections = max(MAX_TRIES, 2 * top_k), MAX_CORRECTIONS
    tries += sum(candidate.schedule != base_schedule for candidate in queue)
    #: schedule, meshes → the least clock seconds per simulated second so far
    clock_ratios = dict[Hashable, float]()
    while queue and tries:
        candidate = queue.pop(0)
        limit_s = time_to_beat(plans, top_k)
        hidden_s = candidate.hidden_s if candidate.hidden_s > MIN_HIDDEN_FRACTION * candidate.clock_s else 0.0
        least_s = (candidate.clock_s - hidden_s) / (1 + search.clock_error)
        kind = candidate.schedule, frozenset(row.submesh.shape for row in candidate.rows)
        if least_s >= limit_s * clock_ratios.get(kind, 1.0):
            continue
        if plans and search.must_stop():
            break
        key = candidate.microbatches, candidate.schedule, tuple(_shapes(candidate)), f"{candidate.clock_s:.6g}"
        if key in tried:  # the same pipeline at another memory multiplier
            continue
        tried.add(key)
        tries -= 1
        begin = time.perf_counter()
        try:
            built: BuiltStages = {}
            plan = _build_interruptibly(search, candidate, bool(plans), built)
            search.clocks.append((candidate.clock_s, plan.prediction.step_s))
            ratio = max(candidate.clock_s / plan.prediction.step_s, LEAST_CLOCK_RATIO)
            clock_ratios[kind] = min(ratio, clock_ratios.get(kind, 1.0))
            is_simpler = all(_rank(candidate.schedule) < _rank(one.schedule) for one in plans)
            slower = plan.prediction.step_s >= limit_s * (1 + TIE_TOLERANCE * is_simpler)
            if slower or any(same_decisions(plan, other) for other in plans):
                continue
            retries = 0 if plans and search.must_stop() else MAX_MEMORY_RETRIES
            fitting, missed = _fit_memory(search, plan, candidate, limit_s, built, retries)
            search.build_s = max(search.build_s, time.perf_counter() - begin)
            if fitting is not None and not any(same_decisions(fitting, other) for other in plans):
                plans = sorted([*plans, fitting], key=lambda plan: plan.prediction.step_s)
            if missed is None:
                continue
            error = missed
            if fitting is not None and fitting.prediction.step_s < candidate.clock_s * (1 + MIN_HIDDEN_FRACTION):
                continue
            if not corrections:
                continue
            again = solved_again(candidate, missed)
            like = {(candidate.microbatches, row.submesh.shape) for row in candidate.rows}
            queue = [one for one in queue if (one.microbatches, one.rows[0].submesh.shape) not in like or not again]
            new = [one for one in again if _shapes(one) != _shapes(candidate)]
            queue = sorted([*queue, *new], key=lambda other: other.clock_s)
            tries, corrections = tries + 1, corrections - 1
        except KeyboardInterrupt:
            if not plans:
                raise
            search.cut_short = INTERRUPTED
            break
    if plans:
        first = simplest_index([plan.schedule for plan in plans], [plan.prediction.step_s for plan in plans])
        plans.insert(0, plans.pop(first))
    return plans[:top_k], error


def simplest_index(schedules: Sequence[str], steps_s: Sequence[float]) -> int:
    """The index of the plan to take: the fastest, or of those as good the one with the simplest schedule."""
    least = min(steps_s)
    ties = [index for index, step_s in enumerate(steps_s) if step_s <= least * (1 + TIE_TOLERANCE)]
    return min(ties, key=lambda index: (_rank(schedules[index]), steps_s[index]))


def _rank(schedule: str) -> int:
    """The place of a schedule, from simple to involved."""
    return [*SCHEDULES, PIPEDREAM].index(schedule)


def _shapes(candidate: Candidate) -> list[tuple[int, int, tuple[int, ...], float]]:
    """(first layer, end layer, mesh shape, estimated bytes) per stage; the same for equal rows of different levels."""
    pipeline = candidate.pipeline
    return [
        (stage.first_layer, stage.end_layer, row.submesh.shape, round(used))
        for stage, row, used in zip(pipeline.stages, candidate.rows, pipeline.peak_bytes)
    ]


def _fit_memory(
    search: SearchState,
    plan: Plan,
    candidate: Candidate,
    limit_s: float,
    built: BuiltStages,
    retries: int,
) -> tuple[Plan | None, OverfullError | None]:
    """(the plan of a candidate with its counted memory; the error of the first attempt, if that holds too much).

    Stages that hold too much are solved again under a lower limit, ``retries`` times. The plan is None if it then takes
    ``limit_s`` or longer, or still holds too much. built: the candidate's stages so far.
    """
    first_error: OverfullError | None = None
    limits: tuple[float, ...] = ()
    for times in range(1 + retries):
        try:
            return within_memory(search, plan, candidate), first_error
        except OverfullError as missed:
            first_error = first_error or missed
            before, limits = limits, tuple(map(min, limits or missed.leaner, missed.leaner))
        if limits == before or times == retries:  # no strategy of the stages is as lean
            break
        before_limits, plan = plan, build_plan(search, candidate, limits, built)
        if plan.prediction.step_s >= limit_s or same_decisions(plan, before_limits):
            break
    return None, first_error


def _build_interruptibly(search: SearchState, candidate: Candidate, has_plans: bool, built: BuiltStages) -> Plan:
    """The plan of a candidate. While there is no plan yet (not ``has_plans``), one Ctrl-C ends the search only after
    this plan is complete."""
    try:
        return build_plan(search, candidate, built=built)
    except KeyboardInterrupt:
        if has_plans or search.cut_short:
            raise
        search.cut_short = INTERRUPTED
        return build_plan(search, candidate, built=built)


# ---- for the record


def with_provenance(search: SearchState, plan: Plan, others: Sequence[dict[str, Any]]) -> Plan:
    """The plan with its alternatives, its notes and the record of the search."""
    provenance = {
        "meshwright": "0.1.0",
        "torch": torch.__version__,
        "passes": {name: round(seconds, 4) for name, seconds in search.passes.items()},
        "cluster": search.cluster.fingerprint(),
        "strategy": None if search.strategy is None else search.strategy.to_json(),
        "constraints": [text for _, text in search.constraints.said],
        "cases": search.cases,
        "clocks": [[clock_s, step_s] for clock_s, step_s in search.clocks],
    }
    notes = (*_notes(search, plan), *plan.prediction.notes)
    prediction = replace(plan.prediction, alternatives=tuple(others), notes=notes)
    return replace(plan, prediction=prediction, provenance=provenance, graph=search.graph)


def _notes(search: SearchState, plan: Plan) -> list[str]:
    unknown = Counter(op_name(n) for n in search.graph.ops() if op_name(n) != "getitem" and rule_for(n).is_unknown(n))
    notes = [f"no rule for {name} ({count}×): replicated" for name, count in unknown.items()]
    notes += [*opaque_notes(search.graph), *search.graph.notes]
    notes += [text for text in (state_tensors(plan.optimizer)[1],) if text]
    notes += [*precision_notes(plan), *lossy_notes(plan.stages, plan.codes), *asynchronous_notes(plan)]
    if search.space.communication.is_lossy:
        notes += delay_notes(plan)
    if search.cut_short:
        notes.append(f"the search ended early, as {search.cut_short}: the bound is of what it had seen")
    shapes = {(len(stage.devices), stage.mesh_shape) for stage in plan.stages}
    if len(shapes) > 1 and isfinite(search.regular_s):
        slower = search.regular_s / plan.prediction.step_s - 1
        notes.append(
            f"irregular: its stages differ in their meshes; the best plan of equal ones is {slower:.1%} slower"
        )
    idle = plan.num_devices - sum(len(stage.devices) for stage in plan.stages)
    if idle:
        notes.append(f"{idle} of {plan.num_devices} devices stay idle")
    if search.cluster.oversubscription > 1:
        notes.append(
            f"oversubscribed: {search.cluster.oversubscription:g} ranks share each core, "
            "so compute is priced that much slower"
        )
    return notes
