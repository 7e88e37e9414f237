"""The lowered program of one virtual stage (chunk): a local fx module with its calling convention. Every device of the
stage runs the same one.

``module(*slots) -> tuple(exits)``. The module is differentiable by eager autograd: reshards and communicating ops carry
their own conjugates. It reads its coordinates and collectives from ``comm.current_context()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.fx

from .graph import TensorType
from .spec import Pair

__all__ = ["ChunkProgram", "Exit", "Segment", "Slot", "made_of"]


@dataclass(frozen=True)
class Slot:
    """One argument of the module.

    kind: "parameter", "buffer", "constant", "input" or "receive"; name: the qualified name, the input's source name, or
    the node's name; pair: value and cotangent placement on the stage's mesh; type: global type at the microbatch's
    extent; batch_dim: of inputs.
    """

    kind: str
    name: str
    node: str
    pair: Pair
    type: TensorType
    batch_dim: int | None = None
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False


@dataclass(frozen=True)
class Exit:
    """One result of the module.

    kind: "send" (name: the node's, leaves for later stages in spec ``pair.value``, its cotangent comes back in
    ``pair.cotangent``), "loss" (0-d; on axes where ``pair.value`` is P this device's addend, to be summed once per
    step; seed its cotangent on every device), "output" (name: flat index) or "buffer" (name: the buffer's; already in
    the buffer's own spec).
    """

    kind: str
    name: str
    node: str
    pair: Pair
    type: TensorType


@dataclass(frozen=True)
class Segment:
    """A recompute segment: nodes that the backward runs again, except the ``heavy`` ones, whose results are saved."""

    nodes: frozenset[str]
    heavy: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ChunkProgram:
    """The program of one chunk of a plan, by ``lower``; its ``segments`` are recomputed (``segments.repeating``)."""

    graph: torch.fx.Graph
    slots: tuple[Slot, ...]
    exits: tuple[Exit, ...]
    mesh_shape: tuple[int, ...]
    #: "forward all_reduce", "backward all_gather", … → count per microbatch
    collectives: Mapping[str, int]
    constants: Mapping[str, torch.Tensor]
    segments: tuple[Segment, ...] = ()

    @cached_property
    def module(self) -> torch.fx.GraphModule:
        """The program to be run, on one tensor per slot. It is written as Python when first asked for."""
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)

    def move_to(self, device: torch.device) -> None:
        """Let the ops that have no operands make their tensors on ``device``; the graph names the CPU, for which models
        are captured."""
        for node in self.graph.nodes:
            if node.op == "call_function" and not node.all_input_nodes and _takes_device(node):
                node.kwargs = {**node.kwargs, "device": device}
        vars(self).pop("module", None)


def _takes_device(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return "device" in node.kwargs or (schema is not None and any(a.name == "device" for a in schema.arguments))


def made_of(sources: Iterable[torch.fx.Node], graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The sources, and the nodes that are made of these alone."""
    derived = set(sources)
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and derived.issuperset(node.all_input_nodes):
            derived.add(node)
    return derived
