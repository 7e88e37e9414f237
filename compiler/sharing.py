"""What several layers use together, and a stage that holds them pays for once.

A *floating* op (``layers``) that more than one layer needs is computed once per stage, so a layer alone is sure to pay
nothing for it. A parameter that n layers use is updated, and its gradient reduced, once per stage that holds some of
them: each pays at least the n-th part. A class of layers is priced by one of them, so what holds for any layer of the
class is taken for all.
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Node

from .graph import Graph
from .layers import Layering

__all__ = ["Sharing"]


class Sharing:
    """How many layers use each tensor of ``graph`` that belongs to none."""

    def __init__(self, graph: Graph, layering: Layering) -> None:
        nodes, floating = graph.by_name(), set(layering.floating)
        uses: Counter[str] = Counter()
        by_class: dict[str, list[list[str]]] = {}
        for layer in layering.layers:
            names: dict[str, None] = {}  # in order of use, which is the same in all layers of a class
            stack = [nodes[name] for name in reversed(layer.ops)]
            while stack:
                for operand in stack.pop().all_input_nodes:
                    if operand.op == "placeholder" or operand.name in floating:
                        if operand.name not in names and operand.op != "placeholder":
                            stack.append(operand)
                        names.setdefault(operand.name)
            uses.update(names.keys())
            by_class.setdefault(layer.class_key, []).append(list(names))
        self._uses = dict(uses)
        for members in by_class.values():
            for alike in zip(*members):
                most = max(uses[name] for name in alike)
                for name in alike:
                    self._uses[name] = max(self._uses[name], most)
        self._floating = floating

    def uses(self, name: str) -> int:
        """How many layers use a tensor, or one in the same place of an equal layer."""
        return self._uses.get(name, 1)

    def floats(self, name: str) -> bool:
        """Whether this is a floating op that several layers need."""
        return name in self._floating and self.uses(name) > 1

    def floor_of(self, node: Node) -> float:
        """The part of the conversions of a tensor that a layer is sure to pay."""
        if node.op == "placeholder":
            return 1.0 / self.uses(node.name)
        return 0.0 if self.floats(node.name) else 1.0
