"""The fallback for ops without a rule: trials find along which dims such an op treats its blocks one by one.

Nothing is known of the op but that it can be run. So it runs whole and in parts on small random tensors, forward and
backward (``trials``), and the cuts are offered that every trial confirms and that cut every output: those of a batch.
Extents are replaced by small ones, equal ones by equal ones, and the real shapes are compared on the meta device. Some
operands are a thousand times larger than others, for ops that treat large values in another way. Ops that draw random
numbers or change their operands are not tried. An op without a confirmed cut is replicated, and the plan notes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import gcd
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from ..ir.graph import PRIME, TensorType, tensor_operands, types_of
from . import register, whole
from .base import AxisChoice, Rule
from .trials import MAX_TRIAL_ELEMENTS, TRIAL_PARTS, Draw, Split, Trial, confirm, random_operands, split_choices

__all__ = ["FallbackRule", "WholeRule"]

LARGE = 16  # larger extents, and numbers equal to them among the arguments, are replaced by smaller ones


class WholeRule(Rule):
    """The rule of ops that are best replicated: creation ops, tests, scans along the only dim."""

    def __init__(self, cost_kind: str = "pointwise") -> None:
        self.cost_kind = cost_kind

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "whole" alone."""
        return (whole(node),)


class FallbackRule(Rule):
    """The rule of an op of which nothing is known."""

    is_fallback = True

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "whole", then what trials confirm; a label names the operand and the dim that it cuts first."""
        kinds = tuple(operand.meta["type"] for operand in tensor_operands(node))
        if not _can_be_tried(node.target) or not kinds:
            return (whole(node),)
        return whole(node), *split_choices(node, _splits(_Call.of(node), kinds, types_of(node)))

    def is_unknown(self, node: Node) -> bool:
        """True where no trial confirmed a way to split it."""
        return len(self.axis_choices(node)) == 1

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


def _can_be_tried(target: Any) -> bool:
    """True for ops of torch.library that are functions of their operands."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


@dataclass(frozen=True)
class _Call:
    """An op with all its arguments but the tensors; equal calls have equal text."""

    target: Any
    text: str
    #: the arguments, flat, with None for every tensor
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    tree: Any

    @classmethod
    def of(cls, node: Node) -> _Call:
        flat, tree = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
        leaves = tuple(None if isinstance(x, Node) else x for x in flat)
        places = tuple(i for i, x in enumerate(flat) if isinstance(x, Node))
        return cls(node.target, f"{leaves} {places} {tree}", leaves, places, tree)

    def __hash__(self) -> int:
        return hash((self.target, self.text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and (self.target, self.text) == (other.target, other.text)

    def run(self, sizes: Mapping[int, int], *operands: Tensor) -> tuple[Tensor, ...]:
        """The outputs; numbers among the arguments that are extents are replaced as these are."""
        leaves = [sizes.get(x, x) if type(x) is int and x > LARGE else x for x in self.leaves]
        for place, operand in zip(self.places, operands, strict=True):
            leaves[place] = operand
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        outputs = pytree.tree_leaves(self.target(*args, **kwargs))
        return tuple(x for x in outputs if isinstance(x, Tensor))


@lru_cache(maxsize=4096)
def _splits(call: _Call, kinds: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> tuple[Split, ...]:
    """The splits that all trials confirm, at the first sizes and in the first precision at which there are any."""
    for *trials, large in _trials(call, kinds):
        if len(large.outputs) != len(outputs):
            return ()
        confirmed = (confirm(trials, cut) for cut in dict.fromkeys(trials[0].following_cuts()))
        batches = (split for split in confirmed if split and all(value.is_shard for value, _ in split.outputs))
        batches = (split for split in batches if large.gives(split))  # its gradients may all vanish
        if splits := tuple(split for split in batches if _fits(call, kinds, outputs, split)):
            return splits
    return ()


def _trials(call: _Call, kinds: tuple[TensorType, ...]) -> Iterator[list[Trial]]:
    """Runs of the whole op at each size and precision at which it runs and repeats; the last is on large values."""
    extents = sorted({extent for kind in kinds for extent in kind.shape if extent > 1})
    batch = {extent: extent // PRIME for extent in extents if extent % PRIME == 0}
    large = [extent for extent in extents if extent > LARGE and extent not in batch]
    unit = gcd(*large)
    ways: tuple[dict[int, int], ...] = (
        {extent: 4 * (number + 1) for number, extent in enumerate(extents)},  # any will do
        {extent: 8 * (number + 1) for number, extent in enumerate(large)} | batch,  # small ones are in the arguments
        {extent: extent // unit * 8 for extent in large} | batch,  # large ones depend on each other
        batch,
    )
    tried: list[list[tuple[int, ...]]] = []
    for sizes in ways:
        shapes = [tuple(sizes.get(extent, extent) for extent in kind.shape) for kind in kinds]
        if shapes in tried:
            continue
        tried.append(shapes)
        if sum(torch.Size(shape).numel() for shape in shapes) > MAX_TRIAL_ELEMENTS:
            continue
        small = [TensorType(shape, kind.dtype) for shape, kind in zip(shapes, kinds)]
        high = max(2, min((extent for shape in shapes for extent in shape if extent > 1), default=2) // 2)
        for wide in (True, False):
            draws = Draw(0, wide), Draw(1, wide, high=high), Draw(2, wide, scale=1e3)
            try:
                run = partial(call.run, sizes)
                trials = [Trial(run, random_operands(small, draw), draw.seed) for draw in draws]
            except Exception:  # the op, on tensors that it was not made for
                continue
            if all(trial.repeats() for trial in trials):
                yield trials


def _fits(call: _Call, kinds: tuple[TensorType, ...], outputs: tuple[TensorType, ...], split: Split) -> bool:
    """True if halves of the model's own operands give halves of its own outputs."""
    halves = [
        tuple(extent // 2 if value.is_shard and value.dim == dim else extent for dim, extent in enumerate(kind.shape))
        for sides, tensors in ((split.inputs, kinds), (split.outputs, outputs))
        for (value, _), kind in zip(sides, tensors, strict=True)
    ]
    given = [torch.empty(shape, dtype=kind.dtype, device="meta") for shape, kind in zip(halves, kinds)]
    try:
        return [tuple(x.shape) for x in call.run({}, *given)] == halves[len(kinds) :]
    except Exception:  # no shape function, or not for such shapes
        return False


assert max(TRIAL_PARTS) == 4, "trial extents are multiples of 4"
