"""The boundaries of a plan's chunks, read off their programs: what each receives and sends, and the links between them.

A *place* is (stage, chunk), a *link* a tensor from one place to another: a transfer if their stages differ, else it
stays on its rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx

from ..ir.graph import TensorType
from ..ir.program import ChunkProgram
from ..ir.spec import Pair, Spec
from ..pipeline.families import virtual_order
from ..pipeline.schedule import Place
from .plan import Plan

__all__ = [
    "BoundaryMetadata",
    "BoundaryTransfer",
    "InputUse",
    "differentiable_links",
    "links_of",
    "metadata_of",
    "places_of",
]


@dataclass(frozen=True)
class BoundaryMetadata:
    """The facts about one chunk that other chunks must know."""

    receives: Mapping[str, tuple[Pair, TensorType]] = field(default_factory=dict)
    sends: Mapping[str, tuple[Pair, TensorType]] = field(default_factory=dict)
    #: send → (True if it depends on a trainable parameter, the receives on which it depends)
    flows: Mapping[str, tuple[bool, frozenset[str]]] = field(default_factory=dict)
    inputs: tuple[InputUse, ...] = ()
    parameters: Mapping[str, Spec] = field(default_factory=dict)
    #: buffers that the chunk reads or writes, with their specs
    buffers: Mapping[str, Spec] = field(default_factory=dict)
    #: buffers that get a new value
    written: tuple[str, ...] = ()
    outputs: Mapping[str, TensorType] = field(default_factory=dict)
    loss: TensorType | None = None


@dataclass(frozen=True)
class BoundaryTransfer:
    """A tensor that the chunk at ``source`` makes and the one at ``target`` reads."""

    node: str
    source: Place
    target: Place

    @property
    def is_local(self) -> bool:
        """True if both chunks lie on one stage; then there is no message."""
        return self.source[0] == self.target[0]


def metadata_of(program: ChunkProgram, stage: int, chunk: int = 0) -> BoundaryMetadata:
    """Read one chunk's facts off its program."""
    reach: dict[torch.fx.Node, frozenset[int]] = {}
    flows: dict[str, tuple[bool, frozenset[str]]] = {}
    slots = program.slots
    position = 0
    for node in program.graph.nodes:
        if node.op == "placeholder":
            reach[node] = frozenset([position])
            position += 1
        elif node.op != "output":
            reach[node] = frozenset().union(*(reach[n] for n in node.all_input_nodes))
        else:
            for exit, value in zip(program.exits, node.args[0], strict=True):
                if exit.kind == "send":
                    touched = [slots[index] for index in reach[value]]
                    trainable = exit.type.is_float and any(s.kind == "parameter" and s.requires_grad for s in touched)
                    through = frozenset(s.name for s in touched if s.kind == "receive" and exit.type.is_float)
                    flows[exit.name] = (trainable, through)
    return BoundaryMetadata(
        receives={slot.name: (slot.pair, slot.type) for slot in slots if slot.kind == "receive"},
        sends={exit.name: (exit.pair, exit.type) for exit in program.exits if exit.kind == "send"},
        flows=flows,
        inputs=tuple(
            InputUse(stage, index, slot.name, slot.type, slot.batch_dim, slot.pair.value, chunk)
            for index, slot in enumerate(slots)
            if slot.kind == "input"
        ),
        parameters={slot.name: slot.pair.value for slot in slots if slot.kind == "parameter"},
        buffers={
            **{exit.name: exit.pair.value for exit in program.exits if exit.kind == "buffer"},
            **{slot.name: slot.pair.value for slot in slots if slot.kind == "buffer"},
        },
        written=tuple(exit.name for exit in program.exits if exit.kind == "buffer"),
        outputs={exit.name: exit.type for exit in program.exits if exit.kind == "output"},
        loss=next((exit.type for exit in program.exits if exit.kind == "loss"), None),
    )


def places_of(plan: Plan) -> tuple[Place, ...]:
    """Every (stage, chunk) of the plan, in the order in which data flow."""
    if plan.num_chunks == 1:
        return tuple((stage, 0) for stage in range(len(plan.stages)))
    return virtual_order(plan.schedule, len(plan.stages), plan.num_chunks)


def links_of(plan: Plan, facts: Mapping[Place, BoundaryMetadata]) -> list[BoundaryTransfer]:
    """Every tensor that goes from one chunk to another, the plan's transfers in their order first; those of transfers
    that neither program needs (of an evaluation) are left out. ValueError if a chunk would wait for what nobody
    sends."""
    links = [
        BoundaryTransfer(t.node, (t.source, t.source_chunk), (t.target, t.target_chunk))
        for t in plan.transfers
        if t.node in facts[t.source, t.source_chunk].sends and t.node in facts[t.target, t.target_chunk].receives
    ]
    makers = {(place[0], node): place for place, fact in facts.items() for node in fact.sends}
    targets_reached = {(link.node, link.target) for link in links}
    for target, fact in facts.items():
        for node in fact.receives:
            if (node, target) not in targets_reached:
                if (target[0], node) not in makers:
                    raise ValueError(
                        f"every tensor that a chunk reads comes from another, but got no transfer of {node!r} to chunk "
                        f"{target[1]} of stage {target[0]}; plan again"
                    )
                links.append(BoundaryTransfer(node, makers[target[0], node], target))
    return links


def differentiable_links(
    links: Sequence[BoundaryTransfer], facts: Mapping[Place, BoundaryMetadata]
) -> set[tuple[str, Place]]:
    """(node, source) of the float tensors that a trainable parameter can reach: only those have a way back."""
    differentiable: set[tuple[str, Place]] = set()
    origin = {(link.node, link.target): link.source for link in links}
    for place, fact in facts.items():  # as data flow: links go to later places only
        for node, (trainable, through) in fact.flows.items():
            if trainable or any((name, origin[name, place]) in differentiable for name in through):
                differentiable.add((node, place))
    return differentiable


@dataclass(frozen=True)
class InputUse:
    """An input slot of some chunk: type at the microbatch's extent, spec of its value on that stage's mesh."""

    stage: int
    position: int
    name: str
    type: TensorType
    batch_dim: int | None
    spec: Spec
    chunk: int = 0
