"""Reshards: the conversion from one spec to another as collective steps, their bytes, and the autograd function that
runs them.

On one axis:    R→S slice · R→P mask (zero but on the first) · S→P pad with zeros · S→R all_gather · P→R all_reduce ·
                P→S reduce_scatter · S→S' all_to_all. The first three move no data.
On several axes a dim cut by more than one must be uncut from the minor axis inwards and cut from the major axis
outwards (``S0,S0`` → ``R,S0`` cannot keep the minor cut, because its blocks lie in other places afterwards).

A reshard between a producer's pair and a consumer's runs value → value in the forward and, by its own registered
conjugate, consumer cotangent → producer cotangent in the backward. (torch's functional all_reduce has the wrong
conjugate for a replicated consumer, so all conjugates are ours.)

``Cut`` divides one rank's block of a tensor into the smaller blocks of a finer spec, as parameter sharding does. Many
tensors share one message: a bundle of tensors whose small blocks have k₁, k₂, … elements is sent as a tensor
[d, Σ kᵢ] for a group of d ranks. Row j is for (or from) rank j of the group and holds one block of each, so one
collective serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from .comm import Comm, current_context
from .spec import Pair, Placement, R, Spec

__all__ = [
    "LOCAL_STEPS", "Cut", "ReshardStep", "Steps", "apply_steps", "place", "reshard", "run_steps", "step_bytes",
    "steps_between",
]  # fmt: skip


#: the kinds of steps that send nothing
LOCAL_STEPS = frozenset({"slice", "mask", "pad"})


class ReshardStep(NamedTuple):
    """One conversion along one axis. ``dim``: the dim gathered, scattered, sliced or padded; ``dim2``: the dim that
    all_to_all cuts.

    A plain tuple of the same fields serves as well: that is how steps stand as literals in a lowered program.
    """

    kind: str
    axis: int
    dim: int = -1
    dim2: int = -1

    def __str__(self) -> str:
        dims = f" {self.dim}" if self.dim >= 0 else ""
        return f"{self.kind}@{self.axis}{dims}" + (f"->{self.dim2}" if self.dim2 >= 0 else "")


def _step_on_axis(axis: int, a: Placement, b: Placement) -> ReshardStep | None:
    """The step from placement ``a`` to ``b`` on one axis; None if they are equal; ValueError if there is no such
    conversion."""
    if a == b:
        return None
    kinds = (a.kind, b.kind)
    if kinds == ("R", "S"):
        return ReshardStep("slice", axis, b.dim)
    if kinds == ("R", "P"):
        return ReshardStep("mask", axis)
    if kinds == ("S", "P"):
        return ReshardStep("pad", axis, a.dim)
    if kinds == ("S", "R"):
        return ReshardStep("all_gather", axis, a.dim)
    if kinds == ("P", "R"):
        return ReshardStep("all_reduce", axis)
    if kinds == ("P", "S"):
        return ReshardStep("reduce_scatter", axis, b.dim)
    if kinds == ("S", "S"):
        return ReshardStep("all_to_all", axis, a.dim, b.dim)
    if kinds == ("Pmax", "R"):
        return ReshardStep("all_reduce_max", axis)
    raise ValueError(f"no conversion from {a} to {b}")


@cache
def steps_between(source: Spec, target: Spec) -> tuple[ReshardStep, ...]:
    """The steps from ``source`` to ``target``, in order. Raises ValueError for a conversion to Pmax or from Pmax to
    other than R."""
    assert len(source) == len(target), (source, target)
    now = list(source)
    steps: list[ReshardStep] = []
    order = range(len(source))

    def cut_by_minor(axis: int, dim: int) -> bool:
        return any(now[a].is_shard and now[a].dim == dim for a in order if a > axis)

    def move(axis: int, to: Placement) -> None:
        step = _step_on_axis(axis, now[axis], to)
        if step is not None:
            steps.append(step)
            now[axis] = to

    # 1. uncut, from the minor axis, every axis whose blocks a change on a major axis would displace
    for axis in reversed(order):
        here = now[axis]
        if not here.is_shard:
            continue
        displaced = any(
            source[a] != target[a]
            and here.dim in (source[a].dim if source[a].is_shard else -1, target[a].dim if target[a].is_shard else -1)
            for a in order
            if a < axis
        )
        if displaced:
            # resharding to another dim at once, where that dim is not touched by other axes, saves the gather
            goal = target[axis]
            others = {p.dim for a in order if a != axis for p in (source[a], target[a]) if p.is_shard}
            direct = goal.is_shard and goal.dim != here.dim and goal.dim not in others
            move(axis, goal if direct else R)
    # 2. reductions and exchanges, major axis first; a new cut must not lie outside a minor one that stays
    for axis in order:
        goal = target[axis]
        if now[axis] == goal:
            continue
        if goal.is_shard and cut_by_minor(axis, goal.dim):
            for minor in reversed(order):
                if minor > axis and now[minor].is_shard and now[minor].dim == goal.dim:
                    move(minor, R)
        if now[axis].is_shard and goal.is_partial and cut_by_minor(axis, now[axis].dim):
            for minor in reversed(order):
                if minor > axis and now[minor].is_shard and now[minor].dim == now[axis].dim:
                    move(minor, R)
        move(axis, goal)
    # 3. cut again what was only opened for the sake of a major axis
    for axis in order:
        move(axis, target[axis])
    assert tuple(now) == target, (source, target, steps)
    return tuple(steps)


def step_bytes(
    source: Spec, steps: Sequence[ReshardStep], shape: Sequence[int], itemsize: int, mesh_shape: Sequence[int]
) -> list[tuple[ReshardStep, int]]:
    """Each step with the bytes of the tensor that one device holds *whole along the step's axis*: the size that
    collective prices take.

    For all_gather that is the gathered result, for reduce_scatter, all_reduce and all_to_all the input; 0 for the free
    steps.
    """
    elements = prod(shape) * itemsize
    for placement, size in zip(source, mesh_shape, strict=True):
        if placement.is_shard:
            elements //= size
    out = []
    for step in steps:
        size = mesh_shape[step.axis]
        before = elements
        if step.kind in ("slice", "reduce_scatter"):
            elements //= size
        elif step.kind in ("all_gather", "pad"):
            elements *= size
        out.append((step, 0 if step.kind in LOCAL_STEPS else max(before, elements)))
    return out


Steps = tuple[tuple[str, int, int, int], ...]


def apply_steps(x: torch.Tensor, steps: Steps, comm: Comm) -> torch.Tensor:
    """Run ``steps`` on this device's tensor. Not differentiable: see ``reshard``."""
    for kind, axis, dim, dim2 in steps:
        if kind == "slice":
            block = x.shape[dim] // comm.size(axis)
            x = x.narrow(dim, comm.index(axis) * block, block).contiguous()
        elif kind == "mask":
            x = x if comm.index(axis) == 0 else torch.zeros_like(x)
        elif kind == "pad":
            block = x.shape[dim]
            whole = x.new_zeros([*x.shape[:dim], block * comm.size(axis), *x.shape[dim + 1 :]])
            whole.narrow(dim, comm.index(axis) * block, block).copy_(x)
            x = whole
        elif kind == "all_gather":
            x = comm.all_gather(x, axis, dim)
        elif kind == "all_reduce":
            x = comm.all_reduce(x, axis)
        elif kind == "all_reduce_max":
            x = comm.all_reduce(x, axis, "max")
        elif kind == "reduce_scatter":
            x = comm.reduce_scatter(x, axis, dim)
        else:
            assert kind == "all_to_all", kind
            x = comm.all_to_all(x, axis, dim2, dim)
    return x


