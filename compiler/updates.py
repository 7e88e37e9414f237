"""What an optimizer keeps and what its step needs besides, from a step of the real one on a parameter without data."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn

from ..costmodel.memory import parameter_bytes
from .abstract import Tracker

__all__ = ["update_bytes"]


@cache
def update_bytes(shape: tuple[int, ...], dtype: torch.dtype, optimizer: str, device_kind: str) -> tuple[int, int]:
    """(bytes of state, bytes that a later step needs at its worst besides) of one parameter of this local shape.

    optimizer: a torch.optim class name with its default arguments, or "SGD+momentum". On CUDA devices torch updates
    parameters in lists, so there the second figures add up over parameters; on CPUs one parameter follows the other.
    An optimizer that is unknown, or refuses such a parameter, is taken to keep what ``parameter_bytes`` says, and to
    need nothing. Half-precision parameters have fp32 states and a master weight, as there.
    """
    half = dtype.itemsize == 2
    rule = parameter_bytes(prod(shape), dtype, optimizer, mixed_precision=half).optimizer_state
    try:
        state, temporary = _stepped(shape, torch.float32 if half else dtype, optimizer, device_kind == "cuda")
    except Exception:
        return rule, 0
    return (rule if half else state), temporary


def _stepped(shape: tuple[int, ...], dtype: torch.dtype, optimizer: str, lists: bool) -> tuple[int, int]:
    name, _, momentum = optimizer.partition("+")
    known = {cls.lower(): cls for cls in torch.optim.__all__} if hasattr(torch.optim, "__all__") else {}
    make: Any = getattr(torch.optim, known.get(name.lower(), name))
    options: dict[str, Any] = {"momentum": 0.9} if momentum else {}
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty(shape, dtype=dtype, device="meta")
    tracker = Tracker(devices_as_given=True)
    tracker.ignore(parameter, parameter.grad)
    with tracker:
        made = make([parameter], **options)
        if lists and "foreach" in made.defaults:
            made = make([parameter], foreach=True, **options)
        made.step()
        state = tracker.total
        tracker.restart()
        made.step()
    return state, tracker.peak_total - state
