"""Exact refinement of small graphs: build many pipelines, and rank them by their simulated seconds and counted memory.

Cost tables add up: a gradient costs its share of a full bucket, a weight counts once per layer that reads it, an op's
temporaries are cut evenly over the mesh. In models of a few ops that is most of a step and of the memory, and tables
may find the best pipeline a little too slow or too large. So if the graph has few ops and its best plan is not proven
to be optimal, the best pipelines of the tables *without a memory limit* are built, those with the least clock first,
while they may win.

The built stages keep the memory limit. Let e be the estimated bytes of a stage and u those that it really holds, u −
limit too much. The stage is solved again, exactly, within e − (u − limit), until u fits or no strategy is that lean. As
e − u differs between strategies, a bisection then looks between the last limit that was too much and the first that was
not. Choices may also hold less than others though the rules count more for them: so the fastest choices of such stages
are counted one after the other, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from ..intra_op.solver.k_best import fastest_choices
from ..intra_op.stage import SolvedStage, describe_stage, stage_section
from ..ir.graph import Graph
from ..plan.plan import Plan
from .build_plan import (
    BuiltStages,
    build_plan,
    estimated_bytes,
    excess_bytes,
    plan_of_stages,
    solve_stages,
    stage_context,
    stage_limits,
    with_measured_memory,
)
from .irregular import LADDER
from .space import CHUNKED
from .state import INTERRUPTED, TIE_TOLERANCE, Candidate, SearchState, same_decisions
from .tables import NO_LIMIT, tables_of

__all__ = ["can_refine", "refine_plans", "time_to_beat"]

PIPELINES_PER_TABLE = 16  # per microbatch count and memory multiplier
MAX_BUILT_PIPELINES = 60
MAX_BUILT_OPS = 1000  # ops of all built pipelines together
CLOCK_TOLERANCE = 1.1  # by which the clock may be above the simulated seconds, as tied weights are solved anew
ESTIMATE_TOLERANCE = 1.3  # by which the dynamic program's estimates may be above them
MAX_FULLNESS = 1.5  # by which tables may be above the bytes that a stage holds
LIMIT_TOLERANCE = 0.03  # of the bytes of all stages: limits closer than that are alike
MAX_MEMORY_TRIALS = 10  # limits that are tried for one candidate
MAX_CHOICE_TRIALS = 6  # other choices of its stages that are tried beside these


def can_refine(search: SearchState) -> bool:
    """True if ``refine_plans`` may find anything here."""
    return search.small and not search.cut_short and search.space.base_schedule in search.space.schedules


def refine_plans(search: SearchState, plans: Sequence[Plan], top_k: int = 1) -> list[Plan]:
    """The best ``top_k`` of ``plans`` and of all plans that refinement builds, fastest first."""
    refined, seen = list(plans), set[object]()
    try:
        for floor_s, candidate in _queue(search, time_to_beat(refined, top_k)) if _open(search, refined) else ():
            most = time_to_beat(refined, top_k)
            if floor_s >= most * CLOCK_TOLERANCE or not _open(search, refined) or (refined and search.must_stop()):
                break
            if (key := _key(candidate)) in seen:
                continue
            if len(seen) >= min(MAX_BUILT_PIPELINES, MAX_BUILT_OPS // max(1, search.num_ops)):
                break
            seen.add(key)
            for plan in _under_all(search, candidate, most):
                if not any(same_decisions(plan, other) for other in refined):
                    refined = sorted([*refined, plan], key=lambda one: one.prediction.step_s)[:top_k]
    except KeyboardInterrupt:
        if not refined:
            raise
        search.cut_short = INTERRUPTED
    return refined


def _open(search: SearchState, plans: Sequence[Plan]) -> bool:
    """True if something may be faster than the best plan."""
    return not plans or search.bound_s < plans[0].prediction.step_s * (1 - TIE_TOLERANCE)


def time_to_beat(plans: Sequence[Plan], top_k: int) -> float:
    """The seconds that a plan must undercut to be among the best."""
    return plans[top_k - 1].prediction.step_s if len(plans) >= top_k else inf


def _queue(search: SearchState, limit_s: float) -> list[tuple[float, Candidate]]:
    """(the least clock of the candidate's cuts and meshes at any multiplier, the candidate), fastest first."""
    tables = tables_of(search)
    counts = [m for m in tables.counts if tables.least_share(m) < limit_s]
    most_s = limit_s * ESTIMATE_TOLERANCE
    candidates = list(tables.without_memory_limit(counts, LADDER, most_s, PIPELINES_PER_TABLE))
    least_clock_s, least_fullness = dict[object, float](), dict[object, float]()
    for candidate in candidates:
        cuts = _cuts(candidate)
        least_clock_s[cuts] = min(least_clock_s.get(cuts, inf), candidate.clock_s - candidate.hidden_s)
        least_fullness[cuts] = min(least_fullness.get(cuts, inf), _fullness(candidate))
    ranked = [
        (least_clock_s[_cuts(candidate)], candidate.clock_s, number, candidate)
        for number, candidate in enumerate(candidates)
        if least_fullness[_cuts(candidate)] <= MAX_FULLNESS
    ]
    return [(floor_s, candidate) for floor_s, _, _, candidate in sorted(ranked, key=lambda entry: entry[:3])]


def _fullness(candidate: Candidate) -> float:
    """The fraction of its limit that the fullest stage holds by its tables."""
    pipeline = candidate.pipeline
    return max(size * NO_LIMIT / limit for size, limit in zip(pipeline.peak_bytes, pipeline.limit_bytes))


def _cuts(candidate: Candidate) -> object:
    """The microbatches, and the layers, devices and mesh of each stage."""
    stages = zip(candidate.pipeline.stages, candidate.rows)
    return candidate.microbatches, tuple((one[0], one[1], one.device_offset, row.submesh) for one, row in stages)


def _key(candidate: Candidate) -> object:
    """Everything that the built plan depends on."""
    choices = []
    for stage, row in zip(candidate.pipeline.stages, candidate.rows):
        _, modes, states = row.choices(stage.first_layer, stage.end_layer)
        choices.append((modes, states[0], states[-1]))
    return _cuts(candidate), tuple(choices)


def _fitted(search: SearchState, candidate: Candidate, most: float) -> Plan | None:
    """The plan of a candidate with stages just lean enough to fit; None if it is not faster than ``most``."""
    best: Plan | None = None
    wide: list[float] = []  # what stages may hold by the rules: too much
    tight: list[float] = []  # little enough, or more little than there is
    limits: list[float] = []
    known: BuiltStages = {}
    for _ in range(MAX_MEMORY_TRIALS):
        plan = build_plan(search, candidate, limits, known)
        limits = limits or stage_limits(search, plan)
        held = [estimated_bytes(one) for one in plan.prediction.stages]
        if plan.prediction.step_s >= most or any(size > limit for size, limit in zip(held, limits)):
            if not wide:
                return None
            tight = limits  # too slow, or no choice is as lean
        else:
            real = with_measured_memory(search, plan)
            over = excess_bytes(search, real)
            if max(over) <= 0.0:
                best, most, tight = real, plan.prediction.step_s, limits
                if not wide:
                    return best
            else:
                wide = [min(size, limit) if extra > 0 else limit for size, limit, extra in zip(held, limits, over)]
        if tight:
            if sum(wide) - sum(tight) <= LIMIT_TOLERANCE * sum(wide):
                break
            limits = [(one + other) / 2 for one, other in zip(wide, tight)]
        else:
            limits = [size - max(1.0, extra) if extra > 0 else size for size, extra in zip(wide, over)]
    return best


def _with_other_choices(search: SearchState, candidate: Candidate, most: float) -> Plan | None:
    """The plan of a candidate in which each stage that holds too much has the fastest choices that do not; None if
    it is not faster than ``most``, or not among the first tries."""
    graph = search.graph.with_batch(search.global_batch // candidate.microbatches)
    with search.timed("refine"):
        parts = solve_stages(search, candidate, graph)
    others = [_fastest_stages(search, candidate, graph, index, part) for index, part in enumerate(parts)]
    for _ in range(1 + MAX_CHOICE_TRIALS):
        plan = plan_of_stages(search, candidate, parts)
        if plan.prediction.step_s >= most:
            return None
        plan = with_measured_memory(search, plan)
        full = [index for index, size in enumerate(excess_bytes(search, plan)) if size > 0.0]
        if not full:
            return plan
        with search.timed("refine"):
            for index in full:
                parts[index] = next(others[index], parts[index])
    return None


def _fastest_stages(
    search: SearchState, candidate: Candidate, graph: Graph, index: int, part: SolvedStage
) -> Iterator[SolvedStage]:
    """Yield the stage ``part`` of a candidate with other choices, the fastest by their problem first."""
    stage, row = candidate.pipeline.stages[index], candidate.rows[index]
    layers = (stage.first_layer, stage.end_layer)
    _, modes, states = row.choices(*layers)
    context = stage_context(search, candidate, graph, index, modes)
    section = stage_section(context, layers, (states[0], states[-1]))
    framework = part.prediction.memory_bytes["framework"]
    for chosen in fastest_choices(section.problem(part.in_flight)):
        yield describe_stage(context, layers, section, chosen, part.in_flight, framework)


def _under_all(search: SearchState, candidate: Candidate, most: float) -> Iterator[Plan]:
    """Yield the plan of a candidate, and those of the same cuts under the other schedules without chunks that are
    faster still."""
    plan = _fitted(search, candidate, most)
    plan = _with_other_choices(search, candidate, plan.prediction.step_s if plan else most) or plan
    if plan is None:
        return
    yield plan
    most = plan.prediction.step_s * (1 - TIE_TOLERANCE)
    for name in search.space.schedules if len(plan.stages) > 1 else ():
        if name not in (candidate.schedule, *CHUNKED):
            other = _fitted(search, replace(candidate, schedule=name), most)
            if other is not None:
                yield other
