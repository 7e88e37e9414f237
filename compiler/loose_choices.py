"""What a search may offer where mesh axes are to be loose (``loose``): nothing that sends anything over them but
gradients of parameters and the numbers that a loss is made of.

    parameters      whole, with their gradients as addends; buffers whole
    ops             no messages of their own over these axes
    conversions     slices and pads, and all-reduces of single numbers
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import Node

from .graph import TensorType
from .reshard import FREE, steps_between
from .rules import MeshChoice
from .spec import Pair

__all__ = ["LOSS_NUMBERS", "converts_over", "lies_loosely", "sends_over"]

LOSS_NUMBERS = 1  # in a message: the loss itself, or the count behind a mean


def lies_loosely(pair: Pair, axes: Sequence[int], trained: bool) -> bool:
    """Whether a parameter or buffer may lie so. trained: whether a gradient reaches it."""
    return all(
        not (pair.value[axis].is_shard or pair.value[axis].is_partial)
        and (pair.cotangent[axis].is_partial or not trained)
        for axis in axes
    )


def sends_over(node: Node, choice: MeshChoice, axes: Sequence[int], needs_grad: Collection[str]) -> bool:
    """Whether an op itself sends something over one of the axes."""
    return any(axis in axes and message.is_sent(node, needs_grad) for axis, message in choice.internal)


def converts_over(source: Pair, target: Pair, kind: TensorType, grad: bool, axis: int) -> bool:
    """Whether a conversion sends over the axis, forth or back, more than a loss is made of. False where there is
    none."""
    ways = [(source.value, target.value)]
    if grad and kind.is_float:
        ways.append((target.cotangent, source.cotangent))
    for one, other in ways:
        try:
            steps = steps_between(one, other)
        except ValueError:
            return False
        for step in steps:
            silent = step.kind in FREE and step.kind != "mask"  # a mask leaves to the first replica what all add
            number = step.kind == "all_reduce" and kind.numel <= LOSS_NUMBERS
            if step.axis == axis and not silent and not number:
                return True
    return False
