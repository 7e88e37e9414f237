"""Which part of a gradient's reduction hides behind the last microbatch's backward.

Gradients are summed in buckets, as ``runtime/gradients.py`` makes them: parameters with equal axes and dtype, the last
used first, the first bucket small. A bucket starts when its last gradient is there and the buckets before it have
started, and they travel one after another. While the backward still runs, the share ``Device.overlap`` of a transfer
costs nothing; the rest of it, and what comes after the backward, is exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from .buckets import gradient_buckets
from .plan import BUCKET_BYTES

__all__ = ["Bucket", "Gradient", "bucketed", "hidden_seconds"]


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient on one device. axes: over which it is a sum of addends; key: what else must agree within
    a bucket (the dtype)."""

    name: str
    axes: tuple[int, ...]
    nbytes: float
    key: Hashable = None


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed in one message."""

    axes: tuple[int, ...]
    gradients: tuple[Gradient, ...]

    @property
    def nbytes(self) -> float:
        """Size of the message."""
        return sum(gradient.nbytes for gradient in self.gradients)


def bucketed(gradients: Sequence[Gradient], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """The buckets of gradients given in program order, those without axes left out, in the order in which they
    start."""
    keys = [((gradient.axes, gradient.key) if gradient.axes else None, gradient.nbytes) for gradient in gradients]
    groups = gradient_buckets(keys, bucket_bytes)
    return [Bucket(gradients[group[0]].axes, tuple(gradients[k] for k in group)) for group in groups]


def hidden_seconds(
    buckets: Sequence[Bucket],
    seconds: Callable[[Bucket], float],
    ready_s: Mapping[str, float],
    backward_s: float,
    overlap: float,
) -> tuple[float, float]:
    """(all seconds of the reduction, those of them that hide).

    ready_s: gradient name → when its parameter's last gradient is there, seconds after the backward began, which takes
    ``backward_s``. overlap: the share of a transfer that costs nothing while the device computes.
    """
    total = beside = wire_free = started = 0.0
    for bucket in buckets:
        started = max(started, *(ready_s[gradient.name] for gradient in bucket.gradients))
        begin, long = max(started, wire_free), seconds(bucket)
        wire_free = begin + long
        total += long
        beside += max(0.0, min(wire_free, backward_s) - begin)
    return total, overlap * beside
