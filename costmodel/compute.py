"""Time of one op on one device: what was measured where the device carries it, else the roofline; a price says which.

    roofline      seconds = max(flops / (peak(dtype) · efficiency(kind)), bytes / (memory rate · share)) + launch
                  share = efficiency("memory")
    scores        of an attention where the device has no fused kernel (it states an efficiency of "scores"):
                  seconds = flops / (peak · efficiency("matmul")) + scores · SCORE_BYTES / memory rate + launch
    surface       seconds(rows, inner, cols) of a matmul                                  launch included
    curve         seconds(work), at least bytes / memory rate     work: the curve's variable, FLOPs or bytes; likewise
    extrapolated  outside the grid: in proportion from its edge, and never below the roofline at the measured peaks

Measurements of the op's own dtype come first, a surface before a curve; else those of another dtype (fp32 if there is
one), scaled by the ratio of the peaks (FLOPs) or by the op's own bytes.

The direction "backward" is the whole backward pass, all gradients, against the work of the *forward*: FLOPs, bytes and
shapes are those of the forward. Without a measurement of it a matmul, attention or convolution costs its forward twice;
other ops the same FLOPs and 1.5 times the traffic. ``measured_backward`` tells callers who know better whether there is
one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeVar

import numpy as np

from .curves import DIRECTIONS, Curve, Surface
from .hardware import Device

T = TypeVar("T", Curve, Surface)

__all__ = [
    "EFFICIENCY",
    "KINDS",
    "Price",
    "efficiency",
    "measured_backward",
    "op_price",
    "op_price_many",
    "score_seconds",
    "writes_scores",
]

KINDS = (
    "matmul",
    "attention",
    "convolution",
    "normalization",
    "pointwise",
    "embedding",
    "loss",
    "view",
    "free",
)

#: achievable share of the peak where a device states none, with its reason
EFFICIENCY: dict[str, tuple[float, str]] = {
    "matmul": (0.65, "the V100's, derived from a published row (presets.V100)"),
    "attention": (0.35, "FlashAttention-3 paper, 2024: FlashAttention-2's share on a device it was not tuned for"),
    "convolution": (0.5, "assumed: implicit GEMM with smaller tiles than a large matmul"),
    "memory": (0.8, "assumed: unfused elementwise kernels; stream benchmarks reach about 0.9 of a data sheet's rate"),
}
#: bytes that unfused attention moves per score and pass over it, half precision
SCORE_BYTES = 10.0  # Korthikanti et al. 2022, table 2: 5 bytes kept per score, each written and read once
#: the backward costs the forward once per operand that needs a gradient
TWO_SIDED = frozenset({"matmul", "attention", "convolution"})
_VECTOR = (1.0, "bound by memory: FLOPs of these kinds are counted at the peak")


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds, and where they come from: "interpolated" (inside a measured grid), "extrapolated" (outside it),
    "roofline" or "free"; "measured" is for exact signatures, which are no business of this module."""

    seconds: float
    source: str


def efficiency(kind: str, device: Device) -> tuple[float, str]:
    """The achievable share of the peak for an op kind ("memory": of the memory rate), and its source."""
    for known, share in device.efficiency:
        if known == kind:
            return share, device.source
    return EFFICIENCY.get(kind, _VECTOR)


