"""Time of one op on one device: the measured curve where the device carries one, else the roofline; a price says which.

    roofline:  seconds = max(flops / (peak(dtype) · efficiency(kind)), bytes / (memory rate · share)) + launch
               share = efficiency("memory")
    measured:  seconds = max(curve(work), bytes / memory rate)     work: the curve's variable, FLOPs or bytes

A curve's times include the launch. Outside its grid a curve is continued by a roofline (``tables.Curve.seconds``):
above at the last measured rate, below in proportion down to the launch. Curves are fp32; another dtype scales them by
the ratio of the peaks (FLOPs) and by its own bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .curves import Curve
from .hardware import Device

__all__ = ["EFFICIENCY", "KINDS", "Price", "efficiency", "op_price", "op_seconds"]

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
_VECTOR = (1.0, "bound by memory: FLOPs of these kinds are counted at the peak")


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds, and where they come from: "measured", "extrapolated" (outside the measured grid), "roofline" or
    "free"."""

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
    dtype or its name.

    Raises ValueError for a kind that is none of ``KINDS`` or for negative work.
    """
    if kind not in KINDS:
        raise ValueError(f"an op kind is one of {', '.join(KINDS)}, but got {kind!r}; price it as pointwise")
    if flops < 0 or nbytes < 0:
        raise ValueError(
            f"work is never negative, but got {flops} FLOP and {nbytes} bytes for {kind}; check the op's rule"
        )
    if kind in ("view", "free"):
        return Price(device.view_s, "free")
    memory_rate, peak, single, share, curve = _constants(kind, str(dtype), device)
    if curve is not None:
        work = flops * single / peak if curve.variable == "flops" else nbytes
        if work > 0:
            seconds = max(curve.seconds(work, device.launch_s), nbytes / device.memory_bytes_per_s)
            return Price(seconds, "measured" if curve.covers(work) else "extrapolated")
    return Price(max(flops / (peak * share), nbytes / memory_rate) + device.launch_s, "roofline")


def op_seconds(kind: str, flops: float, nbytes: float, dtype: object, device: Device) -> float:
    """``op_price(…).seconds``."""
    return op_price(kind, flops, nbytes, dtype, device).seconds


@lru_cache(maxsize=4096)
def _constants(kind: str, dtype: str, device: Device) -> tuple[float, float, float, float, Curve | None]:
    """(achievable memory rate, peak of the dtype, peak of fp32, share of the peak, the kind's curve)."""
    memory_rate = device.memory_bytes_per_s
    if not device.curves:  # a measured rate is already what is achieved
        memory_rate *= efficiency("memory", device)[0]
    curve = next((curve for curve in device.curves if curve.kind == kind), None)
    share = efficiency(kind, device)[0] if not device.curves else 1.0
    return memory_rate, device.peak(dtype), device.peak("float32"), share, curve
