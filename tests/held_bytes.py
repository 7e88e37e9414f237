"""The bytes that a rank's step holds at its worst, in a process whose Gloo threads may let go of messages late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshwright.runtime.groups import Pending
from meshwright.runtime.meter import live_bytes

__all__ = ["least_peak"]


def least_peak(step: Callable[[], Any], most: int = 8) -> int:
    """The least peak of at most ``most`` steps, once every rank saw its own twice. All ranks call it together."""
    peaks: list[int] = []
    with _patient():
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


@contextmanager
def _patient() -> Iterator[None]:
    """Wait after each collective of a program for the thread that carried it to let go of its tensors."""
    original = Pending.wait

    def slow(pending: Pending) -> torch.Tensor:
        out = original(pending)
        time.sleep(0.004)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "wait", slow)
        yield
