"""What the makespan of a pipeline is at least: of every pipeline of a table, and of one.

A stage k does F and B of m microbatches, t_k = f_k + b_k seconds each (zb-h1: B in two actions, I of inputs and W of
weights); x_k is a message across the border behind it, forward and back; σ_k its work at the end of the step.

Claim. Under every sound schedule (``schedule.problems``) in which all stages do one action at a time,

    V(k)  = Σ_{j<k} (t_j + x_j) + m t_k + σ_0        (without split backwards)
    V′(k) = Σ_{j<k} (f_j + i_j + x_j) + m (f_k + i_k) + σ_0,   V′(0) = m t_0 + σ_0
    H(k)  = Σ_{j<k} (f_j + x_j^forward) + m t_k + σ_k

are at most the makespan, for each k. Proof. The first action of stage k that is not preceded by another is an F, of
some microbatch a. It waits for the message of stage k − 1's F of a, that for the F of a on stage k − 2, and so on: it
begins after Σ_{j<k} (f_j + x_j^forward). From then on stage k does all its actions, one at a time: they take m t_k, so
its end of step is over after H(k). Its last action that sends a gradient is a B (an I) of some microbatch c, and ends
after m t_k (after at least the m F and the m I, m (f_k + i_k)). Stage k − 1 does B (I) of c after that message, stage k
− 2 after it, down to stage 0; each takes b_j (i_j) and x_j^backward, and stage 0's end of step follows all its actions.
∎

So max_k V(k) = W of ``pipeline_dp``, and its least value over all pipelines is a bound, also if t, x, σ are replaced by
*floors* that no choice of the stage undercuts: V and H ascend with each of them. Under zb-h1 m t_k with f + i fills is
no bound: the weights' gradients of stage k may run while the last gradients flow back.

Floors with memory. If (t, resident r, saved s) is a choice that fits with q microbatches in flight, r + q s + transient
≤ M, and value ≤ t + λ r + μ s is known for all choices, then λ r + μ s ≤ max(λ, μ/q) (r + q s), so

    t ≥ value − (M − transient) · max(λ, μ/q)

for each pair (λ, μ): Lagrangian duality, with the bytes' limit relaxed. The floor at q is the largest over the pairs. A
pair whose values count the per-step work, divided by m, bounds t + σ/m: m times that is at most m t_0 + σ_0 = V(0), and
m t_k + σ_k in H(k).

One pipeline (``candidate_makespan``). At most q_k microbatches are in flight on stage k; R_k = x_k + Σ_{j>k} (t_j +
x_j) is the way from its F to its B. By counting, the n-th B ends D_k = t_k + R_k after the (n − q_k)-th at the
earliest, and if m > q_k at least m − q_k microbatches' F and B lie between the first B's beginning and the last F's
end. With A_k = Σ_{j<k} (t_j + x_j) before and behind, the makespan is at least

    A_k + ⌈m / q_k⌉ D_k + σ_0,    A_k + (m − q_k + 1) t_k + 2 R_k + σ_0  (m > q_k)

(zb-h1: f + i for t, with the at least m − q_k − k W that come before the last F in the second), which is how messages
slow 1F1B down though they overlap; and under GPipe, whose last stage does all F before any B, the longest way of the
forwards and that of the backwards together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from .pipeline_arcs import Rows, Search
from .pipeline_search import Mode, minimise
from .pipeline_table import Constraints, Floats, Floors, Ints, PipelineTable

__all__ = ["Makespan", "candidate_makespan", "lower_bound"]


# ---- of every pipeline


class _FloorCosts:
    """The floors of a table as [rows, pairs], at any number of microbatches in flight."""

    def __init__(self, floors: Floors, rows: Rows, m: int, split: bool) -> None:
        self.floors, self.rows, self.m = floors, rows, m
        leaves, enters = rows.end < rows.num_layers, rows.first > 0
        self.pace = rows.packed(floors.pace_s)
        none = np.zeros_like(self.pace)
        self.whole = none if floors.whole_s is None else rows.packed(floors.whole_s)
        self.step = none if floors.step_s is None else rows.packed(floors.step_s)
        self.behind = none if floors.transfer_s is None else np.where(leaves, rows.packed(floors.transfer_s), 0.0)
        room = rows.limit[:, None] - (0.0 if floors.transient is None else rows.packed(floors.transient))
        self.room = np.broadcast_to(np.maximum(room, 0.0), self.pace.shape)
        self.is_first = np.broadcast_to(~enters, self.pace.shape)
        self.lagrange = [(row.byte, row.saved_byte, row.whole, rows.packed(row.value)) for row in floors.rows]
        self.returns = floors.forward_share + floors.input_share if split else 1.0

    def _at_least(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats]:
        """(pace, m · pace + per-step work)."""
        pace, whole = self.pace[row, pair], self.whole[row, pair]
        for byte, saved_byte, counts_step, value in self.lagrange:
            least = value[row, pair] - self.room[row, pair] * max(byte, saved_byte / q)
            if counts_step:
                whole = np.maximum(whole, least)
            else:
                pace = np.maximum(pace, least)
        return pace, np.maximum(self.m * whole, self.m * pace + self.step[row, pair])

    def back(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats]:
        """V (V′ where backwards are split): to a stage, its work, and back."""
        pace, whole = self._at_least(q, row, pair)
        first = self.is_first[row, pair]
        through = self.returns * np.where(np.isfinite(pace), pace, 0.0)
        head = np.where(first | ~np.isfinite(pace), whole, self.m * through)
        return head, through + self.behind[row, pair] + np.where(first, self.step[row, pair], 0.0)

    def ahead(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats]:
        """H: to a stage, its work, and its end of step."""
        pace, whole = self._at_least(q, row, pair)
        return whole, self.floors.forward_share * np.where(np.isfinite(pace), pace, 0.0)


def lower_bound(
    table: PipelineTable, m: int, schedule: str, of: Sequence[Mode], constraints: Constraints, most: float = inf
) -> float:
    """Seconds that the makespan of no pipeline undercuts, by the floors; ``most`` where they allow none so fast."""
    floors = table.floors
    if floors is None:
        return 0.0
    rows = Rows(floors.options, table.num_layers, table.num_devices)
    if not len(rows.option):
        return most
    split = schedule.startswith("zb")
    costs = _FloorCosts(floors, rows, m, split)
    flights = sorted({q for mode in of for q in mode.flights})
    allowed = constraints.allowed(rows.first, rows.end)
    steps = floors.whole_s is not None or floors.step_s is not None or any(row.whole for row in floors.rows)
    bound = 0.0
    for one in (costs.back, costs.ahead) if steps or split else (costs.back,):
        found = minimise(Search(rows, one, flights, allowed), of, most=most)
        bound = max(bound, most if found is None else min(found.best, most))
    return bound


# ---- of one pipeline


@dataclass(frozen=True)
class Makespan:
    """A pipeline's W and T (``pipeline_dp``) and the largest proven bound on its own makespan."""

    path_s: float
    latency_s: float
    floor_s: float


