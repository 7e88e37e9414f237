"""The grid of ops that a profile measures where no exact op is known, and what the samples become: curves of each kind,
and the surface of the matmuls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import torch.nn.functional as F

from .curves import Curve, Surface
from .fitting import rising
from .op_timing import Make, normal_values, timed
from .profiler import ProfileState, Task

__all__ = ["GridOp", "coarse", "curves_of", "grid", "op_task", "surfaces_of"]


@dataclass
class _Op:
    call: Callable[..., torch.Tensor]
    operands: tuple[torch.Tensor, ...]
    cotangent: torch.Tensor
    out: torch.Tensor | None = None

    def forward(self) -> None:
        self.out = self.call(*self.operands)

    def backward(self) -> None:
        assert self.out is not None
        torch.autograd.grad(self.out, [x for x in self.operands if x.requires_grad], self.cotangent)
        self.out = None


@dataclass(frozen=True, eq=False)
class GridOp:
    """One point of the grid. ``work``: FLOPs or bytes of the forward, as ``variable`` says; sizes: (rows, inner, cols)
    of a matmul."""

    kind: str
    name: str
    dtype: torch.dtype
    variable: str
    work: float
    make: Make
    sizes: tuple[int, int, int] | None = None

    @property
    def key(self) -> str:
        """Its name in a profile's state."""
        at = "x".join(map(str, self.sizes)) if self.sizes else f"{self.work:.0f}"
        return f"op/{self.kind}/{self.name}/{_text(self.dtype)}/{at}"


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _op(
    call: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    *shapes: Sequence[int],
    indices: Sequence[tuple[int, Sequence[int], int]] = (),
) -> Make:
    """A Make from the shapes of float operands, all of whose gradients are wanted, and of index operands as (place,
    shape, bound)."""

    def make(device: torch.device) -> _Op:
        generator = torch.Generator().manual_seed(0)
        operands = [normal_values(shape, dtype, device, generator).requires_grad_() for shape in shapes]
        for place, shape, bound in indices:
            index = torch.arange(prod(shape), device=device).mul_(7919).remainder_(bound).reshape(tuple(shape))
            operands.insert(place, index)
        with torch.no_grad():
            out = call(*operands)
        return _Op(call, tuple(operands), normal_values(out.shape, out.dtype, device, generator))

    return make


# ---- the grid


_SIZES = {  # rows of a matmul; its inner and outer; elements; rows and width; (heads, head size), sequences; images
    "cpu": (
        (32, 256, 2048), (64, 256, 1024), (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22), (16, 128, 1024, 8192), 256,
        (4, 32), (32, 128, 256, 512), ((8, 8), (16, 16), (32, 16), (64, 32)),
    ),
    "cuda": (
        (128, 1024, 8192), (256, 1024, 4096), (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24), (64, 1024, 8192, 32768),
        1024, (16, 64), (128, 512, 1024, 2048), ((64, 16), (64, 56), (128, 56), (256, 56)),
    ),
}  # fmt: skip


