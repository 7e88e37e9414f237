"""The dynamic program over layers and devices that cuts a model into pipeline stages. It knows tables, no graph.

Variables. A pipeline cuts layers 0..L into stages of consecutive layers [i, j); stage k runs under an *option* o_k
(devices, logical shape, memory multiplier) from the device d_k on, one of the option's offsets, and d_k + n(o_k) ≤
d_{k+1}: stages lie in order, devices between them may stay idle. Cuts may be forced or forbidden
(``StageConstraints``).

Memory, on every stage with q microbatches in flight (``schedule.in_flight_formula``: 1F1B min(m, stages from this one
to the end), GPipe m)::

    resident[o,i,j] + transient[o,i,j] + q · saved[o,i,j] ≤ limit of the option at its offset

Objectives, with t the pace, x the messages behind a stage and e those before it, σ the per-step work::

    W(k) = e_k + max(m t_k, t_k + x_k + W(k + 1)),   W = W(0) + σ_0                                 (``path_s``)
    T    = Σ_k (e_k + t_k + x_k) + (m − 1) · max_k t_k + σ_0                                     (``latency_s``)

W is the longest of these paths: the first microbatch to stage k and the last one's gradient back from it, with all of
stage k's work between: what every sound schedule takes at least (``bounds`` has the proof). T lets every stage
add its fill (Alpa, OSDI'22, equation 2), W ≤ T; both are the makespan of equal stages. Under zb-h1 a stage delays the
others by φ = max(f, f + b_input − b_weight) alone, as the weights' gradients wait (Qi et al. 2023, section 2.2): φ is
in place of the second t in W and of t in T's sum, and T's last term is max (m t − φ). That W is an objective, no bound.

Under 1F1B and GPipe pipelines are ranked by what is proven of their own makespans (``bounds``: V, and the way
of messages there and back as often as microbatches must wait for it), exactly: best first over partial pipelines, with
the recurrence Z of ``recurrence`` — W and these lines — for what is left, until the ``top_k`` best are whole
(``k_best``). Under zb-h1 they are ranked by T in the same way, with W, which T is never below, for what is left.

A pipeline that never drains (``families``) has no fill: its W is the slowest stage's m t_k + σ_k, by which it is
ranked, and its estimate is no less than its slowest way there and back, by the microbatches in flight on it.

Infeasible. The same recurrence on bytes over the limit, as heads, finds the pipeline that misses by least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite

import numpy as np

from .bounds import TRIALS, MakespanBound, candidate_makespan
from .families import PIPEDREAM, in_flight_formula, is_split
from .k_best import Mode, Ranking, evaluate, gather_arcs, minimise, modes
from .path_cuts import CutCosts, cuts_by_paths
from .recurrence import Prices, Rows, StageRecurrence
from .table import (
    InfeasiblePipeline,
    LowerBounds,
    Pipeline,
    PipelineSolution,
    PipelineTable,
    StageChoice,
    StageConstraints,
)

__all__ = ["RankingLimits", "bound_of", "cut_again", "describe_pipeline", "solve"]

#: by which zb-h1's W and T, which bound no makespan, may be above the cut-off; by which T may be above W
_ABOVE, _SPLIT_SLACK = 1.05, 0.3
_Stages = tuple[StageChoice, ...]


@dataclass(frozen=True)
class RankingLimits:
    """The pipelines that ``solve`` returns, and the effort that it takes to rank them."""

    #: pipelines to return
    top_k: int = 8
    #: the fraction by which a pipeline may be above the least value that the recurrence allows
    slack: float = 0.05
    #: partial pipelines to expand
    visits: int = 4096
    #: seconds; pipelines whose estimate is above do not matter
    most: float = inf


def solve(
    table: PipelineTable,
    num_microbatches: int,
    schedule: str = "1f1b",
    constraints: StageConstraints | None = None,
    limits: RankingLimits | None = None,
    *,
    explain: bool = True,
) -> PipelineSolution | InfeasiblePipeline:
    """The pipelines of least estimate (zb-h1: of least T), within ``limits``.

    The schedule has one stage per device group; ``regular`` solves those with several chunks. explain: if
    nothing fits, find out what is missing. ValueError on bad arguments.
    """
    m, constraints, limits = num_microbatches, constraints or StageConstraints(), limits or RankingLimits()
    rows = Rows(table.options, table.num_layers, table.num_devices)
    of = _modes(rows, m, schedule, constraints)
    prices = Prices(table, rows, m, schedule)
    pipelines, least, complete = _ranked(table, prices, of, constraints, limits)
    if pipelines:
        return PipelineSolution(tuple(pipelines), least, complete)
    if isfinite(limits.most):
        return InfeasiblePipeline(f"no pipeline fits, or none takes less than {limits.most:.6g} s", inf)
    return _infeasible(table, rows, prices, of, constraints) if explain else InfeasiblePipeline("no pipeline fits", inf)


def _ranked(
    table: PipelineTable, prices: Prices, of: Sequence[Mode], constraints: StageConstraints, limits: RankingLimits
) -> tuple[list[Pipeline], float, bool]:
    """(the pipelines of least estimate, the least value of the recurrence, complete). Z is no more than these: if none
    is within the slack, more follow."""
    top_k, slack, visits, most = limits.top_k, limits.slack, limits.visits, limits.most
    split = is_split(prices.schedule)
    if split:
        slack, most = max(slack, _SPLIT_SLACK), most * _ABOVE
    rows = prices.rows
    if not len(rows.option):
        return [], inf, True
    shapes = [table.options[option].shape for option in rows.option]
    search = StageRecurrence(
        rows, prices.path, _flights(of), constraints.allowed(rows.first, rows.end), shapes,
        turns=None if split or prices.schedule == PIPEDREAM else prices.turns, parts=prices.parts,
    )  # fmt: skip
    solution = minimise(search, of, keep=slack, most=most)
    least = inf if solution is None else solution.best
    while solution is not None:
        limit = min(least * (1.0 + slack) * (1 + 1e-12), most)
        ranking = Ranking(solution, table.options, limit, visits, lambda one: _judged(table, prices, one))
        if (pipelines := ranking.best(top_k)) or limit >= most:
            return [one for one in pipelines if one.estimate_s <= limits.most], least, ranking.complete
        slack = 2.0 * slack + 0.05
        solution = evaluate(gather_arcs(search, of, min(least * (1.0 + slack) * (1 + 1e-12), most)))
    return [], inf, True


def _judged(table: PipelineTable, prices: Prices, stages: _Stages) -> tuple[float, Pipeline]:
    pipeline = describe_pipeline(table, prices.m, prices.schedule, stages)
    if is_split(prices.schedule):
        return pipeline.latency_s, pipeline
    return pipeline.path_s if prices.schedule == PIPEDREAM else pipeline.estimate_s, pipeline


def bound_of(
    bounds: LowerBounds,
    num_devices: int,
    m: int,
    schedule: str,
    constraints: StageConstraints,
    most: float = inf,
    trials: int = TRIALS,
) -> float:
    """A lower bound on the makespan of every pipeline, from those of its stages; ``most`` if they allow none so
    fast. trials: as in ``bounds.MakespanBound.seconds``."""
    rows = Rows(bounds.options, bounds.pace_s.shape[1], num_devices)
    modes_ = _modes(rows, m, schedule, constraints)
    return MakespanBound(bounds, rows, m, schedule, modes_, constraints).seconds(most, trials)


def _flights(of: Sequence[Mode]) -> list[int]:
    return sorted({q for mode in of for q in mode.flights})


def _modes(rows: Rows, m: int, schedule: str, constraints: StageConstraints) -> tuple[Mode, ...]:
    if m < 1:
        raise ValueError(f"a step has at least one microbatch, but got {m}")
    if schedule in ("interleaved", "zb-v"):
        raise ValueError(f"a schedule with chunks is solved by regular.solve_case, but got {schedule!r}")
    for cut in sorted(constraints.boundaries | constraints.forbidden):
        if not 0 < cut < rows.num_layers:
            raise ValueError(f"stages may be cut before layers 1 to {rows.num_layers - 1}, but got {cut}")
    if both := constraints.boundaries & constraints.forbidden:
        raise ValueError(f"a cut is either forced or forbidden, but got both before layers {sorted(both)}")
    most = min(rows.num_layers, rows.num_devices)
    least, last = constraints.stages
    if least < 1 or (last is not None and last < least) or least > most:
        raise ValueError(
            f"the number of stages is from 1 to {most} ({rows.num_layers} layers, {rows.num_devices} devices), the "
            f"least number first, but got {constraints.stages}"
        )
    possible = min(most, _most_stages(rows))
    every = least == 1 and (last is None or last >= possible)
    last = max(least, possible if last is None else min(last, possible))
    return modes(schedule, m, least, last, every)


def _most_stages(rows: Rows) -> int:
    """The largest number of stages that the devices allow: the longest chain of positions."""
    width = len(rows.positions)
    chain = np.zeros(width + 1, dtype=np.intp)
    chain[width] = -1
    for p in range(width - 1, -1, -1):
        chain[p] = max(0, 1 + int(chain[rows.after[:, p]].max())) if rows.num_groups else 0
    return max(1, int(chain[0]))


def describe_pipeline(table: PipelineTable, m: int, schedule: str, stages: Iterable[StageChoice]) -> Pipeline:
    """The figures of a pipeline of the table."""
    stages = tuple(stages)
    p = len(stages)
    held = tuple(in_flight_formula(schedule, k, p, m) for k in range(p))
    at = [(stage.option, stage.first_layer, stage.end_layer) for stage in stages]
    pace = [float(table.pace_s[one]) for one in at]
    entries = [0.0 if table.entry_s is None else float(table.entry_s[one]) for one in at]
    makespan = candidate_makespan(
        schedule,
        m,
        pace,
        [float(table.transfer_s[one]) + entry for one, entry in zip(at, [*entries[1:], 0.0])],
        [float(table.step_s[one]) for one in at],
        held,
        [t * table.share("forward_share", one) for t, one in zip(pace, at)],
        [t * table.share("input_share", one) for t, one in zip(pace, at)],
    )
    return Pipeline(
        stages=stages,
        path_s=makespan.path_s,
        latency_s=makespan.latency_s,
        estimate_s=makespan.floor_s,
        in_flight=held,
        peak_bytes=tuple(table.peak(stage, q) for stage, q in zip(stages, held)),
        limit_bytes=tuple(table.options[stage.option].limit(stage.device_offset) for stage in stages),
        idle_devices=table.num_devices - sum(table.options[stage.option].num_devices for stage in stages),
    )


def cut_again(
    table: PipelineTable, m: int, schedule: str, constraints: StageConstraints, found: _Stages, most_s: float = inf
) -> _Stages:
    """The pipeline on the devices and meshes of ``found`` whose cuts let stages wait least, as far as ``path_cuts``
    finds them: no ranking here knows all waits. most_s: as there."""
    first, end = np.arange(table.num_layers)[:, None], np.arange(table.num_layers + 1)[None]
    allowed = (first < end) & constraints.allowed(*np.broadcast_arrays(first, end))
    entry_s = np.zeros_like(table.pace_s) if table.entry_s is None else table.entry_s
    chosen, costs = [], []
    for k, stage in enumerate(found):
        this, q = table.options[stage.option], in_flight_formula(schedule, k, len(found), m)
        same = [o for o, one in enumerate(table.options) if (one.shape, one.offsets) == (this.shape, this.offsets)]
        held = table.resident[same] + table.transient[same] + q * table.saved[same]
        limit = np.array([table.options[o].limit(stage.device_offset) for o in same])[:, None, None]
        fits = allowed & (held <= limit) & np.isfinite(table.pace_s[same])
        least = np.where(fits, m * table.pace_s[same] + table.step_s[same], inf).argmin(axis=0)
        chosen.append(np.array(same)[least])
        arrays = [np.where(fits, one[same], inf) for one in (table.pace_s, table.step_s, entry_s, table.transfer_s)]
        costs.append([np.take_along_axis(one, least[None], axis=0)[0] for one in arrays])
    pace, step, entry, behind = map(np.array, zip(*costs))
    ahead = np.pad(entry.min(axis=2), ((0, 0), (0, 1)), constant_values=inf)[1:]
    back = behind.min(axis=1)[:-1]
    if table.entry_s is None:
        ahead = back = back / 2
    ahead, back = (np.where(np.isfinite(one), one, 0.0) for one in (ahead, back))  # no stage has another border
    cuts = cuts_by_paths(
        schedule, m, CutCosts(pace, step, ahead, back, np.zeros(len(found))),
        [[0, *(stage.end_layer for stage in found)]], most_s,
    )  # fmt: skip
    return tuple(
        StageChoice(i, j, int(option[i, j]), stage.device_offset)
        for (i, j), option, stage in zip(pairwise(cuts), chosen, found)
    )


def _infeasible(
    table: PipelineTable, rows: Rows, prices: Prices, of: tuple[Mode, ...], constraints: StageConstraints
) -> InfeasiblePipeline:
    """The reason why nothing fits, and the nearest pipeline."""
    if len(rows.option):
        search = StageRecurrence(rows, prices.excess, _flights(of), constraints.allowed(rows.first, rows.end))
        solution = minimise(search, of, scale=float(rows.limit.max()))
        if solution is not None:
            return _short_of_memory(table, solution.best, solution.stages(), of)
    usable = np.zeros(table.num_layers, dtype=bool)
    for pair in np.flatnonzero(np.isfinite(prices.pace).any(axis=0)):
        usable[rows.first[pair] : rows.end[pair]] = True
    if not usable.all():
        layers = ", ".join(map(str, np.flatnonzero(~usable)))
        return InfeasiblePipeline(f"no option can run layers {layers} on {table.num_devices} devices", inf)
    least, most = constraints.stages
    asked = f"{least} stages" if least == most else f"{least} to {most} stages" if most else f"at least {least} stages"
    return InfeasiblePipeline(
        f"no way to lay out {table.num_layers} layers as {asked} on {table.num_devices} devices with these cuts, "
        "whatever the memory limit; allow other numbers of stages, other cuts or more options",
        inf,
    )


def _short_of_memory(
    table: PipelineTable, missing: float, nearest: _Stages, of: tuple[Mode, ...]
) -> InfeasiblePipeline:
    p = len(nearest)
    flights = next(mode.flights for mode in of if p in mode.counts)
    needed = [table.peak(stage, flights[p - 1 - k]) for k, stage in enumerate(nearest)]
    limits = [table.options[stage.option].limit(stage.device_offset) for stage in nearest]
    k = max(range(p), key=lambda index: needed[index] - limits[index])
    stage = nearest[k]
    return InfeasiblePipeline(
        f"no pipeline fits; the nearest has {p} stages, and its stage {k} (layers {stage.first_layer} to "
        f"{stage.end_layer - 1} on {table.options[stage.option].num_devices} devices, option {stage.option}) needs "
        f"{needed[k]:,.0f} bytes per device where the limit is {limits[k]:,.0f}: {missing:,.0f} bytes are missing",
        missing,
        nearest,
        k,
        stage,
        needed[k],
        limits[k],
    )
