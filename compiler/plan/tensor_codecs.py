"""Codecs of single tensors: activations that go between stages, and weights that ZeRO-3 stores in blocks.

``Plan.codes`` names them: {"activations": codec, "weights": codec} of ``codecs.CARRIERS``; other tensors travel as they
are. Values and their gradients use the same codec. A codec changes what the ops compute, so no search chooses one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...costmodel.codecs import CARRIERS, carried_share, carrying_seconds
from ...costmodel.hardware import Device
from ..ir.graph import TensorType

__all__ = ["carrier_faults", "coder_seconds", "wire_share"]


def wire_share(code: str, kind: TensorType) -> float:
    """Bytes of its message per byte of a tensor."""
    return carried_share(code, kind.dtype.itemsize) if kind.dtype.is_floating_point else 1.0


def coder_seconds(code: str, kind: TensorType, device: Device) -> float:
    """Seconds per element of a tensor to encode it on a device; to decode it takes as long."""
    return carrying_seconds(code, kind.dtype.itemsize, device) if kind.dtype.is_floating_point else 0.0


def carrier_faults(codes: Mapping[str, str]) -> Iterator[str]:
    """The faults of ``Plan.codes``, a sentence each."""
    for what, code in codes.items():
        if what not in ("activations", "weights"):
            yield f"codes are of activations and weights, but got {what!r}"
        elif code not in CARRIERS:
            yield f"{what} travel in one of the codes {', '.join(CARRIERS)}, but got {code!r}"
