"""The pass list from a graph to a plan, readable top to bottom. Every pass is named and timed
(``provenance["passes"]``).

    layouts       how tensors lie in memory, where exact ops were measured                strides.py
    layers        cluster the graph's ops into layers and classes                         layers.py
    floors        per mesh and microbatch count: what all layers take at least, bounds    lower_bounds.py, vectorised/
    compose       tables at prices of a byte, for the counts that may win                 explore.py, vectorised/
    stages        dynamic programming over layers × devices                               pipeline/
    schedules     the other schedule families, on the tables that are there                other_schedules.py
                  closer looks where leaner tables may help                               explore.py
    bounds        of the other counts and of the other schedule families                  optimality.py
    refine        per chosen stage: the whole stage as one problem under its memory limit  stage.py, lagrange.py
    simulate      messages between stages, and the schedule's makespan                    predict.py, simulate.py
    memory        what each stage holds at its worst, from a run without data             stage.py
                  small instances: refine to memory again, for what tables left out       refine.py
    alternatives  what the best pure data, tensor and pipeline plans would have cost      alternatives.py

With more than one worker a fork proves the bounds beside all that follows, and another looks for alternatives from the
beginning: these passes have the seconds waited for them.
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

MIN_HIDDEN_FRACTION = 0.01  # of a step: what hides of it is as much in any other plan
MAX_TRIES = 5  # candidates that are finished, at most
MAX_MEMORY_RETRIES = 3  # times that a candidate's stages are solved again within less
MAX_CORRECTIONS = 8  # times that what was assembled may not fit without counting as a try, and that all of it may not


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
    kept: RowCache | None = None,
) -> list[Plan]:
    """The ``request.count`` best plans of distinct cuts, meshes or microbatch counts, fastest first; see ``make_plan``.

    capture_s: seconds that the capture took, for the record. progress(pass, fraction) is called along the way. kept:
    rows of other searches, to take from and to add to.
    """
    begin = time.perf_counter()
    search = start_search(graph, cluster, request, capture_s, progress)
    search.row_cache = kept
    search.alternatives = request.alternatives and cluster.num_devices > 1 and request.strategy is None
    with without_gc(), proof_processes(search):
        search.pure_task = _pure_plans_aside(search)
        plans = best_plans(search, request.count)
        others = _alternatives(search, plans[0])
        plans = with_bounds(search, plans)
    search.passes["total"] = time.perf_counter() - begin
    return [with_provenance(search, plan, others if index == 0 else []) for index, plan in enumerate(plans)]


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


def _pure_plans_aside(search: SearchState) -> ForkedTask[dict[str, PurePlan]] | None:
    """A fork that looks for alternatives beside the search, where there is a worker for it."""
    if not search.alternatives or search.workers < 2:
        return None
    return ForkedTask(partial(_pure_plans, search), True, later=True)


def _pure_plans(search: SearchState) -> dict[str, PurePlan]:
    with search.keeping():
        return pure_plans(search)


def _alternatives(search: SearchState, plan: Plan) -> list[dict[str, Any]]:
    if not search.alternatives or search.cut_short:
        return []
    with search.timed("alternatives"):
        try:
            return find_alternatives(
                plan, search.pure_task.result() if search.pure_task is not None else pure_plans(search)
            )
        except KeyboardInterrupt:  # the plan is there
            search.cut_short = f"{INTERRUPTED} while alternatives were looked for"
            return []


@contextmanager
def without_gc() -> Iterator[None]:
    """The search makes millions of small acyclic objects, through which the collector would sweep again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ---- from candidates to plans


def best_plans(search: SearchState, top_k: int = 1) -> list[Plan]:
    """The best plans of a search, fastest first, to be ``with_bounds``. Raises InfeasibleError if there is none."""
    plans, error = search_plans(search, top_k)
    if not plans:
        raise error or infeasible_error(search)
    return plans


def search_plans(search: SearchState, top_k: int = 1) -> tuple[list[Plan], InfeasibleError | None]:
    """(the best plans, fastest first, to be ``with_bounds``; why the last one that was put together does not fit, if none
    does)."""
    seen: set[tuple[Any, ...]] = set()
    missed: InfeasibleError | None = None
    for _ in range(MAX_CORRECTIONS):
        guided, found = find_candidates(search)
        if guided:
            start_proof(search, (found or guided)[0].clock_s)
        if guided and not found:
            return [], schedule_error(search, guided)
        plans, error = _finished(search, found, top_k, seen)
        missed = error or missed
        if plans or not isinstance(error, OverfullError):
            break  # else what is known of memory now makes other pipelines the best
    if can_refine(search):  # the proof says when to stop
        plans = refine_plans(search, with_bounds(search, plans), top_k)
    return plans, None if plans else missed


