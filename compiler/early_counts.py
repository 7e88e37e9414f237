"""Counts of targets, summed over devices while the model runs.

A mean over targets that are not ignored is a quotient of two sums over the parts of a batch. The loss needs logits; the
count needs targets alone, which are there from the beginning. In a local program::

    count  = start_count(target)      at its front: the sum starts
    …                                 the model
    total  = cross_entropy(logits, target)[0]
    loss   = total / arrived(count)

So no device waits in its forward for the slowest one, and the quotient is an addend of the loss (``loss_sum``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.fx
from torch import Tensor
from torch.fx import Node

from . import local_ops
from .context import Arrival, current
from .graph import op_name, output_of
from .reshard import Step, run_steps

__all__ = ["arrived", "counted_by", "early_count", "start_count"]


def start_count(target: Tensor, ignore_index: int, axes: Sequence[int]) -> Arrival:
    """``local_ops.target_count``, its sum over mesh axes on its way."""
    return current().comm.start_sum(local_ops.target_count(target, ignore_index), axes)


def arrived(count: Arrival) -> Tensor:
    """It: 0-d."""
    return count.wait()


def counted_by(node: Node) -> Node | None:
    """The cross entropy whose count a tensor of the model's graph is, if it is one."""
    loss, index = output_of(node)
    return loss if index == 1 and op_name(loss) == "meshwright.cross_entropy" else None


def early_count(graph: torch.fx.Graph, loss: Node, steps: Sequence[Step]) -> Node:
    """In place of these conversions of the count of ``loss``, an op of a local program: what has its sum. It starts in
    front of all ops, or behind the last one that makes the targets."""
    _, target, ignore_index = loss.args[:3]
    assert isinstance(target, Node)
    assert all(step.kind == "all_reduce" for step in steps), steps
    axes = tuple(step.axis for step in steps)
    with graph.inserting_after(_brought_forward(graph, target)):
        started = graph.call_function(start_count, (target, ignore_index, axes))
    started.meta.update(tensor=target.meta["tensor"])
    return graph.call_function(arrived, (started,))


def _brought_forward(graph: torch.fx.Graph, target: Node) -> Node:
    """The last placeholder or, where targets are made of inputs without others' help, the last op that makes them, all
    of which are moved there."""
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    makers: dict[Node, None] = {}
    waiting = [target]
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            continue
        if not isinstance(node.target, torch._ops.OpOverload) and node.target not in (run_steps, operator.getitem):
            return target
        makers.setdefault(node)
        waiting += node.all_input_nodes
    for node in [node for node in graph.nodes if node in makers]:
        last.append(node)
        last = node
    return last
