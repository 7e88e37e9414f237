"""The bytes that a rank's step holds at its worst, once it is the same every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from meshwright.runtime.profiling.memory_meter import live_bytes

__all__ = ["least_peak"]


def least_peak(step: Callable[[], Any], most: int = 8) -> int:
    """The least peak of at most ``most`` steps, once every rank saw its own twice. All ranks call it together."""
    peaks: list[int] = []
    while len(peaks) < most and not _settled(peaks):
        with live_bytes() as reading:
            step()
        assert reading.peak_bytes is not None, reading.why
        peaks.append(reading.peak_bytes)
    return min(peaks)


def _settled(peaks: list[int]) -> bool:
    everywhere = torch.tensor(int(sum(peak <= 1.002 * min(peaks) for peak in peaks) >= 2))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)


MOST, MEDIAN = 0.10, 0.05  # relative errors
