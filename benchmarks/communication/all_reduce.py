"""What every rank runs: all contenders at one size after another, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from meshwright.runtime.collectives.channel import Channel
from meshwright.runtime.collectives.dense import DenseSum

__all__ = ["GLOO", "compare"]

GLOO = "gloo"
_SETTLED = 2  # calls before it counts: connections and standing receives


def compare(
    sizes: Sequence[int], algorithms: Sequence[str], rounds: int, budget_s: float, members: int = 0
) -> list[dict[str, Any]]:
    """Per size: the median milliseconds of the slowest rank of each contender, and the median of the ratios of Gloo's
    time to it, round by round. ``budget_s`` bounds the rounds of each size. Collective."""
    own, gloo = Channel(dist.new_group(backend="gloo")), dist.new_group(backend="gloo")
    return [_at(nbytes, algorithms, rounds, budget_s, own, gloo, members) for nbytes in sizes]


def _at(
    nbytes: int, algorithms: Sequence[str], rounds: int, budget_s: float, own: Channel, gloo: Any, members: int
) -> dict[str, Any]:
    x = torch.zeros(nbytes // 4)
    sums = {name: DenseSum(own, x.numel(), x.dtype, name, members=members) for name in algorithms}
    calls: dict[str, Callable[[], object]] = {GLOO: partial(dist.all_reduce, x, group=gloo)}
    calls |= {name: partial(_summed, one, x) for name, one in sums.items()}
    once = sum(_seconds(call, gloo) for call in calls.values())
    for _ in range(_SETTLED - 1):
        once = sum(_seconds(call, gloo) for call in calls.values())
    count = max(3, min(rounds, int(budget_s / once)))
    rows = [{name: _seconds(call, gloo) for name, call in calls.items()} for _ in range(count)]
    for one in sums.values():
        one.close()
    times = {name: 1e3 * median(row[name] for row in rows) for name in calls}
    faster = {name: median(row[GLOO] / row[name] for row in rows) for name in calls}
    return {"nbytes": nbytes, "rounds": count, "ms": times, "times_faster": faster}


def _summed(one: DenseSum, x: torch.Tensor) -> None:
    one.start(x).wait()


def _seconds(call: Callable[[], object], group: Any) -> float:
    """Of the slowest rank, all having begun at about the same time."""
    dist.barrier(group)
    begin = perf_counter()
    call()
    seconds = torch.tensor([perf_counter() - begin])
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    return seconds.item()
