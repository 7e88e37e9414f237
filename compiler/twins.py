"""Stages that are equal up to the names of their nodes: one is assembled and priced, the others are the same with other
names.

Two runs of layers are twins if their layers have equal classes one by one: then their ops correspond in order, and so
do the operands of these, down to floating ops, weights and inputs. A weight that both runs use keeps its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .assemble import Assembled
from .graph import Graph
from .layers import Layering
from .plan import Chunk

__all__ = ["names_between", "renamed"]


def names_between(graph: Graph, layering: Layering, first: int, other: int, num_layers: int) -> dict[str, str] | None:
    """Node → its counterpart, from layers [first, first + num_layers) to those from ``other`` on; None where some node
    has two counterparts (a weight that layers share in one run only)."""
    nodes, floating = graph.by_name(), set(layering.floating)
    names: dict[str, str] = {}
    for k in range(num_layers):
        here, there = layering.layers[first + k], layering.layers[other + k]
        if here.class_key != there.class_key:
            return None
        waiting = list(zip(here.ops, there.ops, strict=True))
        while waiting:
            mine, theirs = waiting.pop()
            if names.setdefault(mine, theirs) != theirs:
                return None
            operands = zip(nodes[mine].all_input_nodes, nodes[theirs].all_input_nodes, strict=True)
            for one, another in operands:
                if names.setdefault(one.name, another.name) != another.name:
                    return None
                if one.name in floating:
                    waiting.append((one.name, another.name))
    return names if len(set(names.values())) == len(names) else None


def renamed(part: Assembled, graph: Graph, names: Mapping[str, str], first_layer: int, first_device: int) -> Assembled:
    """The stage on other devices and layers."""
    nodes = graph.by_name()
    (chunk,) = part.stage.chunks
    sources = {
        nodes[a].meta["source"].name: nodes[b].meta["source"].name
        for a, b in names.items()
        if nodes[a].op == "placeholder"
    }
    length = chunk.layers[1] - chunk.layers[0]
    order = {node.name: index for index, node in enumerate(graph)}

    def sort(table: Mapping[str, object]) -> dict[str, object]:
        moved = {names[name]: value for name, value in table.items()}
        return {name: moved[name] for name in sorted(moved, key=order.__getitem__)}

    other: Chunk = replace(
        chunk,
        layers=(first_layer, first_layer + length),
        ops=sort(chunk.ops),  # type: ignore[arg-type]
        parameters={sources[name]: value for name, value in chunk.parameters.items()},
        sources=sort(chunk.sources),  # type: ignore[arg-type]
        receives=sort(chunk.receives),  # type: ignore[arg-type]
        sends=sort(chunk.sends),  # type: ignore[arg-type]
    )
    devices = tuple(range(first_device, first_device + len(part.stage.devices)))
    return replace(part, stage=replace(part.stage, devices=devices, chunks=(other,)))