def grid(kind: str) -> list[GridOp]:
    """The grid for a device kind ("cpu" or "cuda"), larger on an accelerator; fp32, there also bfloat16 and float16.

    The most valuable come first: of each kind a small and a large size, then the others.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if kind == "cuda" else (torch.float32,)
    out = [op for dtype in dtypes for op in _ops_of(kind, dtype)]
    first = set(_ends(out))
    return [op for op in out if op in first] + [op for op in out if op not in first]


def _ends(ops: Sequence[GridOp]) -> list[GridOp]:
    """The largest and smallest corner of the smaller matmuls; the smallest and second largest size of every other op;
    the other corners. fp32."""
    corners: list[GridOp] = []
    others: list[GridOp] = []
    lines: dict[str, list[GridOp]] = {}
    for op in (op for op in ops if op.dtype == torch.float32):
        lines.setdefault(op.name, []).append(op)
    for line in lines.values():
        ends = [(min(axis), sorted(set(axis))[-2]) for axis in zip(*(op.sizes for op in line if op.sizes))]
        found = [op for op in line if op.sizes and all(s in end for s, end in zip(op.sizes, ends))]
        corners += found
        others += [] if found else [line[0], line[-2]]
    corners.sort(key=lambda op: -op.work)
    return [*corners[:1], *corners[-1:], *others, *corners[1:-1]]


def coarse(ops: Sequence[GridOp]) -> list[GridOp]:
    """The few points that a profile of seconds has time for."""
    return _ends(ops)


def _ops_of(kind: str, dtype: torch.dtype) -> list[GridOp]:
    rows_of, inner, elements, lines, width, (heads, depth), sequences, images = _SIZES[kind]
    out, item = _matmuls(dtype, rows_of, inner), float(dtype.itemsize)

    def add(kind: str, name: str, variable: str, work: float, make: Make) -> None:
        out.append(GridOp(kind, name, dtype, variable, work, make))

    for n in elements:
        # gelu moves two elements for each and add three: the same bytes from n + n/2 elements
        add("pointwise", "add", "bytes", 3 * item * n, _op(torch.add, dtype, (n,), (n,)))
        add("pointwise", "gelu", "bytes", 3 * item * n, _op(F.gelu, dtype, (n + n // 2,)))
    for rows in lines:
        x, work = (rows, width), 2 * item * rows * width
        add("normalization", "layer_norm", "bytes", work, _op(_layer_norm, dtype, x, (width,), (width,)))
        loss = _op(F.cross_entropy, dtype, x, indices=[(1, (rows,), width)])
        add("loss", "cross_entropy", "bytes", work / 2, loss)
        look = _op(F.embedding, dtype, (4096, width), indices=[(0, (rows,), 4096)])
        add("embedding", "embedding", "bytes", work, look)
    for s in sequences:
        q = (1, heads, s, depth)
        attention = _op(F.scaled_dot_product_attention, dtype, q, q, q)
        add("attention", "sdpa", "flops", 4.0 * heads * s * s * depth, attention)
    for c, hw in images:
        convolution = _op(partial(F.conv2d, padding=1), dtype, (2, c, hw, hw), (c, c, 3, 3))
        add("convolution", "conv2d", "flops", 2.0 * 2 * c * c * 9 * hw * hw, convolution)
    return out


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def _matmuls(dtype: torch.dtype, rows: Sequence[int], inner: Sequence[int]) -> list[GridOp]:
    sizes = sorted(((m, k, n) for m in rows for k in inner for n in inner), key=prod)
    return [
        GridOp("matmul", "linear", dtype, "flops", 2.0 * m * k * n, _op(F.linear, dtype, (m, k), (n, k)), (m, k, n))
        for m, k, n in sizes
    ]


def op_task(op: GridOp, device: torch.device, memory_bytes: float) -> Task:
    """The Task that measures one point of the grid: a visit is (forward seconds, backward seconds), each the median of
    a few sweeps. memory_bytes: what its instances may take together, outputs included."""
    make = partial(timed, (op.make,), device, memory_bytes, 0)
    return Task(op.key, f"op/{op.kind}/{op.name}/{_text(op.dtype)}", op.work, make, width=2)


# ---- from samples to values


def curves_of(ops: Sequence[GridOp], state: ProfileState, slowdown: float = 1.0) -> list[Curve]:
    """The forward and backward curve of each kind and dtype; several ops of equal work count by their mean."""
    found: dict[tuple[str, str, str], dict[float, list[tuple[float, float]]]] = {}
    for op in ops:
        seconds = _both(op.key, state, slowdown)
        if seconds is not None:
            found.setdefault((op.kind, _text(op.dtype), op.variable), {}).setdefault(op.work, []).append(seconds)
    out = []
    for (kind, dtype, variable), points in found.items():
        for at, direction in enumerate(("forward", "backward")):
            line = rising([(work, sum(s[at] for s in seen) / len(seen)) for work, seen in points.items()])
            if len(line) >= 2:
                out.append(Curve(kind, dtype, variable, tuple(line), direction))
    return out


def surfaces_of(ops: Sequence[GridOp], state: ProfileState, slowdown: float = 1.0) -> list[Surface]:
    """The forward and backward surface of the matmuls of each dtype, over the largest full grid that was measured."""
    found: dict[str, dict[tuple[int, ...], tuple[float, float]]] = {}
    for op in ops:
        seconds = _both(op.key, state, slowdown)
        if op.sizes is not None and seconds is not None:
            found.setdefault(_text(op.dtype), {})[op.sizes] = seconds
    out = []
    for dtype, points in found.items():
        lines = [sorted({sizes[axis] for sizes in points}) for axis in range(3)]
        while missing := [s for s in _product(lines) if s not in points]:
            # the line with most gaps goes; the largest of them, where several are alike
            axis, line = max(
                ((axis, line) for axis in range(3) for line in lines[axis]),
                key=lambda at: (sum(s[at[0]] == at[1] for s in missing), at[1]),
            )
            lines[axis].remove(line)
        if min(map(len, lines)) < 2:
            continue
        rows, inner, cols = (tuple(float(x) for x in axis) for axis in lines)
        for at, direction in enumerate(("forward", "backward")):
            seconds_ = tuple(points[s][at] for s in _product(lines))
            out.append(Surface("matmul", dtype, rows, inner, cols, seconds_, direction))
    return out


def _product(lines: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return [(m, k, n) for m in lines[0] for k in lines[1] for n in lines[2]]


def _both(key: str, state: ProfileState, slowdown: float) -> tuple[float, float] | None:
    """(forward, backward) seconds of one op."""
    seconds = state.seconds(key)
    if seconds is None:
        return None
    return seconds[0] * slowdown, seconds[1] * slowdown
