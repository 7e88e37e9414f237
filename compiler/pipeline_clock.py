"""A pipeline of a table on a clock: its makespan by the tables' seconds, before anything is assembled.

Of many microbatches only the first are played: after eight per stage (with several chunks: three, of as many actions) a
pipeline repeats itself, and the rest takes as long per microbatch as the last p of these did.
"""

from __future__ import annotations

from .asynchronous import PIPEDREAM
from .pipeline_table import Pipeline, PipelineTable, StageChoice
from .schedule import generate, virtual_order
from .simulate import simulate, steady

__all__ = ["clock_seconds"]

PLAYED = 8  # microbatches per stage
PLAYED_IN_CHUNKS = 3


def clock_seconds(table: PipelineTable, m: int, schedule: str, pipeline: Pipeline) -> float:
    """Seconds of a step of m microbatches. Between chunks of one stage a message is free."""

    def end_of(stage: StageChoice) -> int:
        return stage.device_offset + table.options[stage.option].num_devices

    at = [(stage.option, stage.first_layer, stage.end_layer) for stage in pipeline.stages]
    v = pipeline.chunks
    p = len(at) // v
    chunks = v if v > 1 else None
    home = [stage for stage, _ in virtual_order(schedule, p, chunks)]
    pace = [float(table.pace_s[one]) for one in at]
    forward = [t * table.share("forward_share", one) for t, one in zip(pace, at)]
    weight = [t - f - t * table.share("input_share", one) for t, f, one in zip(pace, forward, at)]
    entry = [0.0 if table.entry_s is None else float(table.entry_s[one]) for one in at]
    both = [float(table.transfer_s[one]) for one in at]
    ahead, back = {}, {}
    for k in range(p * v - 1):
        ahead[k, k + 1], back[k, k + 1] = entry[k + 1], both[k]
        if table.entry_s is None:
            ahead[k, k + 1] = back[k, k + 1] = both[k] / 2
        elif pipeline.stages[k + 1].device_offset > end_of(pipeline.stages[k]):  # it leaves its host with devices idle
            back[k, k + 1] = max(both[k], entry[k + 1])
        if home[k] == home[k + 1]:
            ahead[k, k + 1] = back[k, k + 1] = 0.0
    step = [sum(float(table.step_s[one]) for one, s in zip(at, home) if s == stage) for stage in range(p)]

    if schedule == PIPEDREAM:
        return steady(m, forward, [t - f for t, f in zip(pace, forward)], ahead, step, back).makespan_s

    def played(count: int) -> float:
        return simulate(
            generate(schedule, p, count, chunks), forward, [t - f for t, f in zip(pace, forward)], ahead or None, step,
            back if ahead else None, weight if schedule.startswith("zb") else None,
        ).makespan_s  # fmt: skip

    few = PLAYED if v == 1 else PLAYED_IN_CHUNKS
    if m <= (few + 1) * p:
        return played(m)
    long, short = played((few + 1) * p), played(few * p)
    return long + (m - (few + 1) * p) * (long - short) / p
