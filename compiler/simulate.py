"""A pipeline schedule on a clock, without a device: when every action starts and ends, and a picture of it.

An action starts when its stage is free and all its messages are there. A message starts when the action that makes it
has ended, its receiver expects it (the executor posts an action's receives when it comes to the action before) and the
message before it on this direction of the edge is through. With equal stages and free transfers this
gives (m + p − 1)(f + b).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from .schedule import Action, Edge, Schedule, ScheduleError, chain, checked_edges, generate, run_order

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["Simulation", "grid", "simulate", "simulate_plan"]

_FORWARD, _BACKWARD, _IDLE, _END = "0123456789", "₀₁₂₃₄₅₆₇₈₉", "·", "="  # digits, idle, end-of-step work


@dataclass(frozen=True)
class Simulation:
    """When everything happens. Idle time counts up to the last action of any stage, without the end-of-step work.

    ``timeline[s]`` is (start, end, action) in seconds; ``busy_s[s]`` the sum of the stage's actions; ``step_end_s[s]``
    when its end-of-step work is done; ``makespan_s`` the last of these.
    """

    makespan_s: float
    timeline: tuple[tuple[tuple[float, float, Action], ...], ...]
    busy_s: tuple[float, ...]
    step_end_s: tuple[float, ...]

    @property
    def pipeline_s(self) -> float:
        """When the last action of any stage ends."""
        return max((row[-1][1] for row in self.timeline if row), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all stages' seconds: (p − 1)/(m + p − 1) for equal stages."""
        total = self.pipeline_s * len(self.timeline)
        return 1.0 - sum(self.busy_s) / total if total else 0.0


def simulate(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfers_s: Mapping[Edge, float] | None = None,
    end_of_step_s: Sequence[float] | None = None,
    backward_transfers_s: Mapping[Edge, float] | None = None,
) -> Simulation:
    """Run a sound ``schedule`` on a clock: an action starts when its stage is free and its messages are there.

    ``forward_s[s]`` and ``backward_s[s]`` are seconds per microbatch. ``transfers_s`` has every edge (src, dst) of the
    stage graph and the seconds of one message; None or empty means the chain, free of cost. The gradient of an edge
    takes ``backward_transfers_s[edge]``, by default the same. Transfers overlap compute; each direction of an edge
    carries one message at a time, in order, and none before the receiver has come to the action ahead of it.
    ``end_of_step_s[s]`` follows the stage's last action. ScheduleError on a deadlock.
    """
    p = schedule.num_stages
    end_of_step = [0.0] * p if end_of_step_s is None else list(end_of_step_s)
    for name, values in (("forward_s", forward_s), ("backward_s", backward_s), ("end_of_step_s", end_of_step)):
        if len(values) != p:
            raise ValueError(f"{name} has one entry per stage, but got {len(values)} for {p} stages")
    forward_message = dict(transfers_s) if transfers_s else dict.fromkeys(chain(p), 0.0)
    edges = checked_edges(forward_message, p)
    backward_message = forward_message if backward_transfers_s is None else dict(backward_transfers_s)
    if missing := [edge for edge in edges if edge not in backward_message]:
        raise ValueError(f"backward_transfers_s has every edge of transfers_s, but got none for {missing}")

    order, stuck = run_order(schedule, edges)
    if stuck:
        raise ScheduleError(f"schedule {schedule.name!r} deadlocks: forever waiting in {', '.join(map(str, stuck))}")
    outgoing: dict[int, list[Edge]] = defaultdict(list)
    incoming: dict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        outgoing[edge[0]].append(edge)
        incoming[edge[1]].append(edge)

    free_at = [0.0] * p
    expects_at = [0.0] * p  # when the stage came to its latest action; it then posts the receives of the next one
    channel_free_at: dict[tuple[str, Edge], float] = defaultdict(float)
    left_at: dict[tuple[str, Edge, int], float] = {}  # when the action that makes the message ended
    timeline: list[list[tuple[float, float, Action]]] = [[] for _ in range(p)]
    for action in order:
        stage, kind, k = action.stage, action.kind, action.microbatch
        came = start = free_at[stage]
        sources, seconds = (incoming, forward_message) if kind == "F" else (outgoing, backward_message)
        for edge in sources[stage]:
            begin = max(left_at[kind, edge, k], expects_at[stage], channel_free_at[kind, edge])
            channel_free_at[kind, edge] = begin + seconds[edge]
            start = max(start, begin + seconds[edge])
        end = start + (forward_s[stage] if kind == "F" else backward_s[stage])
        free_at[stage], expects_at[stage] = end, came
        timeline[stage].append((start, end, action))
        for edge in (outgoing if kind == "F" else incoming)[stage]:
            left_at[kind, edge, k] = end
    busy = tuple(
        sum(forward_s[s] if action.kind == "F" else backward_s[s] for action in row)
        for s, row in enumerate(schedule.actions)
    )
    step_end = tuple(free_at[s] + end_of_step[s] for s in range(p))
    return Simulation(max(step_end), tuple(map(tuple, timeline)), busy, step_end)


