"""Dropout whose mask is a function of the element's global place: any cut draws the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from ..graph import types_of
from . import register, whole
from .base import FREE_GRAD, AxisChoice, Rule
from .named import cut, replace_arguments

__all__ = ["DropoutRule"]


class DropoutRule(Rule):
    """Every dim is free. Addends of the gradient pass through, for the mask is the same on every device."""

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "d0", "d1", …, "grad"."""
        shape = types_of(node)[0].shape
        choices = [whole(node)]
        choices += [cut(node, f"d{dim}", extent, [dim], [dim]) for dim, extent in enumerate(shape) if extent > 1]
        choices.append(AxisChoice("grad", (FREE_GRAD,), (FREE_GRAD,), 1 << 62, splits_work=False))
        return tuple(choices)

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Tells the op which axes cut which dims."""
        cuts = tuple((axis, int(label[1:])) for axis, label in enumerate(labels) if label[1:].isdigit())
        return replace_arguments(node, cuts=cuts) if cuts else super().localize(node, labels, mesh_shape)

    def temporary_bytes(self, node: Node) -> float:
        """The mask, one byte per element."""
        return float(types_of(node)[0].numel)


register("meshwright.dropout")(DropoutRule())
