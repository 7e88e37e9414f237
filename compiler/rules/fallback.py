"""The fallback for ops without a rule: every device runs the whole op, and the plan notes it."""

from __future__ import annotations

from torch.fx import Node

from ..ir.graph import tensor_operands
from . import register, whole
from .base import AxisChoice, Rule

__all__ = ["FallbackRule", "WholeRule"]


class WholeRule(Rule):
    """The rule of ops that are best replicated: creation ops, tests, scans along the only dim."""

    def __init__(self, cost_kind: str = "pointwise") -> None:
        self.cost_kind = cost_kind

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "whole" alone."""
        return (whole(node),)


class FallbackRule(WholeRule):
    """The rule of an op of which nothing is known."""

    is_fallback = True

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """All float operands: nothing is known, so the memory estimate is on the safe side."""
        return tuple(("input", k) for k, operand in enumerate(tensor_operands(node)) if operand.meta["type"].is_float)


register("fallback")(FallbackRule())
