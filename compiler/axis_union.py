"""The single-axis choices of one op over all batch extents, and where several axes may have them.

A choice is told by what it does (placements, messages, whether it splits the work), not by its label: a label's meaning
may depend on the extent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from torch.fx import Node

from .graph import tensor_operands, types_of
from .prune import SMALL
from .rules import rule_for
from .rules.base import AxisChoice
from .variants import Variants

__all__ = ["AxisUnion"]


@dataclass(frozen=True, slots=True)
class Single:
    """One choice on one axis, as the extents of a group have it. cuts: (tensor, dim) pairs, operands first."""

    choice: AxisChoice
    cuts: frozenset[tuple[int, int]]


class AxisUnion:
    """The single-axis choices u of an op over all extents. ``present``, ``divisible`` (gcd, see above): [extents, U];
    ``labels``: per group of extents and u, None where the group lacks it."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.singles: list[Single] = []
        found: dict[Hashable, int] = {}
        self.shapes = [_shapes(node) for node in nodes]
        self.group_of = np.zeros(len(nodes), dtype=np.int64)
        rows: list[tuple[list[int], list[int]]] = []  # per extent: (u, gcd)
        groups: dict[tuple[tuple[int, ...], tuple[str, ...], bool], int] = {}
        rule = rule_for(nodes[0])
        for e, node in enumerate(nodes):
            offered = rule.axis_choices(node)
            shapes = self.shapes[e]
            counts: dict[Hashable, int] = {}
            ids, common = [], []
            for one in offered:
                key = (one.inputs, one.outputs, one.splits_work, one.internal, one.reads, one.executable, one.joins)
                counts[key] = counts.get(key, 0) + 1
                u = found.setdefault((key, counts[key]), len(self.singles))
                if u == len(self.singles):
                    values = [value for value, _ in (*one.inputs, *one.outputs)]
                    cuts = frozenset((k, value.dim) for k, value in enumerate(values) if value.is_shard)
                    self.singles.append(Single(one, cuts))
                cut = self.singles[u].cuts
                ids.append(u)
                common.append(gcd(one.extent, *(shapes[k][dim] for k, dim in cut)) if cut else 0)
            labels = tuple(one.label for one in offered)
            small = types_of(node)[0].numel <= SMALL
            self.group_of[e] = groups.setdefault((tuple(ids), labels, small), len(groups))
            rows.append((ids, common))
        size = len(self.singles)
        named = [dict(zip(ids, labels)) for ids, labels, _ in groups]
        self.labels = [[names.get(u) for u in range(size)] for names in named]
        self.present = np.zeros((len(nodes), size), dtype=bool)
        self.divisible = np.ones((len(nodes), size), dtype=np.int64)
        for e, (ids, common) in enumerate(rows):
            self.present[e, ids] = True
            self.divisible[e, ids] = common

    def together(self, variants: Variants, a: int, b: int) -> np.ndarray | None:
        """bool [num]: where two axes that have ``a`` and ``b`` may cut what both cut; None if that is nothing."""
        common = self.singles[a].cuts & self.singles[b].cuts
        if not common:
            return None
        one, other = self.singles[a].choice, self.singles[b].choice
        if one.label not in other.joins and other.label not in one.joins:
            return np.zeros(variants.num, dtype=bool)
        extents = np.array([gcd(*(shapes[k][dim] for k, dim in common)) for shapes in self.shapes])
        found: np.ndarray = extents[variants.extent_of] % variants.num_devices == 0
        return found

    def stands(self, variants: Variants, mask: int, thin: bool) -> np.ndarray:
        """bool [num, U]: whether all axes of ``mask`` may have this choice together. thin: axes of size 1 as well."""
        rows, divisor = variants.extent_of, variants.whole_divisor[:, mask]
        ok: np.ndarray = self.present[rows] & (self.divisible[rows] % divisor[:, None] == 0)
        if not thin:
            for axis in range(variants.axes):
                if mask >> axis & 1:
                    ok[:, 1:] &= (variants.sizes[:, axis] > 1)[:, None]
        return ok


def _shapes(node: Node) -> list[tuple[int, ...]]:
    """The shapes of operands and outputs, in the order of ``Single.cuts``."""
    kinds = [types_of(operand)[0] for operand in tensor_operands(node)]
    return [kind.shape for kind in (*kinds, *types_of(node))]
