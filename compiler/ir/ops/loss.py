"""Distributed losses: early sums of target counts, and losses that are summed over devices once per step.

A mean over targets that are not ignored is a quotient of two sums over the parts of a batch. The loss needs logits; the
count needs targets alone, which are known from the beginning. In a local program::

    count  = start_count(target)      at its front: the sum starts
    …                                 the model
    total  = cross_entropy(logits, target)[0]
    loss   = total / arrived(count)

So no device waits in its forward for the slowest one, and the quotient is an addend of the loss.

If each device has an addend (P) of the loss and nothing else reads it, a program returns this device's addend. Its
gradient is that of the sum, since every addend gets the loss's whole cotangent (P|R). Sums commute with the mean over
microbatches, so the runtime adds up the addends of a step and sums them over the mesh axes once, at its end. A mean
over a count that is known only from the data is an addend divided by that count, which is summed in every microbatch,
early (``early_count``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.fx
from torch import Tensor
from torch.fx import Node

from ..comm import Arrival, current_context
from ..graph import Graph, op_name, output_of
from ..reshard import ReshardStep, run_steps
from ..spec import P, Pair, R
from . import local_ops

__all__ = [
    "DEFERRED_SUM_FACTOR",
    "counting_loss",
    "deferrable_losses",
    "early_count",
    "exit_pair",
    "start_count",
    "wait_count",
]


def start_count(target: Tensor, ignore_index: int, axes: Sequence[int]) -> Arrival:
    """Count the targets of this device and start the sum of the counts over mesh axes."""
    return current_context().comm.start_sum(local_ops.target_count(target, ignore_index), axes)


def wait_count(count: Arrival) -> Tensor:
    """Wait for the sum of the counts, a 0-d tensor."""
    return count.wait()


def counting_loss(node: Node) -> Node | None:
    """The cross entropy of which this tensor of the model's graph is the count; None if it is no count."""
    loss, index = output_of(node)
    return loss if index == 1 and op_name(loss) == "meshwright.cross_entropy" else None


def early_count(graph: torch.fx.Graph, loss: Node, steps: Sequence[ReshardStep]) -> Node:
    """Replace these conversions of the count of ``loss``, an op of a local program, by an early sum; returns its node.

    The sum starts before all ops, or after the last op that makes the targets.
    """
    _, target, ignore_index = loss.args[:3]
    assert isinstance(target, Node)
    assert all(step.kind == "all_reduce" for step in steps), steps
    axes = tuple(step.axis for step in steps)
    with graph.inserting_after(_hoist_target(graph, target)):
        started = graph.call_function(start_count, (target, ignore_index, axes))
    started.meta.update(tensor=target.meta["tensor"])
    return graph.call_function(wait_count, (started,))


def _hoist_target(graph: torch.fx.Graph, target: Node) -> Node:
    """Move the ops that make ``target`` from inputs alone to the front of the program; returns the node behind which
    the target is known. A target that needs ops of this package stays where it is."""
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


DEFERRED_SUM_FACTOR = (
    1 - 1e-6
)  # to the search: of two sums that cost the same, the one that nobody waits for in a forward is better


def deferrable_losses(graph: Graph) -> frozenset[str]:
    """The losses whose sum over devices can wait for the end of the step: no op and no other result reads them."""
    nodes, kinds = graph.by_name(), dict[str, list[str]]()
    for result in graph.results:
        kinds.setdefault(result.node, []).append(result.kind)
    alone = (name for name, result_kinds in kinds.items() if result_kinds == ["loss"])
    return frozenset(name for name in alone if all(user.op == "output" for user in nodes[name].users))


def exit_pair(pair: Pair) -> Pair:
    """The pair in which a deferrable loss leaves a program that makes it in ``pair``: addends stay, all else is
    whole."""
    return Pair(tuple(P if placement == P else R for placement in pair.value), (R,) * len(pair.value))