@lru_cache(maxsize=1 << 17)  # equal layers ask for equal prices
def op_price(
    kind: str,
    flops: float,
    nbytes: float,
    dtype: object,
    device: Device,
    *,
    direction: str = "forward",
    shapes: tuple[tuple[int, ...], ...] = (),
) -> Price:
    """Price of one op that does ``flops`` and moves ``nbytes`` (operands and outputs) on ``device``. ``dtype``: torch
    dtype or its name; ``shapes``: local shapes of the operands and, last, of the output, where they are known.

    Raises ValueError for a kind that is none of ``KINDS``, for a direction that is neither "forward" nor "backward" or
    for negative work.
    """
    if kind not in KINDS:
        raise ValueError(f"an op kind is one of {', '.join(KINDS)}, but got {kind!r}; price it as pointwise")
    if direction not in DIRECTIONS:
        raise ValueError(f"a direction is forward or backward, but got {direction!r}; use one of them")
    if flops < 0 or nbytes < 0:
        raise ValueError(
            f"work is never negative, but got {flops} FLOP and {nbytes} bytes for {kind}; check the op's rule"
        )
    if kind in ("view", "free"):
        return Price(device.view_s, "free")
    how = _reading(kind, str(dtype).removeprefix("torch."), device, direction)
    if how.surface is not None and shapes and flops > 0 and (how.surface_is_own or not how.curve_is_own):
        return _on_surface(how, how.surface, flops, nbytes, shapes[-1], device)
    if how.curve is not None:
        work = flops * how.curve_peak / how.peak if how.curve.variable == "flops" else nbytes
        if work > 0:
            return _on_curve(how, how.curve, work, flops, nbytes, device)
    if direction == "backward":
        if kind in TWO_SIDED:
            once = op_price(kind, flops, nbytes, dtype, device, shapes=shapes)
            return Price(2 * once.seconds, once.source)
        return op_price(kind, flops, 1.5 * nbytes, dtype, device)
    if kind == "attention" and len(shapes) > 2 and (scores := _scores_s(shapes, dtype, device)):
        return Price(flops / (how.peak * efficiency("matmul", device)[0]) + scores + device.launch_s, "roofline")
    return Price(max(flops / (how.peak * how.share), nbytes / how.memory_rate) + device.launch_s, "roofline")


def op_price_many(
    kind: str,
    flops: np.ndarray,
    nbytes: np.ndarray,
    dtype: object,
    device: Device,
    *,
    direction: str = "forward",
    sizes: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    scores: np.ndarray | None = None,
) -> np.ndarray:
    """``op_price(…).seconds`` of every element of ``flops`` and ``nbytes``, which have one shape. sizes: what
    ``Surface.sizes`` gives, element by element, where local shapes are known; scores: of an attention, queries × keys
    over all batch entries and heads of one device. Negative work or an unknown kind is the caller's fault."""
    if kind in ("view", "free"):
        return np.full(np.shape(flops), device.view_s)
    how = _reading(kind, str(dtype).removeprefix("torch."), device, direction)
    surface = how.surface if sizes is not None and (how.surface_is_own or not how.curve_is_own) else None
    known = np.zeros(np.shape(flops), dtype=bool)
    seconds = np.zeros(np.shape(flops))
    if how.curve is not None:
        work = flops * how.curve_peak / how.peak if how.curve.variable == "flops" else nbytes
        known = work > 0
        seconds = _on_curve_many(how, how.curve, np.where(known, work, 1.0), flops, nbytes, device)
    if surface is not None and sizes is not None:
        on = flops > 0
        rows, inner, cols = (np.where(on, size, 1.0) for size in sizes)
        seconds = np.where(on, _on_surface_many(how, surface, flops, nbytes, (rows, inner, cols), device), seconds)
        known = known | on
    if known.all() and known.size:
        return seconds
    if direction == "backward":
        if kind in TWO_SIDED:
            rest = 2 * op_price_many(kind, flops, nbytes, dtype, device, sizes=sizes, scores=scores)
        else:
            rest = op_price_many(kind, flops, 1.5 * nbytes, dtype, device)
    elif kind == "attention" and scores is not None and (each := score_seconds(dtype, device)):
        rest = flops / (how.peak * efficiency("matmul", device)[0]) + scores * each + device.launch_s
    else:
        rest = np.maximum(flops / (how.peak * how.share), nbytes / how.memory_rate) + device.launch_s
    return np.where(known, seconds, rest)


def measured_backward(kind: str, dtype: object, device: Device) -> bool:
    """True if the device carries a curve or surface of the backward of this kind, in this dtype or another."""
    how = _reading(kind, str(dtype).removeprefix("torch."), device, "backward")
    return how.curve is not None or how.surface is not None


def writes_scores(device: Device) -> bool:
    """True if attention on this device writes its scores to memory, and keeps the probabilities for the backward."""
    return any(kind == "scores" for kind, _ in device.efficiency)


def score_seconds(dtype: object, device: Device) -> float:
    """Seconds to write and read one score of an attention; 0 on a device that keeps them in its cache."""
    share = dict(device.efficiency).get("scores", 0.0)
    if not share or device.curves or device.surfaces:
        return 0.0
    return SCORE_BYTES * (1.0 if "16" in str(dtype) else 2.0) / (device.memory_bytes_per_s * share)


