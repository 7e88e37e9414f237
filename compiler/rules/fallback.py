"""Ops that nobody wrote a rule for: every device does the whole op, and the plan says so aloud."""

from __future__ import annotations

from torch.fx import Node

from ..ir.graph import tensor_operands
from . import register, whole
from .base import AxisChoice, Rule

__all__ = ["FallbackRule", "WholeRule"]


class WholeRule(Rule):
    """Known to be sensibly run whole: creation ops, tests, scans along the only dim. ``cost_kind`` may be given."""

    def __init__(self, cost_kind: str = "pointwise") -> None:
        self.cost_kind = cost_kind

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "whole" alone."""
        return (whole(node),)


class FallbackRule(WholeRule):
    """An op without a rule."""

    is_fallback = True

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """All float operands: nothing is known, so the memory estimate is on the safe side."""
        return tuple(("input", k) for k, operand in enumerate(tensor_operands(node)) if operand.meta["type"].is_float)


register("fallback")(FallbackRule())
