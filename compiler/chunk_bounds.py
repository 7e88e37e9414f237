"""What the makespan of no pipeline with several chunks per device group undercuts, by floors and what chunks hold.

As in ``pipeline_chunks``: p groups under one option with M bytes per device, group k has v chunks D_k of the p v, and
the makespan is at least m T_k + σ_k, T_k = Σ_{c ∈ D_k} t_c. At some time group k holds h_c microbatches of each of its
chunks c, all at once (``at_once``), so that Σ_{c ∈ D_k} (r_c + h_c s_c) ≤ M. A Lagrangian pair (λ, μ) of
``pipeline_bound`` says t_c ≥ value_c − λ r_c − μ s_c, and t_c ≥ pace_c. With θ_c = min(1, λ h_c / μ),

    T_k ≥ Σ_{c ∈ D_k} (pace_c + θ_c (value_c − pace_c)) − λ M,      as  θ_c λ r_c + θ_c μ s_c ≤ λ (r_c + h_c s_c).

The sum of these over all groups is p max_k T_k at most. Its left side depends on the cuts alone, chunk by chunk: its
least is a dynamic programme over chunks and layers (``_least``), where no chunk takes longer than the makespan that is
of interest. Where values count the per-step work, divided by m, it is m T_k + σ_k that is bounded so.

The least over options, p and v is looked for best first: ``quick_bound``'s terms (h = 1, any number of chunks) rank
them, and where these are no less than what was found, nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop
from math import inf

import numpy as np

from .pipeline_chunks import allowed_only, least_sums, room_for
from .pipeline_table import Constraints, Floats, Floors, Lagrange
from .schedule import in_flight_formula, virtual_order

__all__ = ["at_once", "chunk_bound"]

ROWS = 2  # pairs of prices that a case is looked at with


def at_once(schedule: str, p: int, m: int, v: int) -> list[int]:
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
    floors: Floors, m: int, schedule: str, chunks: Sequence[int], constraints: Constraints, most: float = inf
) -> float:
    """What no pipeline with m microbatches and any of these numbers of chunks undercuts, or ``most`` where that is
    less; inf where there is room for none."""
    layers = floors.pace_s.shape[1]
    limits = [max(option.limit_bytes, default=0.0) for option in floors.options]
    pace = least_sums(floors.pace_s, constraints)
    sums = [least_sums(row.value, constraints) for row in floors.rows]
    cases = []
    for o, option in enumerate(floors.options):
        for p, _ in room_for(layers, option, (min(chunks),), constraints):
            priced = [one[o] - p * limits[o] * max(row.byte, row.saved_byte) for one, row in zip(sums, floors.rows)]
            cases.append((m * max(float(pace[o]), *map(float, priced), 0.0) / p, o, p))
    if not cases:
        return inf
    heapify(cases)
    bound = most
    while cases and cases[0][0] < bound:
        low, o, p = heappop(cases)
        hopeful = [(float(one[o]) - p * limits[o] * row.byte, row) for one, row in zip(sums, floors.rows) if row.byte]
        rows = [row for value, row in sorted(hopeful, key=lambda one: -one[0])[:ROWS] if m * value / p > low]
        for v in (v for v in chunks if p * v <= layers):
            found = _with_rows(floors, o, (schedule, p, m, v), rows, constraints, most)
            bound = min(bound, max(low, m * found / p))
    return bound


def _with_rows(
    floors: Floors, o: int, case: tuple[str, int, int, int], rows: Sequence[Lagrange], constraints: Constraints,
    most: float,
) -> float:  # fmt: skip
    """Σ_k T_k at least, by the best of some rows: one option, and (schedule, p, m, v)."""
    _, p, m, _ = case
    held = np.array(at_once(*case), dtype=float)
    limit = max(floors.options[o].limit_bytes, default=0.0)
    pace = allowed_only(floors.pace_s[o], constraints)
    pace = np.where(m * pace <= most, pace, inf)
    found = 0.0
    for row in rows:
        theta = np.minimum(1.0, row.byte * held / row.saved_byte) if row.saved_byte else np.ones(len(held))
        found = max(found, _least(pace, row.value[o], theta) - p * limit * row.byte)
    return found


def _least(pace: Floats, value: Floats, theta: Floats) -> float:
    """The least Σ_c pace + θ_c (value − pace) of as many runs of layers as there are θ; pace: inf where none may be."""
    at = np.isfinite(pace)
    more = np.where(at, value, 0.0) - np.where(at, pace, 0.0)
    made = {one: pace + one * more for one in set(theta.tolist())}
    reached = np.full(len(pace) + 1, inf)
    reached[0] = 0.0
    for one in theta.tolist():
        reached = (reached[:-1, None] + made[one]).min(axis=0)
    return float(reached[-1])
