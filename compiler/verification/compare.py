"""Comparison of the devices' parts of a tensor with the whole tensor, and the likely cause of a difference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..ir.spec import P, R, Spec

__all__ = ["Difference", "Tolerance", "Verification", "assembled", "difference", "gap"]


@dataclass(frozen=True)
class Tolerance:
    """``relative`` to the largest magnitude of a tensor, or to ``floor`` of what it is made of, where terms cancel."""

    relative: float
    floor: float


@dataclass(frozen=True)
class Difference:
    """A tensor that the devices do not have as one device has it.

    kind: "value", "transfer" (as it arrives on a stage), "gradient", "gradient transfer" or "weight gradient" (of all
    microbatches, reduced); tensor: its name in the graph, or the weight's; op: what makes it; module: where in the
    model; placement: of the devices' parts; error: the largest difference of an element, relative to ``size``, the
    largest magnitude. cause: what it looks like, "" if like nothing known.
    """

    kind: str
    tensor: str
    op: str
    module: str
    stage: int
    chunk: int
    microbatch: int | None
    placement: str
    error: float
    size: float
    cause: str = ""

    def __str__(self) -> str:
        where = f"stage {self.stage}" + (f" chunk {self.chunk}" if self.chunk else "")
        when = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        inside = f" ({self.op}{f' in {self.module}' if self.module else ''})" if self.op else ""
        text = f"{self.kind} of {self.tensor}{inside} on {where}{when}, placed {self.placement or 'whole'}: "
        text += f"off by {self.error:.2g} of its size {self.size:.2g}"
        return text + (f"; {self.cause}" if self.cause else "")


@dataclass(frozen=True)
class Verification:
    """The result of ``verify``. True in a condition if nothing differs."""

    ok: bool
    #: number of tensors
    compared: int
    #: the largest relative error, which is that of ``worst_tensor``
    worst: float
    worst_tensor: str
    microbatches: int
    microbatch_size: int
    dtype: str
    #: of the first tensor that is off, in the order of the forward, then of the backward
    first_difference: Difference | None = None
    #: what was not compared
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        word = "microbatch" if self.microbatches == 1 else "microbatches"
        run = f"{self.microbatches} {word} of {self.microbatch_size} in {self.dtype}"
        if self.ok:
            lines = [f"equal to one device: {self.compared} tensors over {run}, {self.worst:.1e} apart at most"]
        else:
            lines = [f"differs from one device ({self.compared} tensors compared over {run}); first:"]
            lines.append(f"  {self.first_difference}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


# ---- putting together


def assembled(blocks: Sequence[Tensor], spec: Spec, mesh_shape: Sequence[int]) -> Tensor:
    """The whole tensor of the parts by rank; of replicas the first. ValueError for parts that do not fit."""
    if not spec:
        return blocks[0]
    placement, stride = spec[0], len(blocks) // mesh_shape[0]
    inner = [
        assembled(blocks[i : i + stride], spec[1:], mesh_shape[1:])
        for i in range(0, len(blocks) if placement != R else stride, stride)
    ]
    if placement.is_shard:
        return torch.cat(inner, placement.dim)
    if placement == R:
        return inner[0]
    if len({tuple(x.shape) for x in inner}) > 1:
        raise ValueError(f"addends have one shape, but got {[tuple(x.shape) for x in inner]}")
    stacked = torch.stack(inner)
    return stacked.sum(0, dtype=stacked.dtype) if placement == P else stacked.amax(0)


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of an element; equal infinities and NaNs do not differ, other shapes infinitely."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel() or torch.equal(a, b):
        return 0.0
    if not (b.is_floating_point() or b.is_complex()):
        return float("inf")
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0).max())


def spread(blocks: Sequence[Tensor], spec: Spec, mesh_shape: Sequence[int]) -> tuple[float, int]:
    """The largest difference between replicas, and its axis."""
    widest = (0.0, -1)
    for axis, placement in enumerate(spec):
        stride = prod(mesh_shape[axis + 1 :])
        for rank, block in enumerate(blocks):
            index = rank // stride % mesh_shape[axis]
            if placement == R and index:
                widest = max(widest, (gap(block, blocks[rank - index * stride]), axis))
    return widest


def difference(
    blocks: Sequence[Tensor], spec: Spec, mesh_shape: Sequence[int], expected: Tensor, size: float,
    tolerance: Tolerance, others: Sequence[Tensor] = (),
) -> tuple[float, str]:  # fmt: skip
    """(error relative to ``size``, cause: "" if the parts are right within the tolerance or look like nothing known).

    size: what errors are relative to; others: the same tensor of the other microbatches.
    """
    allowed = tolerance.relative * size
    try:
        whole = assembled(blocks, spec, mesh_shape)
    except (RuntimeError, ValueError) as error:
        return float("inf"), f"the parts do not fit together: {error}"
    if whole.shape != expected.shape:
        return float("inf"), f"the parts make {list(whole.shape)} of {list(expected.shape)}"
    off = gap(whole, expected)
    apart, axis = spread(blocks, spec, mesh_shape)
    if apart > allowed:
        return max(off, apart) / size, _replica_cause(blocks, spec, mesh_shape, expected, allowed, axis)
    if off <= allowed:
        return off / size, ""
    return off / size, _cause(blocks, spec, mesh_shape, whole, expected, allowed, others)


# ---- causes


def _replica_cause(
    blocks: Sequence[Tensor], spec: Spec, mesh_shape: Sequence[int], expected: Tensor, allowed: float, axis: int
) -> str:
    text = f"devices along axis {axis} should hold equal values, but differ"
    if expected.dtype == torch.bool:
        return text
    if _fits(blocks, (*spec[:axis], P, *spec[axis + 1 :]), mesh_shape, expected, allowed):
        return f"{text}: they are addends, so a reduction over axis {axis} is missing"
    return text


def _fits(blocks: Sequence[Tensor], spec: Spec, mesh_shape: Sequence[int], expected: Tensor, allowed: float) -> bool:
    try:
        return gap(assembled(blocks, spec, mesh_shape), expected) <= allowed
    except (RuntimeError, ValueError):
        return False


def _cause(
    blocks: Sequence[Tensor], spec: Spec, mesh_shape: Sequence[int], whole: Tensor, expected: Tensor, allowed: float,
    others: Sequence[Tensor],
) -> str:  # fmt: skip
    if bool(whole.isnan().any()):
        return "it is NaN"
    if any(gap(whole, other) <= allowed for other in others if other.shape == whole.shape):
        return "it is that of another microbatch"
    if not bool(whole.any()):
        return "it is zero: nothing arrives there"
    if expected.is_floating_point() and (text := _multiple(spec, mesh_shape, whole, expected, allowed)):
        return text
    for axis, placement in enumerate(spec):
        if (
            placement.is_shard
            and mesh_shape[axis] <= 4
            and _permuted(blocks, spec, mesh_shape, expected, allowed, axis)
        ):
            return f"the blocks along axis {axis} are in another order"
        if placement == P and _fits(blocks, (*spec[:axis], R, *spec[axis + 1 :]), mesh_shape, expected, allowed):
            return f"the devices along axis {axis} should hold addends, but the first holds all of it"
    return ""


def _multiple(spec: Spec, mesh_shape: Sequence[int], whole: Tensor, expected: Tensor, allowed: float) -> str:
    factor = float((whole * expected).sum() / (expected * expected).sum()) if bool(expected.any()) else 0.0
    if factor <= 0 or gap(whole, factor * expected) > allowed:
        return ""
    times, inverse = round(factor), round(1 / factor)
    axes = [axis for axis, size in enumerate(mesh_shape) if size == max(times, inverse)]
    over = f" over axis {axes[0]}" if axes else ""
    if times > 1 and abs(factor - times) < 1e-6 * times:
        return f"it is {times} times the true value: reduced or counted {times} times{over}"
    if inverse > 1 and abs(1 / factor - inverse) < 1e-6 * inverse:
        return f"it is 1/{inverse} of the true value: a reduction is missing, or it is divided once too often{over}"
    return f"it is {factor:.4g} times the true value"


def _permuted(
    blocks: Sequence[Tensor], spec: Spec, mesh_shape: Sequence[int], expected: Tensor, allowed: float, axis: int
) -> bool:
    size, stride = mesh_shape[axis], prod(mesh_shape[axis + 1 :])
    for order in itertools.permutations(range(size)):
        mixed = [blocks[r + (order[r // stride % size] - r // stride % size) * stride] for r in range(len(blocks))]
        if _fits(mixed, spec, mesh_shape, expected, allowed):
            return True
    return False
