"""The model on one device, with a tensor for everything that a plan's local programs hold.

The graph's own ops run on whole tensors. Where a program reshards a tensor, or a chunk receives it, an alias stands in
for the copy: so the gradient that reaches this copy alone, which is what the devices have there, can be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx import Node

from ..ir.comm import Context, use_context
from ..ir.graph import Graph, output_of, tensor_operands
from ..ir.ops.local_ops import of_any_strides
from .chunk_programs import PlacedChunk
from .lockstep import LockstepComm, LockstepGroup
from .split_execution import doubled

__all__ = ["Key", "SingleDevice", "WholeRun", "distinct"]

Key = tuple[int, str]  # (index of a part, name of a node in its program)


@dataclass
class WholeRun:
    """All tensors and gradients of one microbatch, keyed by their place in the parts."""

    loss: Tensor
    values: dict[Key, Tensor]
    #: None: no gradient reaches the tensor
    gradients: dict[Key, Tensor | None]
    #: the gradient of each weight
    weights: dict[str, Tensor | None]
    largest_gradient: float = 0.0
    #: the largest magnitude of a tensor and of its operands
    sizes: dict[Key, float] = field(default_factory=dict)


class SingleDevice:
    """Runs microbatch after microbatch. ``buffers`` get new values as the model writes them."""

    def __init__(
        self, graph: Graph, parts: Sequence[PlacedChunk], weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor],
        constants: Mapping[str, Tensor], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.graph, self.parts, self.dtype = graph, parts, dtype
        self.nodes = graph.by_name()
        self.weights, self.buffers, self.constants = weights, dict(buffers), constants

    def run(self, inputs: Mapping[str, Tensor], context: tuple[int, int, int], scale: float) -> WholeRun:
        """One microbatch under (seed, step, microbatch); the gradients are those of ``scale`` times its loss."""
        seed, step, microbatch = context
        with use_context(Context(LockstepComm(LockstepGroup(()), 0), seed, step, microbatch)), torch.enable_grad():
            return self._run(inputs, scale)

    def _run(self, inputs: Mapping[str, Tensor], scale: float) -> WholeRun:
        trained = {n.meta["source"].name: n.meta["source"].requires_grad for n in self.graph.placeholders("parameter")}
        leaves = {name: x.clone().requires_grad_(trained[name]) for name, x in self.weights.items()}
        at: dict[Key, Any] = {}
        first_copies: dict[tuple[int, str], Any] = {}  # (part, tensor) → as the part has it first
        loss: Tensor | None = None
        written: dict[str, Tensor] = {}
        for part in self.parts:
            for slot, node in zip(part.program.slots, part.nodes):
                at[part.index, node.name] = self._slot(part, slot.kind, slot.name, slot.node, inputs, leaves, at)
                first_copies[part.index, slot.node] = at[part.index, node.name]
            for node in part.nodes[len(part.program.slots) :]:
                at[part.index, node.name] = self._node(part.index, node, at, first_copies)
            for exit, node in zip(part.program.exits, part.results, strict=True):
                if exit.kind == "loss":
                    loss = at[part.index, node.name]
                elif exit.kind == "buffer":
                    written[exit.name] = first_copies[part.index, exit.node].detach()
        self.buffers.update(written)
        assert loss is not None, "the graph has no loss"
        values = {key: x for key, x in at.items() if isinstance(x, Tensor)}
        return self._gradients(loss, values, leaves, scale)

    def _slot(
        self, part: PlacedChunk, kind: str, name: str, node: str, inputs: Mapping[str, Tensor],
        leaves: Mapping[str, Tensor], at: Mapping[Key, Any],
    ) -> Tensor:  # fmt: skip
        if kind == "receive":
            sender = self.parts[part.origins[name]]
            exits = zip(sender.program.exits, sender.results, strict=True)
            source = next(made for exit, made in exits if exit.kind == "send" and exit.name == name)
            x: Tensor = at[sender.index, source.name]
        else:
            x = {"input": inputs, "parameter": leaves, "buffer": self.buffers, "constant": self.constants}[kind][name]
        return x.view_as(x)

    def _node(self, part: int, node: Node, at: Mapping[Key, Any], made: dict[tuple[int, str], Any]) -> Any:
        name = node.meta["tensor"]
        if (part, name) in made:  # a reshard: another copy of what there is
            source = node.args[0]  # which may be a copy itself, as a gathered weight is
            if isinstance(source, Node) and source.meta["tensor"] == name:
                x = at[part, source.name]
            else:
                x = made[part, name]
            return x.view_as(x)
        op = self.nodes[name]
        producer, index = output_of(op)
        if producer is not op:
            made[part, name] = made[part, producer.name][index]
            return made[part, name]
        given = []
        for operand, local in zip(tensor_operands(op), node.meta["operands"], strict=True):
            assert local.meta["tensor"] == operand.name, f"{name} reads {operand.name}, not {local.meta['tensor']}"
            given.append(at[part, local.name])
        queue = iter(given)
        args, kwargs = torch.fx.map_arg((op.args, dict(op.kwargs)), lambda _: next(queue))
        target = of_any_strides(op.target)
        try:
            result = target(*doubled(args, self.dtype), **doubled(kwargs, self.dtype))
        except RuntimeError as error:
            if self.dtype != torch.float64 or "double" not in str(error).lower():
                raise
            why = str(error).partition("\n")[0]
            raise ValueError(f"{name} does not run in float64 ({why}); check with dtype float32") from error
        made[part, name] = distinct(result, given)
        return made[part, name]

    def _gradients(
        self, loss: Tensor, values: dict[Key, Tensor], leaves: Mapping[str, Tensor], scale: float
    ) -> WholeRun:
        tracked: dict[Any, Tensor] = {key: x for key, x in values.items() if x.requires_grad}
        tracked.update({name: leaf for name, leaf in leaves.items() if leaf.requires_grad})
        gradients: dict[Any, Tensor | None] = {}
        if tracked and loss.requires_grad:
            seeds = torch.full_like(loss, scale, requires_grad=False)
            grads = torch.autograd.grad(loss, list(tracked.values()), seeds, allow_unused=True)
            gradients = dict(zip(tracked, grads, strict=True))
        run = WholeRun(
            loss.detach(),
            {key: x.detach() for key, x in values.items()},
            {key: gradients.get(key) for key in values},
            {name: gradients.get(name) for name in leaves},
        )
        run.largest_gradient = max((_size(x) for x in run.gradients.values() if x is not None), default=0.0)
        for part in self.parts:
            for node in part.nodes:
                own = [node] if (part.index, node.name) in values else []
                keys = [(part.index, n.name) for n in (*own, *node.all_input_nodes)]
                run.sizes[part.index, node.name] = max(
                    (_size(values[key]) for key in keys if key in values), default=0.0
                )
        return run


def distinct(result: Any, given: Sequence[Any]) -> Any:
    """The result, as tensors of their own: an op that returns its argument gets an alias of it."""
    if isinstance(result, Tensor):
        return result.view_as(result) if any(result is x for x in given) else result
    return tuple(distinct(x, given) for x in result) if isinstance(result, (tuple, list)) else result


def _size(x: Tensor) -> float:
    """The largest magnitude, masks of huge or infinite values aside."""
    if not (x.is_floating_point() or x.is_complex()) or not x.numel():
        return 0.0
    size = x.detach().abs()
    return float(size.masked_fill(~(size < 1e30), 0).max())