class _Reshard(torch.autograd.Function):
    """Value steps in the forward; cotangent steps in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Steps, backward: Steps) -> torch.Tensor:
        ctx.comm, ctx.steps = current_context().comm, backward
        out = apply_steps(x.detach(), forward, ctx.comm)
        return out.view_as(out) if out is x or out.data_ptr() == x.data_ptr() else out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return apply_steps(grads[0].contiguous(), ctx.steps, ctx.comm), None, None


def reshard(x: torch.Tensor, source: Pair, target: Pair) -> torch.Tensor:
    """This device's part of a tensor, from the producer's pair to the consumer's; differentiable by the conjugate
    steps."""
    forward = steps_between(source.value, target.value)
    backward = steps_between(target.cotangent, source.cotangent) if x.is_floating_point() or x.is_complex() else ()
    return run_steps(x, forward, backward)


def run_steps(x: torch.Tensor, forward: Steps, backward: Steps) -> torch.Tensor:
    """``forward`` on the value, ``backward`` on its cotangent: the form in which ``lower`` writes a reshard into a
    program."""
    if not forward and not backward:
        return x
    return _Reshard.apply(x, forward, backward)


@dataclass(frozen=True)
class Cut:
    """``axes`` of the mesh (ascending), the tensor dim that each of them cuts, and into how many parts.

    A rank's number in the group of these axes is row-major in its coordinates on them.
    """

    axes: tuple[int, ...]
    dims: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def between(cls, name: str, coarse: Spec, fine: Spec, mesh_shape: Sequence[int]) -> Cut:
        """From one spec to a finer one. ValueError if its blocks do not lie inside those of the coarse one."""
        wide = [axis for axis, size in enumerate(mesh_shape) if size > 1]
        axes = tuple(axis for axis in wide if coarse[axis] != fine[axis])
        last = {coarse[axis].dim: axis for axis in wide if coarse[axis].is_shard}
        for axis in axes:
            if not fine[axis].is_shard or coarse[axis].is_shard or last.get(fine[axis].dim, -1) > axis:
                raise ValueError(
                    f"a part of {name!r} must lie inside the block that its ops read, but got "
                    f"{','.join(map(str, fine))} inside {','.join(map(str, coarse))}; plan again"
                )
        return cls(axes, tuple(fine[axis].dim for axis in axes), tuple(mesh_shape[axis] for axis in axes))

    @property
    def parts(self) -> int:
        """Ranks in a group."""
        return prod(self.sizes)

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        """The coarse block as a view [*sizes, *shape of a small block], by coordinates on the axes."""
        for dim in reversed(range(x.ndim)):  # from the last, so that the dims before keep their numbers
            split = [size for size, at in zip(self.sizes, self.dims, strict=True) if at == dim]
            if split:
                x = x.unflatten(dim, (*split, x.shape[dim] // prod(split)))
        cuts = list(enumerate(self.dims))
        front = [dim + sum((other, j) < (dim, k) for j, other in cuts) for k, dim in cuts]
        return x.movedim(front, list(range(len(front))))

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the coarse block whose small blocks have ``shape``."""
        out = list(shape)
        for dim, size in zip(self.dims, self.sizes, strict=True):
            out[dim] *= size
        return tuple(out)


def place(wire: torch.Tensor, start: int, cut: Cut, block_shape: Sequence[int]) -> torch.Tensor:
    """The view [*sizes, *block_shape] of the blocks that begin in column ``start`` of a tensor on the wire."""
    return wire.narrow(1, start, prod(block_shape)).view(*cut.sizes, *block_shape)
