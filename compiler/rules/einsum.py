"""Rules of products and contractions, each written as one line of named dims.

Grammar::

    pattern ::= operand ("," operand)* "->" output       "b* i, o i, +o? -> b* o"
    operand ::= ["+"] (name ["!"] | "b*")* ["?"]

``b*`` stands for any number of leading dims (b0, b1, …); ``x!`` must stay whole; ``?`` marks an operand that may be
absent; ``+`` one that is added to the product rather than multiplied. Operands align at the right and broadcast: a
dim that is missing or of extent 1 where others have more counts as absent.

The place where a dim occurs decides what a cut along one mesh axis does to it:

* in the output: *free*. Operands that have it are cut (S, S); the others are used whole and give addends of their
  gradient (R, P).
* in factors only: *contracted*. Factors that have it are cut; the output is an addend (P, R), and so is an added
  operand; a factor that lacks it gives addends of its gradient (R, P).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch.fx import Node

from ..ir.graph import tensor_operands, types_of
from . import register, whole
from .base import FREE_GRAD, ROW, AxisChoice, AxisPair, Rule, shard
from .common import argument, random_float

__all__ = ["EinsumRule", "Pattern", "parse_pattern"]

Dims = tuple[str, ...]
Entry = tuple[Dims, bool, bool]  # names, added, optional


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern."""

    #: of each operand
    operands: tuple[Entry, ...]
    output: Dims
    #: the names marked ``!``
    fixed: frozenset[str]


@cache
def parse_pattern(text: str) -> Pattern:
    """``"b* i, o i, +o? -> b* o"`` as a Pattern; ValueError without exactly one ``->``."""
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ValueError(f"a pattern is operands '->' output, but got {text!r}")
    fixed: set[str] = set()

    def names(side: str) -> Dims:
        words = side.replace("+", "").replace("?", "").split()
        fixed.update(word[:-1] for word in words if word.endswith("!"))
        return tuple(word.removesuffix("!") for word in words)

    operands = tuple((names(side), "+" in side, "?" in side) for side in left.split(","))
    return Pattern(operands, names(right), frozenset(fixed))


