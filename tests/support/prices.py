"""Prices in the form in which tests state them, and the optimizer state that is really kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import torch
from meshwright.costmodel.codecs import Codec, coded_messages, coding_seconds
from meshwright.costmodel.collectives import AxisPrice
from meshwright.costmodel.compute import op_price
from meshwright.costmodel.hardware import Device

__all__ = ["coded_seconds", "measured_state", "op_seconds"]


def op_seconds(kind: str, flops: float, nbytes: float, dtype: object, device: Device) -> float:
    """``op_price(…).seconds``."""
    return op_price(kind, flops, nbytes, dtype, device).seconds


def coded_seconds(axis: AxisPrice, device: Device, nbytes: float, itemsize: int, codec: Codec) -> float:
    """Seconds to sum a gradient of ``nbytes`` over the groups of an axis in this code; 0 on an axis of one device."""
    if axis.size == 1 or not nbytes:
        return 0.0
    sending = sum(axis.seconds(kind, share * nbytes) for kind, share in coded_messages(codec, axis.size, itemsize))
    once, each = coding_seconds(codec, device, axis.size)
    return once + each * nbytes / itemsize + sending


def measured_state(make: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]) -> float:
    """State tensors per parameter that the optimizer ``make(params)`` really keeps: one step on a small matrix, tensors
    counted by elements.

    Per-parameter scalars (step counters) count nothing. Raises ValueError if the optimizer cannot step on a plain
    matrix without a closure."""
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    parameter.grad = torch.full_like(parameter, 1e-3)
    try:
        optimizer = make([parameter])
        optimizer.step()
    except Exception as error:
        raise ValueError(
            f"an optimizer must step on a plain matrix to be measured, but {error!r}; pass its number of state tensors"
        ) from error
    state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, torch.Tensor)]
    return sum(prod(t.shape) * t.itemsize for t in state if t.dim()) / (parameter.numel() * parameter.itemsize)
