"""The bytes that a rank's step holds at its worst, in a process whose Gloo threads may let go of messages late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshwright.runtime import groups
from meshwright.runtime.meter import live_bytes

__all__ = ["least_peak"]

PATIENCE_S = 0.002


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
    """Keep what a collective was given until the thread that carried it has let go of it: the profiler does not see
    what is released on that thread."""

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            work = call(*args, **kwargs)
            if work is not None:
                return _Slow(work)
            time.sleep(PATIENCE_S)  # the caller still has its tensors

        return called

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((dist, "all_reduce"), (dist, "all_to_all_single"), (groups, "_gather")):
            patch.setattr(module, name, slow(getattr(module, name)))
        yield


class _Slow:
    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        time.sleep(PATIENCE_S)
