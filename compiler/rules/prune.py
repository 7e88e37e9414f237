"""The pruning of sharding strategies before the search: the five rules by which the search space is restricted.

1. A cut of a tensor dim stays only if it is *live*: some heavy op (matmul, attention, convolution, embedding, routing)
   or loss can cut that dim of one of its operands or outputs, and the cut carries over to this tensor through ops that
   preserve it. Any other cut would be made by one reshard and undone by another, for pointwise work alone.
2. Partial values pass through scalars and the like, additions (two row-parallel branches then share one reduction) and
   views between a heavy op and an addition. Elsewhere reducing before or after a linear op of equal extent costs the
   same.
3. Partial cotangents pass through views of a tensor that at least two views connect to heavy ops (which then share one
   reduction).
4. Without ``sequence`` these stay whole: leading dims of a matmul, embedding or loss other than the first, the queries
   of an attention (and so its ring), the height, width and depth of a convolution, and tokens that are sent to their
   experts. With it they may be cut, and make live what they reach: norms, residual additions and dropout along the
   sequence (Megatron-LM's sequence parallelism, arXiv:2205.05198), batch norms and poolings over space.
5. Of more than ``MAX_CHOICES`` choices those that leave each device the least work stay, and of these first those of
   the fewest different labels. On two mesh axes that concerns three spatial dims only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from torch.fx import Node

from ..ir.graph import Graph, op_name, output_of, tensor_operands, types_of
from . import MeshChoice, mesh_choices, pairs_choice, rule_for
from .base import AxisChoice

__all__ = ["Pruner"]

HEAVY_KINDS = frozenset({"matmul", "attention", "convolution", "embedding", "routing", "loss"})
SMALL_NUMEL = 64  # elements
MAX_CHOICES = 40  # choices per op and mesh
SEQUENCE_LABELS = re.compile(r"b[1-9]|query|ring|depth|height|width|dispatch")  # labels of rule 4


class Pruner:
    """The filter of strategies for one graph, by its live dims (which do not depend on the batch extent).

    sequence: True if cuts of sequences and of space, and the sending of tokens to experts, are searched (rule 4).
    """

    def __init__(self, graph: Graph, sequence: bool = False) -> None:
        self.sequence = sequence
        self.live: set[tuple[str, int, int]] = set()  # (op, output, dim)
        self._kept: dict[tuple[str, int, tuple[int, ...]], list[MeshChoice]] = {}
        self._labelled: dict[tuple[str, int, tuple[int, ...], str], MeshChoice] = {}
        waiting: dict[tuple[str, int, int], list[frozenset[tuple[str, int, int]]]] = defaultdict(list)
        stack: list[tuple[str, int, int]] = []
        for node in graph.ops():
            if op_name(node) == "getitem":
                continue
            deep = rule_for(node).cost_kind in HEAVY_KINDS
            for choice in rule_for(node).axis_choices(node):
                group = frozenset(self._cuts(node, choice))
                if deep and self._searched(choice.label):
                    stack.extend(group)
                else:
                    for cut in group:
                        waiting[cut].append(group)
        # a choice that has one live cut makes all of its cuts live: propagate from heavy ops through the others
        while stack:
            cut = stack.pop()
            if cut not in self.live:
                self.live.add(cut)
                for group in waiting.pop(cut, ()):
                    stack.extend(group)

    def _searched(self, label: str) -> bool:
        """True if rule 4 allows this label for a heavy op or loss."""
        return self.sequence or SEQUENCE_LABELS.fullmatch(label) is None

    @staticmethod
    def _key(node: Node) -> tuple[str, int]:
        producer, index = output_of(node)
        return producer.name, index

    def _cuts(self, node: Node, choice: AxisChoice) -> list[tuple[str, int, int]]:
        cuts = [
            (*self._key(operand), pair[0].dim)
            for operand, pair in zip(tensor_operands(node), choice.inputs)
            if pair[0].is_shard
        ]
        return cuts + [(node.name, k, pair[0].dim) for k, pair in enumerate(choice.outputs) if pair[0].is_shard]

    def choices(self, node: Node, batch: int, mesh_shape: tuple[int, ...]) -> list[MeshChoice]:
        """The choices of ``node`` (of the graph at ``batch``) on a mesh that the search gets, "whole" first. Cached."""
        key = (node.name, batch, mesh_shape)
        if key not in self._kept:
            self._kept[key] = self.keep(node, mesh_choices(node, mesh_shape))
        return self._kept[key]

    def labelled(self, node: Node, batch: int, mesh_shape: tuple[int, ...], text: str, twin: str) -> MeshChoice:
        """The choice of ``node`` whose labels a plan writes as ``text`` ("row,whole"), pruned or not. Cached by the
        name of its ``twin``, an op of the same choices."""
        key = (twin, batch, mesh_shape, text)
        if key not in self._labelled:
            self._labelled[key] = pairs_choice(node, tuple(text.split(",")) if text else (), mesh_shape)
        return self._labelled[key]

    def keep(self, node: Node, choices: Sequence[MeshChoice]) -> list[MeshChoice]:
        """Those of ``choices`` that follow all five rules, at most ``MAX_CHOICES``."""
        allowed = self.worthwhile(node, choices)
        if len(allowed) <= MAX_CHOICES:
            return allowed
        ranked = sorted(allowed[1:], key=lambda choice: (choice.work_share, len(set(choice.labels))))
        best = set(ranked[: MAX_CHOICES - 1])
        return allowed[:1] + [choice for choice in allowed[1:] if choice in best]

    def worthwhile(self, node: Node, choices: Sequence[MeshChoice]) -> list[MeshChoice]:
        """Those of ``choices`` that follow rules 1 to 4, however many."""
        if rule_for(node).cost_kind in HEAVY_KINDS:
            return [c for c in choices if all(self._searched(label) for label in c.labels)]
        small = types_of(node)[0].numel <= SMALL_NUMEL
        view = rule_for(node).cost_kind in ("view", "free")
        partial = small or op_name(node) == "aten.add.Tensor" or (view and self._between_heavy_and_sum(node))
        grad = small or (view and self._branches_to_heavy(node))
        out = []
        for choice in choices:
            if not partial and any(label.startswith("partial") for label in choice.labels):
                continue
            if not grad and "grad" in choice.labels:
                continue
            cuts = {
                (node.name, k, p.dim) for k, pair in enumerate(choice.outputs) for p in pair.value if p.is_shard
            } | {
                (*self._key(o), p.dim)
                for o, pair in zip(tensor_operands(node), choice.inputs)
                for p in pair.value
                if p.is_shard
            }
            if cuts <= self.live:
                out.append(choice)
        return out

    @staticmethod
    def _between_heavy_and_sum(node: Node) -> bool:
        operand = tensor_operands(node)[0] if tensor_operands(node) else None
        if operand is None or not _is_heavy(operand):
            return False
        return any(op_name(user) == "aten.add.Tensor" for user in node.users)

    @staticmethod
    def _branches_to_heavy(node: Node) -> bool:
        operand = tensor_operands(node)[0] if tensor_operands(node) else None
        return operand is not None and sum(_leads_to_heavy(user) for user in operand.users) > 1


def _is_heavy(node: Node) -> bool:
    return node.op == "call_function" and op_name(node) != "getitem" and rule_for(node).cost_kind in HEAVY_KINDS


def _leads_to_heavy(node: Node) -> bool:
    """True if ``node`` is a heavy op, or a view that some heavy op reads."""
    if _is_heavy(node):
        return True
    if node.op != "call_function" or op_name(node) == "getitem" or rule_for(node).cost_kind not in ("view", "free"):
        return False
    return any(_is_heavy(user) for user in node.users)
