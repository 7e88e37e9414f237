"""Compressors of gradients as descriptions: what they send, in which pattern, and what encoding costs. ``runtime/``
registers implementations under the same names.

Seconds to reduce n elements over a group of p devices, e = encode, d = decode seconds per element, b wire bytes per
element, collectives priced by the axis (``AxisPrice.seconds``)::

    all_reduce   linear codes, summed as they are              e n + all_reduce(b n) + d n
    two_step     each reduces one part, then tells it          e n (1 + 1/p) + 2 d n + all_to_all(b n) + all_gather(b n)
    all_gather   sparse codes, every device decodes all        e n + all_gather(p b n) + p d b n / 8

On a CPU encoding was measured (ns per element on one thread, Gloo prototypes, 4 ranks); on an accelerator it is assumed
to be ``passes`` over the elements at the speed of memory. Sparse codes send a value and an index of 4 bytes each.
"""

from __future__ import annotations

from dataclasses import dataclass

from .collectives import AxisPrice
from .hardware import Device

__all__ = ["CODECS", "Codec", "coded_messages", "coded_seconds", "coding_seconds"]

PATTERNS = ("all_reduce", "two_step", "all_gather")


@dataclass(frozen=True, slots=True)
class Codec:
    """wire_bytes: per element of the gradient; passes: over the elements, reads and writes of 4 bytes, to encode and to
    decode; encode_ns: per element on one CPU thread; lossy: whether the sum differs from the exact one by more than the
    order of summation."""

    name: str
    pattern: str
    wire_bytes: float
    passes: float
    encode_ns: float
    lossy: bool = True


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("none", "all_reduce", 4.0, 0.0, 0.0, lossy=False),
        Codec("bf16", "all_reduce", 2.0, 1.5, 0.65),
        Codec("int8", "two_step", 1.03, 6.0, 4.7),
        Codec("1bit", "two_step", 0.127, 8.0, 3.1),
        Codec("powersgd4", "all_reduce", 0.017, 12.0, 2.2),
        Codec("topk1%", "all_gather", 0.08, 40.0, 14.0),
    )
}


def coding_seconds(codec: Codec, device: Device, group: int) -> float:
    """Seconds per element of the gradient to encode and decode on one of ``group`` devices."""
    encode = codec.encode_ns * 1e-9 if device.kind == "cpu" else codec.passes * 4 / device.memory_bytes_per_s
    if codec.pattern == "all_reduce":
        return 2 * encode
    if codec.pattern == "two_step":
        return encode * (3 + 1 / group)
    return encode * (1 + group * codec.wire_bytes / 8)  # values that arrive, each added in its place


def coded_messages(codec: Codec, group: int, itemsize: int) -> tuple[tuple[str, float], ...]:
    """The collectives that a gradient takes, each with its bytes per byte of the gradient. "none" is the plain
    all-reduce of the gradient in its own dtype."""
    share = codec.wire_bytes / itemsize
    if codec.name == "none":
        return (("all_reduce", 1.0),)
    if codec.pattern == "all_reduce":
        return (("all_reduce", share),)
    if codec.pattern == "two_step":
        return (("all_to_all", share), ("all_gather", share))
    return (("all_gather", group * share),)


def coded_seconds(axis: AxisPrice, device: Device, nbytes: float, itemsize: int, codec: Codec) -> float:
    """Seconds to sum a gradient of ``nbytes`` over the groups of an axis in this code; 0 on an axis of one device."""
    if axis.size == 1 or not nbytes:
        return 0.0
    sending = sum(axis.seconds(kind, share * nbytes) for kind, share in coded_messages(codec, axis.size, itemsize))
    return coding_seconds(codec, device, axis.size) * nbytes / itemsize + sending
