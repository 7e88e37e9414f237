"""Lower bounds on the regular pipelines of a mesh and of its cases (``regular``), whatever their cuts.

T_k = Σ_{c ∈ D_k} t_c is a group's load. By the proof in ``bounds``, with the chunks in place of stages, every sound
schedule takes at least Σ_{c<k} (f_c + x_c) + m T_k, with the end of the step (``least_work``); interleaved, Σ_{c<k}
(t_c + x_c) + m T_k, with x the messages, there and back. With one chunk per group ``placed_bound`` adds what the group
waits for (``waits``), with messages by where the groups lie; it is the least W over all cuts, on lower bounds of t.

With its work per step σ_k a group takes m T_k + σ_k − h. What hides beside the last backward, h, is at most the overlap
o of that backward, and o of the sums ρ_k of whole gradients. So for every ω in [0, 1], with β = o (1 − ω) ::

    m T_k + σ_k − h ≥ (m − β) v_k + β f_k,  v_k the least of t + (σ − o ω ρ) / (m − β) over all choices

A path through n ≤ m of its microbatches, and the end of the step behind, take at least n / m of that.

Weights that the first and the last group hold are exchanged when all work of both is done, and when the last backward
of the first has ended, which ends every microbatch's way there and back (but under zb-v, where one group is both).

A level (λ, μ), seconds per resident byte and per saved byte, says t_c + λ r_c + μ s_c ≥ value_c for every choice. At
some time group k holds h_c microbatches of each of its chunks, so that Σ (r_c + h_c s_c) ≤ M, and with a level of the
same λ for each chunk and θ_c = min(1, λ h_c / μ_c)

    T_k ≥ Σ_{c ∈ D_k} (pace_c + θ_c (value_c − pace_c)) − λ M

``MeshTable.work_levels`` say the same of all work of a step at ω = 1, over m.

``case_bounds`` know neither messages nor waits. The least seconds of all that follows on each other in a schedule are a
bound, too, on the cuts that are tried (``regular_solver``, ``cutting_planes``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf

import numpy as np

from .families import PIPEDREAM, in_flight_formula, is_split
from .regular import MeshTable, PipelineCase, least_sums
from .table import Floats
from .waits import StageSeconds, end_lines, wait_lines

__all__ = ["case_bounds", "least_paths", "mesh_bound", "placed_bound"]


def mesh_bound(mesh: MeshTable, m: int, groups: int) -> float:
    """Seconds that no pipeline of at most ``groups`` groups of a mesh undercuts, whatever its cuts and schedule."""
    if (np.diagonal(mesh.peak, 1) > mesh.most_bytes).any():
        return inf
    return max(m * _mean_load(mesh, groups), _mean_work(mesh, m) / groups)


def _mean_work(mesh: MeshTable, m: int) -> float:
    """The least sum of ``least_work`` of all layers; 0 where that says no more than ``_mean_load``."""
    if mesh.work is None:
        return 0.0
    return float(least_sums(np.where(mesh.allowed, mesh.least_work(m), inf)))


def _mean_load(mesh: MeshTable, groups: int) -> float:
    """The least mean load of so many groups, with one microbatch in flight."""
    prices = groups * np.maximum(mesh.byte, mesh.saved_byte)
    pace, values = mesh.least_sums[0], mesh.least_sums[1:]
    return max(float(pace), float((values - mesh.most_bytes * prices).max(initial=0.0))) / groups


def _most_groups(cases: Sequence[PipelineCase]) -> dict[str, int]:
    """The largest number of groups of each schedule with one chunk per group."""
    most: dict[str, int] = {}
    for case in cases:
        if case.chunks == 1:
            most[case.schedule] = max(case.groups, most.get(case.schedule, 0))
    return most


def least_paths(mesh: MeshTable, m: int, most: Mapping[str, int]) -> dict[str, Floats]:
    """By schedule, [most + 1] the least W of pipelines of so many stages, on lower bounds of these."""
    seconds = cache(mesh.least_seconds)

    def stage(name: str, left: int) -> tuple[Floats, Floats | float]:
        """The seconds of the first of so many stages, and those that the others wait for it."""
        bound = seconds(in_flight_formula(name, 0, left, m))  # of several stages the first holds the most
        if name == PIPEDREAM:
            return m * bound, 0.0
        return m * bound, mesh.forward if is_split(name) or mesh.whole else np.maximum(bound, mesh.forward)

    return {name: _paths(stage(name, left) for left in range(1, groups + 1)) for name, groups in most.items()}


def _paths(stages: Iterable[tuple[Floats, Floats | float]]) -> Floats:
    """[stages + 1] the least W of so many stages, of [L, L + 1] the seconds of each and those that the others wait for
    it, from the last stage to the first."""
    rest, paths = None, [inf]
    for head, wait in stages:
        if rest is None:
            rest = np.where(np.arange(head.shape[1]) == len(head), 0.0, inf)
        rest = np.append(np.maximum(head, wait + rest).min(axis=1), inf)
        paths.append(float(rest[0]))
    return np.array(paths)


def case_bounds(mesh: MeshTable, m: int, cases: Sequence[PipelineCase]) -> list[float]:
    """Seconds that no pipeline of each case undercuts, whatever its cuts: with one chunk per group the least W on lower
    bounds of stages, else the mean load or the largest chunk."""
    count = max((case.groups * case.chunks for case in cases if case.chunks > 1), default=0)
    slowest = _least_largest(np.where(mesh.allowed, mesh.pace, inf), count)
    trip = float(least_sums(np.where(mesh.allowed, mesh.trip, inf)))  # of one microbatch through all layers
    trips = {"interleaved": float(mesh.least_sums[0]), "zb-v": trip}
    ends, paths = _mean_work(mesh, m), least_paths(mesh, m, _most_groups(cases))
    return [
        float(paths[case.schedule][case.groups])
        if case.chunks == 1
        else max(
            m * _mean_load(mesh, case.groups),
            ends / case.groups,
            m * float(slowest[case.groups * case.chunks]),
            trips[case.schedule] + (0.0 if case.schedule == "zb-v" else float(mesh.tied(case.groups)[-1])),
        )
        for case in cases
    ]


def _least_largest(values: Floats, most: int) -> Floats:
    """[most + 1] the least largest of values [L, L + 1] along exactly so many runs of layers."""
    value, out = np.full(len(values) + 1, inf), np.full(most + 1, inf)
    value[0] = 0.0
    for count in range(1, most + 1):
        value = np.maximum(value[:-1, None], values).min(axis=0)
        out[count] = value[-1]
    return out


# ---- one chunk per group, with messages by where the groups lie

_NEVER = 1e30  # seconds of what is impossible: 0 times so many are 0


def placed_bound(mesh: MeshTable, m: int, case: PipelineCase) -> float:
    """Seconds that no pipeline of a case with one chunk per group undercuts, whatever its cuts."""
    p, name, borders = case.groups, case.schedule, mesh.pace.shape[1]
    tied_s, nothing = float(mesh.tied(p)[p]), np.zeros(borders)
    work, seconds = mesh.least_work(m), cache(mesh.least_seconds)
    priced = None if mesh.priced_work is None else cache(mesh.priced_work.least_seconds)
    # of the stages from each border on: the way of a microbatch there and back; until the last backward of the first
    # of them; until all have ended their step
    way = back = whole = np.where(np.arange(borders) == borders - 1, 0.0, _NEVER)
    for k in reversed(range(p)):
        held = in_flight_formula(name, k, p, m)
        t = np.minimum(seconds(held), _NEVER)
        all_work = np.maximum(work / m, t if priced is None else np.maximum(t, priced(held)))
        all_work = np.minimum(all_work, _NEVER)
        if name == PIPEDREAM:  # a step runs into the next
            whole = np.append(np.maximum(m * all_work, whole).min(axis=1), _NEVER)
            continue
        ahead, returned = mesh.hop(k, k + 1) if k < p - 1 else (nothing, nothing)
        messages = ahead + returned
        if mesh.whole:  # only the first stage's work per step follows on what others do
            t = np.where(t < _NEVER, mesh.pace, _NEVER)
        trip = np.where(t < _NEVER, np.minimum(mesh.trip, t), _NEVER) if is_split(name) else t
        entry = mesh.hop(k - 1, k)[0][:-1, None] if k else 0.0
        q, behind = min(m, p - k) if is_split(name) else held, messages + way
        of = StageSeconds(t, trip, mesh.forward, mesh.backward, entry, returned)
        ending = replace(of, t=all_work, trip=trip if is_split(name) else all_work)
        last, end = (
            np.maximum.reduce([slope * behind + constant for slope, constant in lines])
            for lines in (
                wait_lines(name, m, q, k, of),
                [*wait_lines(name, m, q, k, ending), *end_lines(name, m, q, ending), (0.0, m * all_work)],
            )
        )
        own = end + (tied_s if k in (0, p - 1) else 0.0)
        back_s = np.maximum(last, trip + messages + back) + (tied_s if k == 0 else 0.0)
        back = np.append(back_s.min(axis=1), _NEVER)
        whole = np.append(np.maximum(own, mesh.forward + ahead + whole).min(axis=1), _NEVER)
        way = np.append((trip + messages + way).min(axis=1), _NEVER)
    found = max(float(whole[0]), 0.0 if name == PIPEDREAM else float(back[0]))
    return found if found < _NEVER else inf
