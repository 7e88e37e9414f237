"""Pipelines with several virtual stages per device group (Megatron's word; PyTorch says stages): interleaved and zb-v.

A virtual stage is called a chunk here.

All p groups run under one option, from its leftmost offsets on, and group k holds v chunks D_k of the S = p v
consecutive ones: those of ``families.virtual_order``. With t the pace of a chunk, the groups' load is
T_k = Σ_{c ∈ D_k} t_c, and chunk k (k < p) is the first that group k holds. By the proof in ``bounds``, with the
chunks in place of stages — nothing reaches group k but through chunks 0 … k − 1, and no gradient leaves it but back
through them — every sound schedule takes at least::

    interleaved   Σ_{c<k} (t_c + x_c) + m T_k + σ_0               zb-v   Σ_{c<k} (f_c + x_c/2) + m T_k + σ_k

Equal chunks attain the larger of these over k: the estimate of one pipeline.

Cuts. For each option, one dynamic programme over the number of chunks gives the least largest chunk c*(S), and the
division that is most even under it: least Σ t² with t ≤ c* (``_Divisions``). Uneven loads of groups are not searched
further: this is a heuristic, and the bound says how good it is. (option, p, v) are tried by ascending
m · max(c*, Z/p), Z the least sum of S chunks, until nothing left can be among the best.

Memory of group k: Σ resident + the most that is saved at any time + the largest transient; what is in flight of each
chunk is read off the schedule (``in_flight_by_chunk``), because a loss's large saved bytes are held only briefly.

Bound. Whatever the cuts, max_k T_k ≥ Σ_c t_c / p: so m Z(S)/p on floors, for the best option, p and v. A Lagrangian
pair (λ, μ) of ``bounds`` adds: at some time each chunk of a group holds h microbatches, so λ Σ r + μ Σ s ≤
max(λ, μ/h) (Σ r + h Σ s), and T_k ≥ Σ_{c ∈ D_k} value_c − M max(λ, μ/h).

``quick_bound`` is the same with any number of chunks, h = 1 and the most groups there is room for, which is the least
over all families with chunks, p and v. Pairs whose values count the per-step work, divided by m, are as good there: a
group does its end of step σ_k after all its actions, so the makespan is at least m T_k + σ_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from .families import generate, in_flight_formula, virtual_order
from .table import (
    Floats,
    InfeasiblePipeline,
    LowerBounds,
    Pipeline,
    PipelineSolution,
    PipelineTable,
    StageChoice,
    StageConstraints,
    StageOption,
)

__all__ = [
    "group_counts",
    "in_flight_by_chunk",
    "least_sums",
    "limit_groups",
    "mask_forbidden",
    "quick_bound",
    "representative_microbatches",
    "solve_chunked",
    "sums_by_count",
]  # fmt: skip

_PERIODS = 3  # groups of about p microbatches: after so many a schedule repeats itself


@lru_cache(maxsize=256)
def in_flight_by_chunk(schedule: str, p: int, m: int, v: int) -> tuple[NDArray[np.intp], ...]:
    """Per device group, the microbatches in flight of each of its chunks whenever that is most: [times, v]."""
    few = representative_microbatches(p, m)
    split = schedule.startswith("zb")
    out = []
    for row in generate(schedule, p, few, v).actions:
        now, seen, rose = [0] * v, set(), False
        for action in row:
            if action.kind == "F":
                now[action.chunk] += 1
                rose = True
            elif action.kind == ("W" if split else "B"):
                if rose:
                    seen.add(tuple(now))
                now[action.chunk] -= 1
                rose = False
        out.append(np.array(sorted(seen), dtype=np.intp).reshape(-1, v))
    return tuple(out)


def representative_microbatches(p: int, m: int) -> int:
    """Microbatches that repeat all that ``m`` do: in groups of the same sizes (``interleaved``), a few of each size."""
    count = max(1, m // p)
    size, larger = divmod(m, count)
    kept = min(larger, _PERIODS), min(count - larger, _PERIODS)
    few = sum(kept) * size + kept[0]
    return few if few // p == sum(kept) else m


@dataclass(frozen=True)
class _Case:
    option: int
    #: device groups
    p: int
    #: chunks per group
    v: int
    #: the least largest pace of p v chunks
    cap_s: float
    #: a lower bound on the makespan
    low_s: float


def solve_chunked(
    table: PipelineTable,
    num_microbatches: int,
    schedule: str = "interleaved",
    chunks: Sequence[int] = (2,),
    constraints: StageConstraints | None = None,
    top_k: int = 8,
    most: float = inf,
) -> PipelineSolution | InfeasiblePipeline:
    """The best pipelines with ``chunks`` chunks per group, each of another option, p or v.

    The constraints' cuts are those of chunks, their stages are device groups. most: seconds; pipelines whose estimate
    is at least that do not matter.
    """
    m, constraints = num_microbatches, constraints or StageConstraints()
    if schedule not in ("interleaved", "zb-v"):
        raise ValueError(f"a schedule with chunks is interleaved or zb-v, but got {schedule!r}; use stage_dp.solve")
    cases = []
    work = least_sums(table.pace_s, constraints)
    in_flight_by_chunk = (
        least_sums(table.resident + table.saved, constraints) if most < inf else np.zeros(len(table.options))
    )
    for index, option in enumerate(table.options):
        room, counts = max(option.limit_bytes, default=0.0), group_counts(table.num_layers, option, chunks, constraints)
        counts = [(p, v) for p, v in counts if m * work[index] / p < most and in_flight_by_chunk[index] / p <= room]
        if counts:
            pace = mask_forbidden(table.pace_s[index], constraints)
            largest, least = (
                _tables(pace, max(p * v for p, v in counts), pipeline) for pipeline in (np.maximum, np.add)
            )
            caps, sums = largest.tolist(), least.tolist()
            cases += [_Case(index, p, v, caps[p * v], m * max(caps[p * v], sums[p * v] / p)) for p, v in counts]
    pipelines: list[Pipeline] = []
    nearest: tuple[float, Pipeline] | None = None
    divisions: dict[tuple[int, float], _Divisions] = {}
    for case in sorted((pipeline for pipeline in cases if pipeline.low_s < most), key=lambda pipeline: pipeline.low_s):
        if len(pipelines) >= top_k and case.low_s >= sorted(pipeline.estimate_s for pipeline in pipelines)[top_k - 1]:
            break
        if (key := (case.option, case.cap_s)) not in divisions:
            divisions[key] = _Divisions(mask_forbidden(table.pace_s[case.option], constraints), case.cap_s)
        pipeline = _pipeline(table, m, schedule, case, divisions[key].cuts(case.p * case.v), most)
        if pipeline is None:
            continue
        missing = max(a - b for a, b in zip(pipeline.peak_bytes, pipeline.limit_bytes))
        if missing <= 0:
            pipelines.append(pipeline)
        elif nearest is None or missing < nearest[0]:
            nearest = missing, pipeline
    if not pipelines:
        return _infeasible(nearest, schedule)
    best = tuple(sorted(pipelines, key=lambda pipeline: pipeline.estimate_s)[:top_k])
    return PipelineSolution(best, min(pipeline.path_s for pipeline in best), complete=False)


def least_sums(values: Floats, constraints: StageConstraints) -> Floats:
    """[options] the least sum of [options, L, L + 1] values along the layers, cut into any number of runs."""
    layers = values.shape[1]
    allowed = constraints.allowed(*np.indices((layers, layers + 1)))
    every = bool(allowed.all())
    least = np.full((len(values), layers + 1), inf)
    least[:, 0] = 0.0
    for j in range(1, layers + 1):
        runs = slice(j) if every else np.flatnonzero(allowed[:j, j])
        if every or allowed[:j, j].any():
            least[:, j] = (least[:, runs] + values[:, runs, j]).min(axis=1)
    return least[:, layers]


def sums_by_count(values: Floats, most: int, constraints: StageConstraints) -> Floats:
    """[most + 1] the least sum of [L, L + 1] values along the layers, cut into that many runs."""
    return _tables(mask_forbidden(values, constraints), most, np.add)


def limit_groups(groups: int, constraints: StageConstraints) -> StageConstraints:
    """The constraints with no more device groups than that."""
    least, most = constraints.stages
    return replace(constraints, stages=(least, groups if most is None else min(groups, most)))


def quick_bound(floors: LowerBounds, m: int, constraints: StageConstraints) -> float:
    """A lower bound on the makespan of every pipeline with two chunks or more per group, under any schedule; inf where
    no such pipeline exists."""
    layers = floors.pace_s.shape[1]
    counts = [group_counts(layers, option, (2,), constraints) for option in floors.options]
    room = [index for index, some in enumerate(counts) if some]
    if not room:
        return inf
    groups = np.array([max(p for p, _ in counts[index]) for index in room])
    limits = np.array([max(floors.options[index].limit_bytes) for index in room])
    load = least_sums(floors.pace_s[room], constraints) / groups
    for row in floors.rows:
        priced = max(row.byte, row.saved_byte)
        load = np.maximum(load, least_sums(row.value[room], constraints) / groups - limits * priced)
    return float(m * load.min())


def mask_forbidden(pace: Floats, constraints: StageConstraints) -> Floats:
    """[L, L + 1] paces of the runs that may be chunks; the others take for ever."""
    at = np.indices(pace.shape)
    return np.where((at[0] < at[1]) & constraints.allowed(at[0], at[1]), pace, inf)


def group_counts(
    num_layers: int, option: StageOption, chunks: Sequence[int], constraints: StageConstraints
) -> list[tuple[int, int]]:
    """The (groups, chunks per group) that the devices and layers allow; one group alone is no pipeline."""
    least, most = constraints.stages
    room = len(_offsets(option))
    every = range(max(2, least), min(room, num_layers, room if most is None else most) + 1)
    return [(p, v) for p in every for v in chunks if p * v <= num_layers]


def _offsets(option: StageOption) -> list[int]:
    out: list[int] = []
    for offset in option.offsets:
        if not out or offset >= out[-1] + option.num_devices:
            out.append(offset)
    return out


def _tables(pace: Floats, most: int, combine: np.ufunc) -> Floats:
    """Per number of chunks 0 … most, their least sum of paces (``np.add``) or least largest pace (``np.maximum``)."""
    value, out = np.full(len(pace) + 1, inf), np.full(most + 1, inf)
    value[0] = 0.0
    for count in range(1, most + 1):
        value = combine(value[:-1, None], pace).min(axis=0)
        out[count] = value[-1]
    return out


class _Divisions:
    """Divisions of the layers into chunks with paces of at most ``cap`` and the least Σ t², for one number of chunks
    after the other."""

    def __init__(self, pace: Floats, cap: float) -> None:
        layers = len(pace)
        possible = pace <= cap
        ends = np.arange(layers + 1)
        longest = int((possible * (ends - ends[:-1, None])).max())
        self._first = ends[:, None] - longest + np.arange(longest)  # [ends, longest] where a chunk may begin; < 0: not
        square = np.where(possible, pace, inf) ** 2
        self._square = np.where(self._first >= 0, square[self._first, ends[:, None]], inf)
        self._value = np.where(ends > 0, inf, 0.0)
        self._came: list[NDArray[np.intp]] = []

    def cuts(self, count: int) -> list[int]:
        """The positions where ``count`` chunks begin and end; of equal ones the first in reverse order."""
        while len(self._came) < count:
            total = self._value[self._first] + self._square
            best = total.argmin(axis=1)
            self._came.append(self._first[:, 0] + best)
            self._value = total[np.arange(len(best)), best]
        cuts = [len(self._value) - 1]
        for before in reversed(self._came[:count]):
            cuts.append(int(before[cuts[-1]]))
        return cuts[::-1]


def _pipeline(
    table: PipelineTable, m: int, schedule: str, case: _Case, cuts: Sequence[int], most: float
) -> Pipeline | None:
    """The pipeline of a case with these cuts; None if its estimate is ``most`` or above."""
    p, v, option = case.p, case.v, table.options[case.option]
    offsets, places = _offsets(option)[:p], virtual_order(schedule, p, v)
    at = [(case.option, first, end) for first, end in pairwise(cuts)]
    pace = [float(table.pace_s[one]) for one in at]
    entries = [0.0 if table.entry_s is None else float(table.entry_s[one]) for one in at]
    messages = [float(table.transfer_s[one]) + entry for one, entry in zip(at, entries[1:])]
    share = [table.share("forward_share", one) for one in at]
    load, step, resident, transient = ([0.0] * p for _ in range(4))
    saved = np.zeros((p, v))
    for (group, chunk), one, t in zip(places, at, pace):
        load[group] += t
        step[group] += float(table.step_s[one])
        resident[group] += float(table.resident[one])
        transient[group] = max(transient[group], float(table.transient[one]))
        saved[group, chunk] = float(table.saved[one])
    estimate = before = 0.0
    for k in range(p):
        ends = step[k] if schedule == "zb-v" else step[0]
        estimate = max(estimate, before + m * load[k] + ends)
        if k < p - 1:
            before += share[k] * pace[k] + messages[k] / 2 if schedule == "zb-v" else pace[k] + messages[k]
    if estimate >= most:
        return None
    filled = max(estimate, before + m * max(load) + step[0])
    worst = [times[(times @ s).argmax()] for s, times in zip(saved, in_flight_by_chunk(schedule, p, m, v))]
    peaks = [r + t + float(times @ s) for r, t, s, times in zip(resident, transient, saved, worst)]
    return Pipeline(
        stages=tuple(StageChoice(i, j, case.option, offsets[g]) for (g, _), i, j in zip(places, cuts, cuts[1:])),
        path_s=filled,
        latency_s=filled,
        estimate_s=estimate,
        in_flight=tuple(in_flight_formula(schedule, k, p, m, v) for k in range(p)),
        peak_bytes=tuple(peaks),
        limit_bytes=tuple(option.limit(offset) for offset in offsets),
        idle_devices=table.num_devices - p * option.num_devices,
        chunks=v,
        chunk_bytes=tuple(
            float(table.resident[one] + table.transient[one]) + float(worst[group][chunk] * saved[group, chunk])
            for (group, chunk), one in zip(places, at)
        ),
    )


def _infeasible(nearest: tuple[float, Pipeline] | None, schedule: str) -> InfeasiblePipeline:
    if nearest is None:
        return InfeasiblePipeline(f"no option has room for two or more groups of chunks under {schedule}", inf)
    missing, one = nearest
    k = max(range(len(one.peak_bytes)), key=lambda group: one.peak_bytes[group] - one.limit_bytes[group])
    offset = sorted({stage.device_offset for stage in one.stages})[k]
    choice = next(stage for stage in one.stages if stage.device_offset == offset)
    return InfeasiblePipeline(
        f"no pipeline with chunks fits under {schedule}; the nearest has {len(one.peak_bytes)} groups of {one.chunks} "
        f"chunks, and its group {k} needs {one.peak_bytes[k]:,.0f} bytes per device where the limit is "
        f"{one.limit_bytes[k]:,.0f}: {missing:,.0f} bytes are missing",
        missing,
        one.stages,
        k,
        choice,
        one.peak_bytes[k],
        one.limit_bytes[k],
    )
