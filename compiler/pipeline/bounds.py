"""Lower bounds on the makespan: of every pipeline of a table, and of one.

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

So max_k V(k) = W of ``stage_dp``, and its least value over all pipelines is a bound, also if t, x, σ are replaced by
*floors* that no choice of the stage undercuts: V and H ascend with each of them. Under zb-h1 m t_k with f + i fills is
no bound: the weights' gradients of stage k may run while the last gradients flow back. What a stage waits for from its
first forward to its last backward takes the place of V(k)'s m t_k (``waits``). What the first and the last stage
exchange follows on V(0), H(0) and H(p − 1). Floors of f + i are rows of values that leave w out
(``LagrangianBound.trip``).

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
slow 1F1B down though they overlap. Under GPipe the last stage does all F before any B: the last F there ends after
Σ_j (f_j + x_j^forward) + (m − 1) f_k for each k, and by symmetry all B take Σ_j (b_j + x_j^backward) + (m − 1) b_k at
least, so the makespan is at least Σ_j (t_j + x_j) + (m − 1) (max f + max b) + σ_0.

What stages wait for are lines of ``recurrence``: the fills before k, a constant of stage k and a slope (⌈m/q_k⌉, 2, 1
or 0) times the sum of t + x behind it. So Z on floors, whose S is for every number of stages the least sum of t + x,
bounds all pipelines. Z is solved on what may be part of a pipeline of makespan λ at all — no stage with m t_k + σ_k > λ
— for several λ: the larger these sums for smaller λ, the more is proven (``_narrowed``).

A pipeline of a table on a clock: its makespan by the tables' seconds, before anything is assembled.

Of many microbatches only the first are played: after eight per stage (with several chunks: three, of as many actions) a
pipeline repeats itself, and the rest takes as long per microbatch as the last p of these did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite

import numpy as np

from .families import PIPEDREAM, generate, is_split
from .k_best import LIMIT_STEPS, Mode, evaluate, gather_arcs, minimise
from .recurrence import Rows, StageRecurrence
from .simulate import simulate, simulate_steady_state
from .table import Floats, Ints, LowerBounds, Pipeline, PipelineTable, StageChoice, StageConstraints
from .waits import StageSeconds, wait_lines

__all__ = ["TRIALS", "BoundCosts", "Makespan", "MakespanBound", "candidate_makespan", "clock_seconds"]


_CLOSE = 2e-3  # of the bound: nearer to the largest provable it need not be
TRIALS = 6


# ---- of every pipeline


class BoundCosts:
    """The lower bounds of stages as [rows, pairs], at any number of microbatches in flight. Stages that alone take more
    than ``cap_s`` are impossible."""

    def __init__(self, floors: LowerBounds, rows: Rows, m: int, schedule: str) -> None:
        self.m, self.schedule, self.cap_s = m, schedule, inf
        leaves, enters = rows.end < rows.num_layers, rows.first > 0
        self.pace = rows.packed(floors.pace_s)
        none = np.broadcast_to(0.0, self.pace.shape)

        def packed(array: Floats | None) -> Floats:
            return none if array is None else rows.packed(array)

        self.whole, self.step = packed(floors.whole_s), packed(floors.step_s)
        self.behind = np.where(leaves, packed(floors.transfer_s), 0.0)
        room = rows.limit[:, None] - packed(floors.transient)
        self.room = np.broadcast_to(np.maximum(room, 0.0), self.pace.shape)
        self.is_first = np.broadcast_to(~enters, self.pace.shape)
        self.entry = np.where(self.is_first, 0.0, packed(floors.entry_s))
        ends = np.where(enters != leaves, floors.tied_s, 0.0)  # the first and the last of several stages
        self.tied = np.broadcast_to(ends, self.pace.shape)
        self.once = np.where(self.is_first, self.step + self.tied, self.entry)
        self.returned = none if floors.entry_s is None else self.behind
        self.forward, self.backward = packed(floors.forward_s), packed(floors.backward_s)
        self.lagrange = [(row, rows.packed(row.value)) for row in floors.rows]
        self.split = is_split(schedule)
        self._all: dict[int, tuple[Floats, Floats, Floats]] = {}  # by q, of all rows and pairs

    def _at_least(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats, Floats]:
        """(pace, m · pace + per-step work, what of the pace is on a microbatch's way there and back)."""
        if not isinstance(row, slice):
            return self._computed(q, row, pair)
        if q not in self._all:
            self._all[q] = self._computed(q, row, pair)
        return self._all[q]

    def _computed(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats, Floats]:
        pace, whole, room = self.pace[row, pair], self.whole[row, pair], self.room[row, pair]
        trip = np.broadcast_to(0.0, pace.shape)
        for one, value in self.lagrange:
            least = value[row, pair] - room * max(one.byte, one.saved_byte / q)
            if one.whole:
                whole = np.maximum(whole, least)
            elif one.trip:
                trip = np.maximum(trip, least)
            else:
                pace = np.maximum(pace, least)
        possible = np.where(np.isfinite(pace), pace, 0.0)
        trip = np.where(np.isfinite(trip), trip, 0.0) if self.split else possible
        pace = np.maximum(pace, trip)
        return pace, np.maximum(self.m * whole, self.m * pace + self.step[row, pair]), trip

    def _there_and_back(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats]:
        """(head, the part of a microbatch's way that is in the stage)."""
        pace, whole, trip = self._at_least(q, row, pair)
        first = self.is_first[row, pair]
        head = np.where(first | ~np.isfinite(pace), whole, self.m * trip)
        head = head + np.where(first, self.tied[row, pair], self.once[row, pair])
        return np.where(whole <= self.cap_s, head, inf), trip

    def back(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats]:
        """V (V′ where backwards are split): to a stage, its work, and back."""
        head, trip = self._there_and_back(q, row, pair)
        return head, trip + self.behind[row, pair] + self.once[row, pair]

    def turns(self, q: int, left: int, row: Ints | slice, pair: Ints | slice) -> Sequence[tuple[float, Floats]]:
        """The lines of ``back``: those of ``waits``, with the messages at the stage's ends."""
        pace, _, trip = self._at_least(q, row, pair)
        pace = np.where(np.isfinite(pace), pace, trip)
        entry, returned = self.entry[row, pair], self.returned[row, pair]
        of = StageSeconds(pace, trip, self.forward[row, pair], self.backward[row, pair], entry, returned)
        flight = min(q, left) if self.split else q
        lines = wait_lines(self.schedule, self.m, flight, 0, of)  # of the first stage
        if self.split:  # q = p if that is less than m; else how many stages are ahead is not known
            ahead = q - left if q < self.m else self.m
            others, first = wait_lines(self.schedule, self.m, flight, ahead, of), self.is_first[row, pair]
            lines = [(slope, np.where(first, one, other)) for (slope, one), (_, other) in zip(lines, others)]
        behind, once = self.behind[row, pair], self.once[row, pair]
        return [(slope, constant + slope * behind + once) for slope, constant in lines]

    def parts(self, q: int) -> Sequence[Floats]:
        """The values that the constants of ``turns`` grow with, beside head and fill."""
        pace, _, trip = self._at_least(q, slice(None), slice(None))
        known = self.entry, self.behind, self.forward, self.backward
        return trip, np.where(np.isfinite(pace), pace, trip), *known

    def ahead(self, q: int, row: Ints | slice, pair: Ints | slice) -> tuple[Floats, Floats]:
        """H: to a stage, its work, and its end of step."""
        _, whole, _ = self._at_least(q, row, pair)
        entry = self.entry[row, pair]
        return whole + self.tied[row, pair] + entry, self.forward[row, pair] + entry


class MakespanBound:
    """A lower bound on the makespan of every pipeline, from lower bounds of stages. Recurrences that were solved are
    cached by their limit."""

    def __init__(
        self, bounds: LowerBounds, rows: Rows, m: int, schedule: str, of: Sequence[Mode], constraints: StageConstraints
    ) -> None:
        self.of, self.in_flight = of, sorted({q for mode in of for q in mode.flights})
        self.bounds, self.rows, self._least = bounds, rows, dict[float, float]()
        self.allowed = constraints.allowed(rows.first, rows.end)
        self.costs = BoundCosts(bounds, rows, m, schedule)

    def seconds(self, most: float = inf, trials: int = TRIALS) -> float:
        """The bound; ``most`` where the lower bounds of stages allow no pipeline so fast.

        trials: limits to try between the largest that is known to be too low and the least that is not.
        """
        if not len(self.rows.option):
            return most
        bound = self._narrowed(most, trials)
        if self.bounds.forward_s is not None and bound < most:
            search = StageRecurrence(self.rows, self.costs.ahead, self.in_flight, self.allowed)
            solution = minimise(search, self.of, most=most)
            bound = max(bound, most if solution is None else min(solution.best, most))
        return bound

    def _search(self, limit: float) -> StageRecurrence:
        self.costs.cap_s = limit
        costs = self.costs
        return StageRecurrence(
            self.rows, costs.back, self.in_flight, self.allowed, turns=costs.turns, parts=costs.parts
        )

    def least(self, limit: float) -> float:
        """The least Z of pipelines whose V and stages are at most ``limit``; inf if there are none."""
        if limit not in self._least:
            search = self._search(limit)
            self._least[limit] = evaluate(gather_arcs(search, self.of, limit)).best if search.low <= limit else inf
        return self._least[limit]

    def _narrowed(self, most: float, trials: int) -> float:
        """The largest min(λ, least(λ)) of some λ ≤ most: each is a bound, as no pipeline under λ is left out."""
        low = self._search(inf).low if most == inf else 0.0
        limits = [low * (1.0 + wider) if isfinite(wider) else inf for wider in LIMIT_STEPS] if most == inf else [most]
        high = value = inf
        for high in limits if low < inf else ():
            if (value := self.least(high)) <= high:
                break
            low = high
        if not value <= high or value == inf:
            return min(most, max(low, value))
        low = max(low, value)
        for _ in range(trials):
            if high <= low * (1.0 + _CLOSE):
                break
            middle = (low * high) ** 0.5 if low else high / 2
            value = self.least(middle)
            if value <= middle:
                low, high = max(low, value), middle
            else:
                low = middle
        return low


# ---- of one pipeline


@dataclass(frozen=True)
class Makespan:
    """A pipeline's W and T (``stage_dp``) and the largest proven bound on its own makespan."""

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
    if schedule == PIPEDREAM:
        return _steady(m, pace_s, messages_s, step_s, in_flight)
    p, first_step = len(pace_s), step_s[0]
    split = is_split(schedule)
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
        floor = max(floor, longest + sum(messages) + first_step)
    latency = sum(fills) + sum(messages) + max(m * t - fill for t, fill in zip(pace_s, fills))
    return Makespan(path + first_step, latency + first_step, floor)


def _steady(
    m: int, pace_s: Sequence[float], messages_s: Sequence[float], step_s: Sequence[float], in_flight: Sequence[int]
) -> Makespan:
    """A step of a pipeline that never drains: its slowest stage, or its slowest way there and back, on which there are
    as many microbatches as the stage where it begins may have in flight."""
    work = max(m * t + once for t, once in zip(pace_s, step_s))
    around, turn = 0.0, 0.0
    for t, x, q in reversed(list(zip(pace_s, [*messages_s[: len(pace_s) - 1], 0.0], in_flight))):
        around += t + x
        turn = max(turn, m * around / q)
    return Makespan(work, work, max(work, turn))


PERIODS_SIMULATED = 8  # microbatches per stage
PERIODS_SIMULATED_CHUNKED = 3


def clock_seconds(
    table: PipelineTable, m: int, schedule: str, pipeline: Pipeline, once_s: Sequence[float] = ()
) -> float:
    """Seconds of a step of m microbatches. Between chunks of one stage a message is free. once_s: what each device
    group does at the end of a step beside what the table has."""

    def end_of(stage: StageChoice) -> int:
        return stage.device_offset + table.options[stage.option].num_devices

    at = [(stage.option, stage.first_layer, stage.end_layer) for stage in pipeline.stages]
    v = pipeline.chunks
    p = len(at) // v
    chunks = v if v > 1 else None
    home = pipeline.homes(schedule)
    pace = [float(table.pace_s[one]) for one in at]
    forward = [t * table.share("forward_share", one) for t, one in zip(pace, at)]
    weight = [t - f - t * table.share("input_share", one) for t, f, one in zip(pace, forward, at)]
    entry = [0.0 if table.entry_s is None else float(table.entry_s[one]) for one in at]
    both = [float(table.transfer_s[one]) for one in at]
    ahead, back = {}, {}
    for k, (there, again) in enumerate(pipeline.messages_s):
        ahead[k, k + 1], back[k, k + 1] = there, again
    for k in range(p * v - 1) if not pipeline.messages_s else ():
        ahead[k, k + 1], back[k, k + 1] = entry[k + 1], both[k]
        if table.entry_s is None:
            ahead[k, k + 1] = back[k, k + 1] = both[k] / 2
        elif pipeline.stages[k + 1].device_offset > end_of(pipeline.stages[k]):  # it leaves its host with devices idle
            back[k, k + 1] = max(both[k], entry[k + 1])
        if home[k] == home[k + 1]:
            ahead[k, k + 1] = back[k, k + 1] = 0.0
    step = [sum(float(table.step_s[one]) for one, s in zip(at, home) if s == stage) for stage in range(p)]
    step = [both + (once_s[stage] if once_s else 0.0) for stage, both in enumerate(step)]

    if schedule == PIPEDREAM:
        return simulate_steady_state(m, forward, [t - f for t, f in zip(pace, forward)], ahead, step, back).makespan_s

    def played(count: int) -> float:
        return simulate(
            generate(schedule, p, count, chunks), forward, [t - f for t, f in zip(pace, forward)], ahead or None, step,
            back if ahead else None, weight if is_split(schedule) else None,
        ).makespan_s  # fmt: skip

    few = PERIODS_SIMULATED if v == 1 else PERIODS_SIMULATED_CHUNKED
    short = few * p + m % p  # schedules depend on what is left of the last round
    if m <= short + p:
        return played(m)
    short_s, long_s = played(short), played(short + p)
    # a group that is a little slower than the others holds them up only after many microbatches
    busy_s = max(step[k] + m * sum(t for t, stage in zip(pace, home) if stage == k) for k in range(p))
    return max(busy_s, long_s + (m - short - p) * (long_s - short_s) / p)
