"""Recompute: which ops run once more for the backward, and which tensors are kept instead of what autograd would keep.

    "none"    every tensor that some op's backward reads is kept from the forward to the backward
    "layer"   per microbatch in flight only the tensors that cross a border between layers are kept; the backward of a
              layer first runs the layer's forward again, and then holds what its ops save, one layer at a time

Conversions of a tensor that crosses a border are not repeated: their results are kept beside it. Floating ops
(``layers``) belong to no layer and are not repeated either. Under 1F1B the layer with the loss is not repeated: its
backward follows its forward at once, so what it saves never lives longer than a repeated layer's would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .graph import Graph
from .layers import Layering
from .plan import RECOMPUTE_MODES

__all__ = ["NOTHING", "Recompute", "recompute_of"]


@dataclass(frozen=True, eq=False)
class Recompute:
    """repeated: nodes that the backward runs once more. kept: tensors that cross a border between layers. layer_of:
    node → its layer; empty where nothing is recomputed."""

    repeated: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    layer_of: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.layer_of)


NOTHING = Recompute()


def recompute_of(graph: Graph, layering: Layering, mode: str, schedule: str) -> Recompute:
    """What ``mode`` means for these layers. Raises ValueError for a mode that is none of ``RECOMPUTE_MODES``."""
    if mode not in RECOMPUTE_MODES:
        known = " or ".join(map(repr, RECOMPUTE_MODES))
        raise ValueError(f"recompute is {known}, but got {mode!r}; use one of them")
    if mode == "none":
        return NOTHING
    last = {result.node for result in graph.results if result.kind == "loss"} if schedule == "1f1b" else set()
    repeated = {name for layer in layering.layers if not last & set(layer.ops) for name in layer.ops}
    layer_of = {name: index for index, layer in enumerate(layering.layers) for name in layer.ops}
    return Recompute(frozenset(repeated), frozenset(name for names in layering.crossing for name in names), layer_of)
