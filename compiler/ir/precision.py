"""Precisions of a computation, and the type in which a program reads a parameter."""

from __future__ import annotations

import torch

from .graph import TensorType

__all__ = ["PRECISIONS", "computed_type"]


PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def computed_type(kind: TensorType, precision: str) -> TensorType:
    """The type in which programs read a parameter that is of this one in the model."""
    changes = precision in PRECISIONS and kind.dtype == torch.float32 and kind.shape
    return TensorType(kind.shape, PRECISIONS[precision]) if changes else kind
