"""Single tensors that travel in a code: activations between stages, weights that are stored in blocks.

``Plan.codes`` says which: {"activations": code, "weights": code} of ``codecs.CARRIERS``; what is not named travels as
it is. Both directions take the code: values and their gradients. Whoever asks for one changes what the ops compute, so
no search chooses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...costmodel.codecs import CARRIERS, carried_share, carrying_seconds
from ...costmodel.hardware import Device
from ..ir.graph import TensorType

__all__ = ["carrier_faults", "coder_seconds", "wire_share"]


def wire_share(code: str, kind: TensorType) -> float:
    """Bytes of its message per byte of a tensor."""
    return carried_share(code, kind.dtype.itemsize) if kind.is_float else 1.0


def coder_seconds(code: str, kind: TensorType, device: Device) -> float:
    """Seconds per element of a tensor to encode it on a device; to decode it takes as long."""
    return carrying_seconds(code, kind.dtype.itemsize, device) if kind.is_float else 0.0


def carrier_faults(codes: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with ``Plan.codes``."""
    for what, code in codes.items():
        if what not in ("activations", "weights"):
            yield f"codes are of activations and weights, but got {what!r}"
        elif code not in CARRIERS:
            yield f"{what} travel in one of the codes {', '.join(CARRIERS)}, but got {code!r}"
