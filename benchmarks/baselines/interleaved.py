"""Interleaved measurement of several ways to take the same training step, on the ranks of one process group.

In every round each contender runs a few steps, in an order that rotates from round to round, so that whatever else the
machine does falls on all of them. A round's time is that of the slowest rank. Processor seconds (all threads of a
process, the mean over the ranks) stand beside it: they see overhead, and hardly see what else the machine does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, stdev
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Build", "Contender", "Rounds", "compare", "interval"]


@dataclass(frozen=True)
class Contender:
    """``step`` takes one training step; ``loss`` turns what the last step returned into the global loss on every rank
    (collective, not timed)."""

    name: str
    step: Callable[[], Any]
    loss: Callable[[Any], float]
    note: str = ""


Build = Callable[[], Contender]
"""Makes a contender; the same on every rank, and as often as it is called"""


@dataclass(frozen=True)
class Rounds:
    """warmup: untimed steps of each contender; then ``rounds`` rounds of ``steps`` steps each, after ``lead`` untimed
    ones: the first step after another contender's finds caches and pages as that one left them."""

    warmup: int = 3
    rounds: int = 20
    steps: int = 2
    lead: int = 0


def compare(contenders: Sequence[Contender], plan: Rounds) -> list[dict[str, Any]]:
    """Per contender: its "name", "note", seconds per step of every round ("step_s"), "median_s", "min_s",
    the median "cpu_s", "loss"."""
    last: dict[str, Any] = {}
    for contender in contenders:
        for _ in range(plan.warmup):
            last[contender.name] = contender.step()
    seconds = torch.zeros(len(contenders), plan.rounds, dtype=torch.float64)
    cpu = torch.zeros_like(seconds)
    for index in range(plan.rounds):
        for turn in range(len(contenders)):
            which = (turn + index) % len(contenders)
            for _ in range(plan.lead):
                contenders[which].step()
            dist.barrier()
            started, spent = time.perf_counter(), time.process_time()
            for _ in range(plan.steps):
                last[contenders[which].name] = contenders[which].step()
            seconds[which, index] = (time.perf_counter() - started) / plan.steps
            cpu[which, index] = (time.process_time() - spent) / plan.steps
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    cpu /= dist.get_world_size()
    results = []
    for contender, row, busy in zip(contenders, seconds.tolist(), cpu.tolist(), strict=True):
        loss = contender.loss(last[contender.name])
        results.append(
            {
                "name": contender.name,
                "note": contender.note,
                "median_s": median(row),
                "min_s": min(row),
                "cpu_s": median(busy),
                "loss": loss,
                "step_s": row,
                "rounds": asdict(plan),
            }
        )
    return results


def interval(mine: list[float], peer: list[float]) -> tuple[float, float]:
    """The 95 % interval of the geometric mean of the paired ratios, by the normal approximation."""
    logs = [math.log(a / b) for a, b in zip(mine, peer, strict=True)]
    half = 1.96 * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(mean(logs) - half), math.exp(mean(logs) + half)
