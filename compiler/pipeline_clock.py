"""A pipeline of a table on a clock: its makespan by the tables' seconds, before anything is assembled.

Of many microbatches only the first are played: after eight per stage a pipeline repeats itself, and the rest takes
as long per microbatch as the last p of these did.
"""

from __future__ import annotations

from .pipeline_table import Pipeline, PipelineTable
from .schedule import generate
from .simulate import simulate

__all__ = ["clock_seconds"]

PLAYED = 8  # microbatches per stage


def clock_seconds(table: PipelineTable, m: int, schedule: str, pipeline: Pipeline) -> float:
    """Seconds of a step of m microbatches; stages of one chunk each."""
    at = [(stage.option, stage.first_layer, stage.end_layer) for stage in pipeline.stages]
    p = len(at)
    pace = [float(table.pace_s[one]) for one in at]
    forward = [t * table.share("forward_share", one) for t, one in zip(pace, at)]
    weight = [t - f - t * table.share("input_share", one) for t, f, one in zip(pace, forward, at)]
    entry = [0.0 if table.entry_s is None else float(table.entry_s[one]) for one in at]
    both = [float(table.transfer_s[one]) for one in at]
    ahead, back = {}, {}
    for k in range(p - 1):
        ahead[k, k + 1], back[k, k + 1] = entry[k + 1], both[k]
        if table.entry_s is None:
            ahead[k, k + 1] = back[k, k + 1] = both[k] / 2
    step = [float(table.step_s[one]) for one in at]

    def played(count: int) -> float:
        return simulate(
            generate(schedule, p, count), forward, [t - f for t, f in zip(pace, forward)], ahead or None, step,
            back if ahead else None, weight if schedule.startswith("zb") else None,
        ).makespan_s  # fmt: skip

    if m <= (PLAYED + 1) * p:
        return played(m)
    long, short = played((PLAYED + 1) * p), played(PLAYED * p)
    return long + (m - (PLAYED + 1) * p) * (long - short) / p
