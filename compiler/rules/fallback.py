"""The fallback for ops without a rule: every device runs the whole op, and the plan notes it."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from ..ir.graph import tensor_operands, types_of
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

    def flops(self, node: Node) -> float:
        """PyTorch's own count; one per element of the outputs, where it has none."""
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count is None:
            return float(sum(kind.numel for kind in types_of(node)))

        def meta(operand: Node) -> torch.Tensor:
            kind = operand.meta["type"]
            return torch.empty(kind.shape, dtype=kind.dtype, device="meta")

        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), meta)
        outputs = [torch.empty(kind.shape, dtype=kind.dtype, device="meta") for kind in types_of(node)]
        return float(count(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs)))

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """All float operands: nothing is known, so the memory estimate is on the safe side."""
        return tuple(("input", k) for k, operand in enumerate(tensor_operands(node)) if operand.meta["type"].is_float)


register("fallback")(FallbackRule())