def candidate_makespan(
    schedule: str,
    m: int,
    pace_s: Sequence[float],
    messages_s: Sequence[float],
    step_s: Sequence[float],
    in_flight: Sequence[int],
    forward_s: Sequence[float],
    input_s: Sequence[float],
) -> Makespan:
    """The figures of one pipeline. Lists have one entry per stage: pace_s all its actions of a microbatch, of which
    forward_s and input_s (backward of inputs) are parts; messages_s across the border behind it, there and back."""
    p, first_step = len(pace_s), step_s[0]
    split = schedule.startswith("zb")
    fills = [f + max(0.0, i - (t - f - i)) if split else t for t, f, i in zip(pace_s, forward_s, input_s)]
    trips = [f + i if split else t for t, f, i in zip(pace_s, forward_s, input_s)]
    messages = [*messages_s[: p - 1], 0.0]
    path = floor = ahead = around = before = 0.0
    left = sum(trips) + sum(messages)
    for k, (t, x, held) in enumerate(zip(pace_s, messages, in_flight)):
        q = min(held, p - k) if split else held  # zb-h1 has 1F1B's order of F and I
        path = max(path, before + m * t)
        left -= trips[k]  # R_k: x_k and all behind
        floor = max(floor, ahead + m * t + step_s[k], around + m * (t if k == 0 else trips[k]) + first_step)
        floor = max(floor, around + ceil(m / q) * (trips[k] + left) + first_step)
        if m > q:
            weights = max(0, m - q - k) * (t - trips[k])  # zb-h1: those before the last F
            floor = max(floor, around + (m - q + 1) * trips[k] + weights + 2 * left + first_step)
        before, ahead, around = before + fills[k] + x, ahead + forward_s[k], around + trips[k] + x
        left -= x
    if schedule == "gpipe":
        backward = [t - f for t, f in zip(pace_s, forward_s)]
        longest = sum(forward_s) + (m - 1) * max(forward_s) + sum(backward) + (m - 1) * max(backward)
        floor = max(floor, longest + first_step)
    latency = sum(fills) + sum(messages) + max(m * t - fill for t, fill in zip(pace_s, fills))
    return Makespan(path + first_step, latency + first_step, floor)