def _scores_s(shapes: tuple[tuple[int, ...], ...], dtype: object, device: Device) -> float:
    """Seconds to write and read the scores of queries [..., queries, d] and keys [..., keys, d]."""
    return prod(shapes[0][:-1]) * shapes[1][-2] * score_seconds(dtype, device)


@dataclass(frozen=True, slots=True)
class _Reading:
    """The measurements and rates from which prices of one kind, dtype and direction on one device are read."""

    #: bytes/s
    memory_rate: float
    #: FLOP/s of the op's dtype
    peak: float
    #: achievable share of the peak
    share: float
    curve: Curve | None
    #: FLOP/s of the dtype that the curve was measured in
    curve_peak: float
    #: whether that is the op's own dtype
    curve_is_own: bool
    surface: Surface | None
    surface_peak: float
    surface_is_own: bool


@lru_cache(maxsize=4096)
def _reading(kind: str, dtype: str, device: Device, direction: str) -> _Reading:
    measured = bool(device.curves or device.surfaces)
    memory_rate = device.memory_bytes_per_s
    if not measured:  # a measured rate is already what is achieved
        memory_rate *= efficiency("memory", device)[0]
    share = 1.0 if measured else efficiency(kind, device)[0]
    curve = _nearest(device.curves, kind, dtype, direction)
    surface = _nearest(device.surfaces, kind, dtype, direction)
    return _Reading(
        memory_rate,
        device.peak(dtype),
        share,
        curve,
        device.peak(curve.dtype) if curve else 1.0,
        curve is not None and curve.dtype == dtype,
        surface,
        device.peak(surface.dtype) if surface else 1.0,
        surface is not None and surface.dtype == dtype,
    )


def _nearest(measured: Iterable[T], kind: str, dtype: str, direction: str) -> T | None:
    """The measurement of this kind and direction in this dtype, else in fp32, else in any."""
    own = [m for m in measured if m.kind == kind and m.direction == direction]
    return min(own, key=lambda m: (m.dtype != dtype, m.dtype != "float32"), default=None)


def _on_surface(
    how: _Reading, surface: Surface, flops: float, nbytes: float, output: tuple[int, ...], device: Device
) -> Price:
    sizes = Surface.sizes(flops, output)
    seconds = surface.at(*sizes, device.launch_s) * how.surface_peak / how.peak
    if surface.covers(*sizes):
        return Price(seconds, "interpolated")
    return Price(max(seconds, flops / how.peak, nbytes / how.memory_rate), "extrapolated")


def _on_curve(how: _Reading, curve: Curve, work: float, flops: float, nbytes: float, device: Device) -> Price:
    seconds, inside = curve.seconds(work, device.launch_s), curve.covers(work)
    if curve.variable == "flops" or not inside:  # skinny operands: more bytes than the measured ones of the same FLOPs
        seconds = max(seconds, nbytes / how.memory_rate)
    if not inside:
        seconds = max(seconds, flops / how.peak)
    return Price(seconds, "interpolated" if inside else "extrapolated")


def _on_surface_many(
    how: _Reading,
    surface: Surface,
    flops: np.ndarray,
    nbytes: np.ndarray,
    sizes: tuple[np.ndarray, np.ndarray, np.ndarray],
    device: Device,
) -> np.ndarray:
    seconds = surface.at_many(*sizes, device.launch_s) * how.surface_peak / how.peak
    floor = np.maximum(flops / how.peak, nbytes / how.memory_rate)
    return np.where(surface.covers_many(*sizes), seconds, np.maximum(seconds, floor))


def _on_curve_many(
    how: _Reading, curve: Curve, work: np.ndarray, flops: np.ndarray, nbytes: np.ndarray, device: Device
) -> np.ndarray:
    seconds, inside = curve.seconds_many(work, device.launch_s), curve.covers_many(work)
    moved = np.maximum(seconds, nbytes / how.memory_rate)
    seconds = moved if curve.variable == "flops" else np.where(inside, seconds, moved)
    return np.where(inside, seconds, np.maximum(seconds, flops / how.peak))