class EinsumRule(Rule):
    """The rule of an op by a pattern, or by a function of the node where ranks decide (None: whole only)."""

    cost_kind = "matmul"

    def __init__(self, pattern: str | Callable[[Node], str | None]) -> None:
        self.pattern = pattern

    def bound(self, node: Node) -> tuple[list[Dims], list[bool], Dims, dict[str, int], frozenset[str]] | None:
        """(dims of each operand, whether each is added, output dims, extents, dims that stay whole) of this node.

        Absent dims are "" in an operand's dims. None where the op has no pattern.
        """
        pattern, entries = self._entries(node)
        if pattern is None:
            return None
        operands = [operand.meta["type"].shape for operand in tensor_operands(node)]
        out_shape = types_of(node)[0].shape
        leading = len(out_shape) - sum(name != "b*" for name in pattern.output)
        batch = tuple(f"b{i}" for i in range(leading))

        def spread(names: Dims, shape: tuple[int, ...]) -> Dims:
            full = tuple(name for word in names for name in (batch if word == "b*" else (word,)))
            return full[len(full) - len(shape) :]

        dims = [spread(entry[0], shape) for entry, shape in zip(entries, operands)]
        output = spread(pattern.output, out_shape)
        extents = dict(zip(output, out_shape))
        for names, shape in zip(dims, operands):
            for name, extent in zip(names, shape):
                extents[name] = max(extents.get(name, 1), extent)
        present = [
            tuple(name if extent == extents[name] else "" for name, extent in zip(names, shape))
            for names, shape in zip(dims, operands)
        ]
        return present, [entry[1] for entry in entries], output, extents, pattern.fixed

    def _entries(self, node: Node) -> tuple[Pattern | None, tuple[Entry, ...]]:
        """The pattern of this node, and that of each of its operands; None and () where the op has no pattern."""
        text = self.pattern if isinstance(self.pattern, str) else self.pattern(node)
        if text is None:
            return None, ()
        pattern, num = parse_pattern(text), len(tensor_operands(node))
        required = tuple(entry for entry in pattern.operands if not entry[2])
        entries = pattern.operands if num > len(required) else required
        assert len(entries) == num, f"{node.name}: {text} does not describe {num} operands"
        return pattern, entries

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """One choice per dim that may be cut, named like the dim."""
        bound = self.bound(node)
        if bound is None:
            return (whole(node),)
        dims, added, output, extents, fixed = bound
        choices = [whole(node)]
        for name, extent in extents.items():
            if extent == 1 or name in fixed or any(names.count(name) > 1 for names in (*dims, output)):
                continue
            free = name in output
            inputs: list[AxisPair] = []
            for names, is_added in zip(dims, added):
                if name in names:
                    inputs.append(shard(names.index(name)))
                else:
                    inputs.append(ROW if is_added and not free else FREE_GRAD)
            result = shard(output.index(name)) if free else ROW
            choices.append(AxisChoice(name, tuple(inputs), (result,), extent))
        return tuple(choices)

    def flops(self, node: Node) -> float:
        """Two per element of the space that all dims span."""
        bound = self.bound(node)
        if bound is None:
            sizes = [operand.meta["type"].numel for operand in tensor_operands(node)]
            return 2.0 * max([*sizes, types_of(node)[0].numel])
        return 2.0 * prod(bound[3].values())

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The factors: each is needed for the gradients of the others."""
        pattern, entries = self._entries(node)
        added = [entry[1] for entry in entries] if pattern else [False] * len(tensor_operands(node))
        return tuple(("input", k) for k, is_added in enumerate(added) if not is_added)

    def is_product(self, node: Node) -> bool:
        """True."""
        return True


def _matmul(node: Node) -> str:
    left, right = (len(operand.meta["type"].shape) for operand in tensor_operands(node))
    if left == 1:
        return "k, k ->" if right == 1 else "k, b* k n -> b* n"
    return "b* k, k -> b*" if right == 1 else "b* m k, b* k n -> b* m n"


def _equation(node: Node) -> str | None:
    """The pattern of ``aten.einsum(equation, operands)``; None with an ellipsis or without ``->``."""
    equation = str(node.args[0]).replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    left, right = equation.split("->")
    return ",".join(" ".join(side) for side in left.split(",")) + "->" + " ".join(right)


register("aten.linear.default")(EinsumRule("b* i, o i, +o? -> b* o"))
register("aten.addmm.default")(EinsumRule("+m n, m k, k n -> m n"))
register("aten.mm.default")(EinsumRule("m k, k n -> m n"))
register("aten.bmm.default")(EinsumRule("b m k, b k n -> b m n"))
register("aten.baddbmm.default")(EinsumRule("+b m n, b m k, b k n -> b m n"))
register("aten.mv.default")(EinsumRule("m k, k -> m"))
register("aten.addmv.default")(EinsumRule("+m, m k, k -> m"))
register("aten.dot.default", "aten.vdot.default")(EinsumRule("k, k ->"))
register("aten.outer.default")(EinsumRule("m, n -> m n"))
register("aten.matmul.default")(EinsumRule(_matmul))
register("aten.einsum.default")(EinsumRule(_equation))
register("aten.cdist.default")(EinsumRule("b* p m!, b* r m! -> b* p r"))


class _TriangularSolveRule(EinsumRule):
    """The solution X of A X = B (X A = B, if not ``left``): matrices of a batch, and columns (rows) of B, are free."""

    def __init__(self) -> None:
        super().__init__(self.sides)

    @staticmethod
    def sides(node: Node) -> str:
        """The pattern by the side on which A stands."""
        return "b* n! m!, b* n! k -> b* n! k" if argument(node, "left") else "b* n! m!, b* k n! -> b* k n!"

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The matrix and the solution."""
        return (("input", 0), ("output", 0))

    def is_product(self, node: Node) -> bool:
        """False: the gradient of each needs the matrix."""
        return False

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor]:
        """A well-conditioned matrix."""
        matrix, right = (random_float(operand, generator) for operand in tensor_operands(node))
        return [0.1 * matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype), right]


class _GroupedProductRule(EinsumRule):
    """Rows in groups, each times a matrix of its own: inner and outer dims may be cut; rows and groups stay whole."""

    def __init__(self) -> None:
        super().__init__("s! i, e! i o, e! -> s! o")

    def flops(self, node: Node) -> float:
        """Each row meets one matrix."""
        rows, matrices, _ = (operand.meta["type"].shape for operand in tensor_operands(node))
        return 2.0 * rows[0] * matrices[1] * matrices[2]

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """All operands."""
        return (("input", 0), ("input", 1), ("input", 2))

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor]:
        """Groups of equal size."""
        rows, matrices, ends = tensor_operands(node)
        size = rows.meta["type"].shape[0] // ends.meta["type"].numel
        steps = size * torch.arange(1, ends.meta["type"].numel + 1)
        return [random_float(rows, generator), random_float(matrices, generator), steps.to(ends.meta["type"].dtype)]


register("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")(_GroupedProductRule())
register("aten.linalg_solve_triangular.default")(_TriangularSolveRule())