def simulate_plan(plan: Plan) -> Simulation:
    """The schedule on the clock with the plan's own predicted seconds."""
    stages = plan.prediction.stages
    ahead: dict[Edge, float] = {}
    back: dict[Edge, float] = {}
    for transfer in plan.transfers:
        edge = (transfer.source, transfer.target)
        ahead[edge] = ahead.get(edge, 0.0) + transfer.forward_s
        back[edge] = back.get(edge, 0.0) + transfer.backward_s
    if not any(ahead.values()):  # a document of before: a stage's transfers, there and back, evenly on its edges
        sources = {target: sum(other == target for _, other in ahead) for _, target in ahead}
        ahead = {edge: stages[edge[1]].seconds.get("transfer", 0.0) / 2 / sources[edge[1]] for edge in ahead}
        back = dict(ahead)
    return simulate(
        generate(plan.schedule, len(stages), plan.microbatches),
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        ahead or None,
        [stage.step_s for stage in stages],
        back or None,
    )


def grid(schedule: Schedule, simulation: Simulation | None = None, width: int = 100) -> str:
    """A picture for the terminal: a row per stage, a column per time slot, at most ``width`` columns (never under 24).

    Digits are microbatches modulo 10, large in forward and small in backward, as many columns as the action lasts;
    ``·`` is idle and ``=`` end-of-step work. A schedule that does not fit keeps its beginning and its end around a
    ``…``. Without a ``simulation`` forward takes one slot and backward two.
    """
    if simulation is None:
        simulation = simulate(schedule, [1.0] * schedule.num_stages, [2.0] * schedule.num_stages)
    margin = len(str(schedule.num_stages - 1)) + len("stage ") + 1
    room = max(width, 24) - margin
    durations = [end - start for row in simulation.timeline for start, end, _ in row if end > start]
    # A slot is the shortest action, but at least a third of the median: one tiny stage shall not fill the picture.
    slot_s = max(min(durations), median(durations) / 3) if durations else 1.0
    num_slots = max(1, ceil(simulation.makespan_s / slot_s - 0.5))
    columns = list(range(num_slots))
    if num_slots <= room:  # room to spare: finer slots, whole numbers of them so that equal actions look equal
        finer = max(1, min(room // num_slots, 2 if num_slots * 4 > room else 1))
        slot_s, columns = slot_s / finer, list(range(num_slots * finer))
    else:
        tail = (room - 1) // 2
        columns = [*range(room - 1 - tail), -1, *range(num_slots - tail, num_slots)]
    lines = []
    for stage, row in enumerate(simulation.timeline):
        cells, at = [], 0
        for column in columns:
            middle_s = (column + 0.5) * slot_s
            while at < len(row) and row[at][1] <= middle_s:
                at += 1
            if column < 0:
                cells.append("…")
            elif at < len(row) and row[at][0] <= middle_s:
                action = row[at][2]
                cells.append((_FORWARD if action.kind == "F" else _BACKWARD)[action.microbatch % 10])
            else:
                cells.append(_END if at == len(row) and middle_s < simulation.step_end_s[stage] else _IDLE)
        lines.append(f"stage {stage}".ljust(margin) + "".join(cells))
    return "\n".join(lines)
