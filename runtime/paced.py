"""How often what follows compute is measured, and how one call is timed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

__all__ = ["PACE_S", "SLOW_S", "samples_of", "seconds_of"]

PACE_S = 0.008  # about what a layer of a small model computes between two collectives
SLOW_S = 0.2  # a collective beyond which one sample has to do
_SAMPLES = 12


def samples_of(once: float, usual: float) -> int:
    """How many there are of what takes ``once``: beyond ``SLOW_S`` one has to do."""
    return 1 if once > SLOW_S else max(4, min(_SAMPLES, int(_SAMPLES * usual / max(once, 1e-6))))


def seconds_of(call: Callable[[], object] | None, device: torch.device) -> float:
    """How long the call takes until its last message is here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    if call is not None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return perf_counter() - start