def _finished(
    search: SearchState, queue: list[Candidate], top_k: int, seen: set[tuple[Any, ...]]
) -> tuple[list[Plan], InfeasibleError | None]:
    """(plans that fit, fastest first; why the last of the others does not). queue: candidates, fastest first. seen:
    what was tried before, which is added to.

    A candidate is simulated if its clock, which counts a little less than the simulation, leaves hope, even if all
    hides that may; its memory is counted if it is among the best then. What that shows of a shape's memory corrects all
    candidates that are left.
    """
    plans: list[Plan] = []
    error: InfeasibleError | None = None
    base_schedule = search.space.base_schedule
    tries, corrections, short = max(MAX_TRIES, 2 * top_k), MAX_CORRECTIONS, dict[str, float]()
    # short: by family, clock seconds per simulated second
    tries += sum(one.schedule != base_schedule for one in queue)
    while queue and tries:
        candidate = queue.pop(0)
        worst_s = time_to_beat(plans, top_k)
        hidden_s = candidate.hidden_s if candidate.hidden_s > MIN_HIDDEN_FRACTION * candidate.clock_s else 0.0
        if candidate.clock_s - hidden_s >= worst_s * short.get(candidate.schedule, 1.0):
            continue
        if plans and (search.cut_short or time.perf_counter() > search.deadline):
            search.cut_short = search.cut_short or TIMED_OUT
            break
        one = candidate.microbatches, candidate.schedule, tuple(_shapes(candidate)), f"{candidate.clock_s:.6g}"
        if one in seen:  # the same at another price of a byte
            continue
        seen.add(one)
        tries -= 1
        try:
            parts: BuiltStages = {}
            plan = _finish(search, candidate, bool(plans), parts)
            known = short.get(candidate.schedule, 1.0)
            short[candidate.schedule] = min(candidate.clock_s / plan.prediction.step_s, known)
            if plan.prediction.step_s >= worst_s * (1 + TIE_TOLERANCE) or any(
                same_decisions(plan, other) for other in plans
            ):
                continue
            found, missed = _fitting(search, plan, candidate, worst_s, parts)
            if found is not None and not any(same_decisions(found, other) for other in plans):
                plans = sorted([*plans, found], key=lambda one: one.prediction.step_s)
            if missed is None:
                continue
            error = missed
            if found is not None and found.prediction.step_s < candidate.clock_s * (1 + MIN_HIDDEN_FRACTION):
                continue
            if candidate.schedule != base_schedule and base_schedule in search.space.schedules:
                continue  # what is known of the guide's stages stands
            queue = _corrected(search, queue, candidate, missed, time_to_beat(plans, top_k))
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
    """Which layers are where, and what they are believed to hold: equal rows of different levels are one."""
    pipeline = candidate.pipeline
    return [
        (stage.first_layer, stage.end_layer, row.submesh.shape, round(used))
        for stage, row, used in zip(pipeline.stages, candidate.rows, pipeline.peak_bytes)
    ]


def _fitting(
    search: SearchState, plan: Plan, candidate: Candidate, most: float, parts: BuiltStages
) -> tuple[Plan | None, OverfullError | None]:
    """(the plan of a candidate with its memory; why it does not fit as it is). Stages that hold too much are solved
    again within so much less, a few times; the plan is None where that is no faster than ``most``, or too much still.
    parts: its stages so far."""
    first: OverfullError | None = None
    limits: tuple[float, ...] = ()
    for times in range(1 + MAX_MEMORY_RETRIES):
        try:
            return within_memory(search, plan, candidate), first
        except OverfullError as missed:
            first = first or missed
            before, limits = limits, tuple(map(min, limits or missed.leaner, missed.leaner))
        if limits == before or times == MAX_MEMORY_RETRIES:  # no choice is as lean
            break
        plan = build_plan(search, candidate, limits, parts)
        if plan.prediction.step_s >= most:
            break
    return None, first


def _corrected(
    search: SearchState, queue: Sequence[Candidate], candidate: Candidate, missed: OverfullError, most: float
) -> list[Candidate]:
    """The queue with other candidates of its microbatch count, now that more is known of memory."""
    m, base_schedule = candidate.microbatches, search.space.base_schedule
    left = [one for one in queue if one.microbatches != m]
    found = [one for one in corrected_candidates(search, m, missed.beside, most) if _shapes(one) != _shapes(candidate)]
    if base_schedule not in search.space.schedules:
        found = with_other_schedules(search, found)
    else:
        left += [one for one in queue if one.schedule != base_schedule and one.microbatches == m]
    return sorted([*left, *found], key=lambda one: one.clock_s)


def _finish(search: SearchState, candidate: Candidate, another: bool, parts: BuiltStages) -> Plan:
    """The plan of a candidate. Where it is the first one (not ``another``), one Ctrl-C waits until it is done, and ends
    the search there."""
    try:
        return build_plan(search, candidate, known=parts)
    except KeyboardInterrupt:
        if another or search.cut_short:
            raise
        search.cut_short = INTERRUPTED
        return build_plan(search, candidate, known=parts)


# ---- for the record


def with_provenance(search: SearchState, plan: Plan, others: Sequence[dict[str, Any]]) -> Plan:
    """The plan with what the search has to say of itself."""
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
