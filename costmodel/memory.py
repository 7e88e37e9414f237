"""Bytes that a parameter costs while it is trained: itself, its gradient, and what the optimizer keeps for it; and
fixed overheads.

Mixed precision is the 2 + 2 + 12 bytes per element of fp16 Adam: half-precision weight and gradient, and in fp32 the
master weight beside the optimizer's own state tensors (Rajbhandari et al. 2020, section 3.1). Where gradients are kept
and summed in fp32 (``summed``), they are 2 + 4 + 12."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import torch

__all__ = ["FRAMEWORK_BYTES", "OPTIMIZER_STATE", "ParameterBytes", "measured_state", "parameter_bytes", "state_tensors"]

#: state tensors of the parameter's own size that each torch optimizer keeps with its default arguments
OPTIMIZER_STATE: dict[str, int] = {
    "none": 0,
    "SGD": 0,
    "SGD+momentum": 1,
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Rprop": 2,
    "ASGD": 1,
    "Adagrad": 1,
    "RMSprop": 1,
    "Muon": 1,
    "SparseAdam": 2,
}

#: bytes that a process holds besides its tensors, by device kind
FRAMEWORK_BYTES: dict[str, int] = {
    "cuda": 800 * 2**20,  # assumed: context, cuBLAS workspaces and NCCL buffers, 0.5 to 1 GiB as commonly published
    # measured: resident set after the first step of a two-layer perceptron over Gloo, planned in the same process (2
    # ranks, torch 2.13, one thread, weights under 1 MiB): 222 MiB imports, 140 capture and planning, 8 the step
    "cpu": 370 * 2**20,
}


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of one parameter by cause. ``assumed``: why a number was assumed, "" if none was; say it in the plan."""

    parameter: int
    gradient: int
    optimizer_state: int
    assumed: str = ""

    @property
    def total(self) -> int:
        """The sum of the three."""
        return self.parameter + self.gradient + self.optimizer_state


def state_tensors(optimizer: str) -> tuple[int, str]:
    """(state tensors per parameter, what was assumed) for a torch.optim class name; an unknown optimizer is taken to
    keep two, aloud.

    The true number of any optimizer comes from ``measured_state``.
    """
    known = {name.lower(): count for name, count in OPTIMIZER_STATE.items()}
    if optimizer.lower() in known:
        return known[optimizer.lower()], ""
    return 2, f"the state of optimizer {optimizer!r} is not known: two tensors per parameter are assumed, as for Adam"


def parameter_bytes(
    numel: int,
    dtype: torch.dtype,
    optimizer: str | float = "AdamW",
    mixed_precision: bool = False,
    summed: torch.dtype | None = None,
) -> ParameterBytes:
    """Bytes of a trained parameter of ``numel`` elements whose weight and gradient are ``dtype``, but the gradient
    ``summed`` if that is given.

    optimizer: a class name of ``OPTIMIZER_STATE``, or the number of state tensors (a fraction for factored states).
    Without mixed precision the states have the parameter's dtype; with it they are fp32 and a fp32 master weight joins
    them (where the weight is not fp32 already). Raises ValueError on a negative size or count."""
    count, assumed = state_tensors(optimizer) if isinstance(optimizer, str) else (optimizer, "")
    if numel < 0 or count < 0:
        raise ValueError(f"sizes and state counts are never negative, but got {numel} and {count}; check the parameter")
    weight, gradient = numel * dtype.itemsize, numel * (summed or dtype).itemsize
    if not mixed_precision:
        return ParameterBytes(weight, gradient, round(count * weight), assumed)
    master = numel * 4 if dtype.itemsize < 4 else 0
    return ParameterBytes(weight, gradient, round(count * numel * max(4, dtype.itemsize)) + master, assumed)


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
