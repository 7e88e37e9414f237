"""What every rank of a cell runs: the comparison, then the bytes of each contender alone."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from meshwright.runtime.profiling.memory_meter import live_bytes
from meshwright.runtime.transport.launch import resolve

from .interleaved import Build, Rounds, compare

__all__ = ["run"]

METERED = 6  # steps of which the bytes are counted


def run(path: str, arguments: Sequence[Any], rounds: dict[str, int], meter: bool) -> list[dict[str, Any]]:
    """The results of ``compare``, with each contender's "peak_bytes" (of the fullest rank) if they are to be metered.

    path: "module:function", which gives ways to make contenders. Collective.
    """
    builds: list[Build] = resolve(path)(*arguments)
    contenders = [build() for build in builds]
    gc.collect()
    gc.freeze()  # the captures of ours: training has one model, whose collections are short
    results = compare(contenders, Rounds(**rounds))
    contenders.clear()
    gc.unfreeze()
    return [{**result, **_bytes(build, meter)} for result, build in zip(results, builds, strict=True)]


def _bytes(build: Build, meter: bool) -> dict[str, Any]:
    """Live storages of tensors in a step ("peak_bytes") beyond what was alive before the contender was made: the least
    of the steps after the second, for a thread of Gloo may let go of a message late."""
    if not meter:
        return {}
    gc.collect()
    with live_bytes() as reading:
        contender = build()
        for _ in range(2):
            contender.step()
        for index in range(METERED):
            gc.collect()
            with reading.window(f"step {index}"):
                contender.step()
    least = min(reading.windows[f"step {index}"].peak_bytes for index in range(METERED))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, least - (reading.start_bytes or 0))
    return {"peak_bytes": max(every)}
