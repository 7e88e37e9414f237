"""The passes of the planner, from a graph to plans.

``make_plans`` is the list of them, ``search_plans`` the loop in its middle. ``provenance["passes"]`` has the seconds of
every pass by its name.

    name          what the pass does                                                      modules
    layouts       note the strides of tensors, if a cluster has measured exact ops        frontend/strides
    layers        cluster the ops of the graph into layers and classes of layers          frontend/layers
    floors        bound the seconds of all runs of layers, per submesh and microbatches   lower_bounds
    compose       make cost tables at several memory multipliers                          tables, intra_op/vectorised
    stages        cut layers and devices into stages, by dynamic programming              explore, pipeline/stage_dp
    schedules     try the other schedules on the same tables                              other_schedules
    bounds        lift the lower bounds of other microbatch counts and schedules          optimality, pipeline/bounds
    refine        solve each chosen stage as one problem under its memory limit           build_plan, intra_op/stage
    simulate      price messages between stages and time the schedule                     predict, pipeline/simulate
    memory        count the peak bytes of each stage by a run without data                memory/stage
    alternatives  find the best data-, tensor- and pipeline-parallel plans                alternatives

Compose, stages and schedules run twice: the second time at more multipliers, for the counts where leaner strategies may
help. Small graphs then go through refine, simulate and memory once more (``refine``), for what tables leave out. If the
counted memory of all candidates is too high, the search begins again with corrected estimates.

With more than one worker a fork lifts the bounds while the other passes go on, and a second one searches for the
alternatives. Their passes then have the seconds for which the search waited.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch

from ...costmodel.cluster import Cluster
from ...costmodel.memory import state_tensors
from ..cost.gradient_reduction import lossy_notes
from ..errors import InfeasibleError, OverfullError
from ..intra_op.vectorised.row_cache import RowCache
from ..ir.graph import Graph, op_name
from ..plan.plan import Plan
from ..plan.validation import notes as asynchronous_notes
from ..plan.validation import precision_notes
from ..rules import rule_for
from ..workers import ForkedTask
from .alternatives import find_alternatives, pure_plans
from .build_plan import BuiltStages, build_plan, within_memory
from .explore import corrected_candidates, find_candidates
from .infeasible import infeasible_error
from .local_sgd import delay_notes
from .optimality import proof_processes, start_proof, with_bounds
from .other_schedules import TIE_TOLERANCE, schedule_error, simplest_index, with_other_schedules
from .refine import can_refine, refine_plans, time_to_beat
from .request import PlanRequest
from .state import INTERRUPTED, TIMED_OUT, Candidate, PurePlan, SearchState, prepare_search, same_decisions

__all__ = [
    "best_plans",
    "make_plan",
    "make_plans",
    "search_plans",
    "start_search",
    "with_provenance",
    "without_gc",
]

#: the fraction of a step below which overlapped seconds are the same in every plan
MIN_HIDDEN_FRACTION = 0.01
#: candidates that are built
MAX_TRIES = 5
#: times that the stages of one candidate are solved again under a lower memory limit
MAX_MEMORY_RETRIES = 3
#: memory corrections that do not count as a try, and searches that end with corrections alone
MAX_CORRECTIONS = 8


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
    with without_gc(), proof_processes(search):
        start_pure_plans(search)  # alternatives, in a fork
        plans = best_plans(search, request.count)  # floors to memory
        alternatives = compare_pure_plans(search, plans[0])  # alternatives
        plans = with_bounds(search, plans)  # bounds
    search.passes["total"] = time.perf_counter() - begin
    return [with_provenance(search, plan, [] if index else alternatives) for index, plan in enumerate(plans)]


def best_plans(search: SearchState, top_k: int = 1) -> list[Plan]:
    """The best plans of a search, fastest first, without the final bounds. Raises InfeasibleError if nothing fits."""
    plans, error = search_plans(search, top_k)
    if not plans:
        raise error or infeasible_error(search)
    return plans


def search_plans(search: SearchState, top_k: int = 1) -> tuple[list[Plan], InfeasibleError | None]:
    """(the best plans, fastest first, without the final bounds; if there are none, the error of the last candidate)."""
    tried: set[tuple[Any, ...]] = set()
    last_error: InfeasibleError | None = None
    for _ in range(MAX_CORRECTIONS):
        base, candidates = find_candidates(search)  # floors, compose, stages, schedules
        if base:
            start_proof(search, (candidates or base)[0].clock_s)  # bounds
        if base and not candidates:
            return [], schedule_error(search, base)
        plans, error = _build_plans(search, candidates, top_k, tried)  # refine, simulate, memory
        last_error = error or last_error
        if plans or not isinstance(error, OverfullError):
            break  # otherwise the corrected memory estimates make other pipelines the best
    if can_refine(search):
        # Bounds first: refinement stops at the first plan that they prove to be the best.
        plans = refine_plans(search, with_bounds(search, plans), top_k)  # bounds; refine, simulate, memory
    return plans, None if plans else last_error


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
        search.pure_task = ForkedTask(partial(_pure_plans, search), True, later=True)


def _pure_plans(search: SearchState) -> dict[str, PurePlan]:
    with search.keeping():
        return pure_plans(search)


def compare_pure_plans(search: SearchState, plan: Plan) -> list[dict[str, Any]]:
    """The best plan of each pure strategy beside ``plan``; none if they are not wanted or there was no time."""
    if not search.alternatives or search.cut_short:
        return []
    with search.timed("alternatives"):
        try:
            pure = search.pure_task.result() if search.pure_task is not None else pure_plans(search)
            return find_alternatives(plan, pure)
        except KeyboardInterrupt:  # the plan itself is complete
            search.cut_short = f"{INTERRUPTED} while alternatives were looked for"
            return []


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
    search: SearchState, queue: list[Candidate], top_k: int, tried: set[tuple[Any, ...]]
) -> tuple[list[Plan], InfeasibleError | None]:
    """(plans that fit, fastest first; the error of the last candidate that does not). queue: candidates, fastest first.
    tried: the keys of candidates that were built before, which is added to.

    A candidate is built and simulated unless its clock, which counts a little less than the simulation, shows that it
    loses, even if all that may overlap does. The memory of those that are then among the best is counted. An excess
    corrects the memory estimates of the shape, and with them the candidates that are left.
    """
    plans: list[Plan] = []
    error: InfeasibleError | None = None
    base_schedule = search.space.base_schedule
    tries, corrections = max(MAX_TRIES, 2 * top_k), MAX_CORRECTIONS
    tries += sum(candidate.schedule != base_schedule for candidate in queue)
    clock_ratios = dict[str, float]()  # schedule → the least clock seconds per simulated second so far
    while queue and tries:
        candidate = queue.pop(0)
        limit_s = time_to_beat(plans, top_k)
        hidden_s = candidate.hidden_s if candidate.hidden_s > MIN_HIDDEN_FRACTION * candidate.clock_s else 0.0
        if candidate.clock_s - hidden_s >= limit_s * clock_ratios.get(candidate.schedule, 1.0):
            continue
        if plans and (search.cut_short or time.perf_counter() > search.deadline):
            search.cut_short = search.cut_short or TIMED_OUT
            break
        key = candidate.microbatches, candidate.schedule, tuple(_shapes(candidate)), f"{candidate.clock_s:.6g}"
        if key in tried:  # the same pipeline at another memory multiplier
            continue
        tried.add(key)
        tries -= 1
        try:
            built: BuiltStages = {}
            plan = _build_interruptibly(search, candidate, bool(plans), built)
            ratio = clock_ratios.get(candidate.schedule, 1.0)
            clock_ratios[candidate.schedule] = min(candidate.clock_s / plan.prediction.step_s, ratio)
            slower = plan.prediction.step_s >= limit_s * (1 + TIE_TOLERANCE)
            if slower or any(same_decisions(plan, other) for other in plans):
                continue
            fitting, missed = _fit_memory(search, plan, candidate, limit_s, built)
            if fitting is not None and not any(same_decisions(fitting, other) for other in plans):
                plans = sorted([*plans, fitting], key=lambda plan: plan.prediction.step_s)
            if missed is None:
                continue
            error = missed
            if fitting is not None and fitting.prediction.step_s < candidate.clock_s * (1 + MIN_HIDDEN_FRACTION):
                continue
            if candidate.schedule != base_schedule and base_schedule in search.space.schedules:
                continue  # the memory of the base schedule's stages is corrected by its own candidates
            queue = _corrected_queue(search, queue, candidate, missed, time_to_beat(plans, top_k))
            tries, corrections = tries + min(1, corrections), max(0, corrections - 1)
        except KeyboardInterrupt:
            if not plans:
                raise
            search.cut_short = INTERRUPTED
            break
    if plans:
        first = simplest_index([plan.schedule for plan in plans], [plan.prediction.step_s for plan in plans])
        plans.insert(0, plans.pop(first))
    return plans[:top_k], error


def _shapes(candidate: Candidate) -> list[tuple[int, int, tuple[int, ...], float]]:
    """(first layer, end layer, mesh shape, estimated bytes) per stage; the same for equal rows of different levels."""
    pipeline = candidate.pipeline
    return [
        (stage.first_layer, stage.end_layer, row.submesh.shape, round(used))
        for stage, row, used in zip(pipeline.stages, candidate.rows, pipeline.peak_bytes)
    ]


def _fit_memory(
    search: SearchState, plan: Plan, candidate: Candidate, limit_s: float, built: BuiltStages
) -> tuple[Plan | None, OverfullError | None]:
    """(the plan of a candidate with its counted memory; the error of the first attempt, if that holds too much).

    Stages that hold too much are solved again under a lower limit, a few times. The plan is None if it then takes
    ``limit_s`` or longer, or still holds too much. built: the candidate's stages so far.
    """
    first_error: OverfullError | None = None
    limits: tuple[float, ...] = ()
    for times in range(1 + MAX_MEMORY_RETRIES):
        try:
            return within_memory(search, plan, candidate), first_error
        except OverfullError as missed:
            first_error = first_error or missed
            before, limits = limits, tuple(map(min, limits or missed.leaner, missed.leaner))
        if limits == before or times == MAX_MEMORY_RETRIES:  # no strategy of the stages is as lean
            break
        plan = build_plan(search, candidate, limits, built)
        if plan.prediction.step_s >= limit_s:
            break
    return None, first_error


def _corrected_queue(
    search: SearchState, queue: Sequence[Candidate], candidate: Candidate, missed: OverfullError, limit_s: float
) -> list[Candidate]:
    """The queue with new candidates of the same microbatch count, from the corrected memory estimates."""
    m, base_schedule = candidate.microbatches, search.space.base_schedule
    others = [other for other in queue if other.microbatches != m]
    corrected = [
        other
        for other in corrected_candidates(search, m, missed.beside, limit_s)
        if _shapes(other) != _shapes(candidate)
    ]
    if base_schedule not in search.space.schedules:
        corrected = with_other_schedules(search, corrected)
    else:
        others += [other for other in queue if other.schedule != base_schedule and other.microbatches == m]
    return sorted([*others, *corrected], key=lambda other: other.clock_s)


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
    }
    notes = (*_notes(search, plan), *plan.prediction.notes)
    prediction = replace(plan.prediction, alternatives=tuple(others), notes=notes)
    return replace(plan, prediction=prediction, provenance=provenance, graph=search.graph)


def _notes(search: SearchState, plan: Plan) -> list[str]:
    unknown = Counter(op_name(n) for n in search.graph.ops() if op_name(n) != "getitem" and rule_for(n).is_unknown(n))
    notes = [f"no rule for {name} ({count}×): replicated" for name, count in unknown.items()]
    notes += [text for text in (state_tensors(plan.optimizer)[1],) if text]
    notes += [*precision_notes(plan), *lossy_notes(plan.stages, plan.codes), *asynchronous_notes(plan)]
    if search.space.communication.is_lossy:
        notes += delay_notes(plan)
    if search.cut_short:
        notes.append(f"the search ended early, as {search.cut_short}: the bound is of what it had seen")
    idle = plan.num_devices - sum(len(stage.devices) for stage in plan.stages)
    if idle:
        notes.append(f"{idle} of {plan.num_devices} devices stay idle")
    if search.cluster.oversubscription > 1:
        notes.append(
            f"oversubscribed: {search.cluster.oversubscription:g} ranks share each core, "
            "so compute is priced that much slower"
        )
    return notes
