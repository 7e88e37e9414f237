"""A local program with its recomputed layers in one piece each: ``repeat.Repeated`` modules, called by its graph.

A *segment* is a set of nodes: a layer, with the conversions that are repeated with it. Nodes of no segment stay as they
are, so a program without recomputed layers stays the same. Nodes between those of a segment that do not depend on it,
such as conversions of tensors from earlier layers, run before it; where they do depend on it, the segment falls apart:
into those nodes that run before them, and the rest. So do two segments of which each needs the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from .layers import Layering
from .plan import Chunk
from .program import Segment
from .recompute import Recompute
from .repeat import Repeated
from .reshard import FREE, run_steps

__all__ = ["repeating", "segments_of"]


def segments_of(graph: torch.fx.Graph, chunk: Chunk, layering: Layering, recompute: Recompute) -> list[Segment]:
    """The layers of a chunk that the backward runs again, as nodes of its local ``graph``: their ops, outputs of
    several taken apart, and the conversions that are repeated with them. Of a layer that is not recomputed only the
    gathers of weights are repeated, and what is made of these alone."""
    found = []
    gathers = [node for node in graph.nodes if "layer" in node.meta]
    gathering, whole = {node.meta["layer"] for node in gathers}, _made_of(gathers, graph)
    modes = chunk.recompute or ("none",) * (chunk.layers[1] - chunk.layers[0])
    for layer, mode in zip(range(*chunk.layers), modes, strict=True):
        ops = set(layering.layers[layer].ops)
        if mode == "none" and layer not in gathering:
            continue
        members: set[str] = set()
        for node in graph.nodes:
            mine = node.name in ops or node.meta.get("layer") == layer
            if mine or (node.op == "call_function" and _goes_with(node, members, ops, recompute, mode)):
                members.add(node.name)
        if members:
            heavy = members - whole if mode == "none" else members & recompute.heavy
            found.append(Segment(frozenset(members), frozenset(heavy)))
    return found


def _made_of(gathers: Collection[Node], graph: torch.fx.Graph) -> set[str]:
    """Names of the nodes that gather weights, and of those made of such weights alone."""
    found = set(gathers)
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return {node.name for node in found}


def _goes_with(node: Node, members: Collection[str], ops: Collection[str], recompute: Recompute, mode: str) -> bool:
    """Whether a node that is no op of the model is repeated with the layer: it takes a member apart, or converts one
    again. Slices of what crosses a border are taken again where the layer itself reads them: the alternative is to run
    it in two parts."""
    maker = node.args[0] if node.args else None
    if not isinstance(maker, Node) or maker.name not in members:
        return False
    if node.target is not run_steps:
        return node.target is operator.getitem
    if mode == "none":
        return True
    steps: Any = node.args[1]
    sends = any(step[0] not in FREE for step in steps)
    return recompute.converts_again(maker.name) or (not sends and any(user.name in ops for user in node.users))


# ---- a graph with its segments in one piece each


@dataclass
class _Unit:
    """Nodes that run together, in order; what they read from outside and what others read of them."""

    nodes: list[Node]
    segment: Segment | None
    inputs: list[Node]
    outputs: list[Node]


def repeating(module: torch.fx.GraphModule, segments: Sequence[Segment]) -> torch.fx.GraphModule:
    """``module`` with each segment in one call; itself where there are none. Segments are known by names alone: its
    nodes may call other functions than those that were lowered."""
    if not segments:
        return module
    graph = module.graph
    root, out = torch.nn.Module(), torch.fx.Graph()
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            new[node] = out.node_copy(node)
    for unit in _units(graph, segments):
        if unit.segment is None:
            new[unit.nodes[0]] = out.node_copy(unit.nodes[0], new.__getitem__)
            continue
        name = f"repeated_{len(list(root.children()))}"
        root.add_module(name, _repeated(unit, unit.segment.heavy))
        call = out.call_module(name, tuple(new[node] for node in unit.inputs))
        for index, node in enumerate(unit.outputs):
            new[node] = out.create_node("call_function", operator.getitem, (call, index), name=node.name)
    result = next(node for node in graph.nodes if node.op == "output")
    out.output(torch.fx.map_arg(result.args[0], new.__getitem__))
    return torch.fx.GraphModule(root, out)


def _repeated(unit: _Unit, heavy: Collection[str]) -> Repeated:
    body, dear, kept = torch.fx.Graph(), list[Callable[..., Any]](), set[int]()
    run = body.placeholder("run")
    new = {node: body.placeholder(node.name) for node in unit.inputs}
    for node in unit.nodes:
        if node.name not in heavy or node.target is operator.getitem:
            new[node] = body.node_copy(node, new.__getitem__)
            continue
        args = torch.fx.map_arg(node.args, new.__getitem__)
        kwargs = torch.fx.map_arg(node.kwargs, new.__getitem__)
        assert callable(node.target)
        new[node] = body.create_node("call_method", "dear", (run, len(dear), *args), kwargs, name=node.name)
        if _read_again(node, unit, heavy):
            kept.add(len(dear))
        dear.append(node.target)
    body.output(tuple(new[node] for node in unit.outputs))
    return Repeated(torch.fx.GraphModule(torch.nn.Module(), body), dear, kept)


def _read_again(node: Node, unit: _Unit, heavy: Collection[str]) -> bool:
    """Whether an op that is repeated reads what this one makes."""
    for user in node.users:
        if user in unit.nodes and (
            _read_again(user, unit, heavy) if user.target is operator.getitem else user.name not in heavy
        ):
            return True
    return False


def _units(graph: torch.fx.Graph, segments: Sequence[Segment]) -> list[_Unit]:
    """Every node once, alone or in its part of a segment, after all that it reads."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    of = {name: segment for segment in segments for name in segment.nodes}
    parts = _parts(calls, of)
    home = {node: part for part in parts for node in part}
    units: list[_Unit] = []
    placed: set[Node] = set()

    def visit(node: Node) -> None:
        if node in placed or node.op != "call_function":
            return
        nodes = home[node]
        mine = set(nodes)
        inputs = list(dict.fromkeys(o for node in nodes for o in node.all_input_nodes if o not in mine))
        placed.update(mine)
        for operand in inputs:
            visit(operand)
        outputs = [node for node in nodes if any(user not in mine for user in node.users)]
        units.append(_Unit(nodes, of.get(node.name), inputs, outputs))

    for node in calls:
        visit(node)
    return units


def _parts(calls: Sequence[Node], of: Mapping[str, Segment]) -> list[list[Node]]:
    """The nodes of each segment in as few parts as can run one after the other, the others by themselves. A node joins
    the first part of its segment for which none of what it reads has to wait; segments may wait for parts of each
    other."""
    parts: list[list[Node]] = []
    waits: list[int] = []  # of each part, a bit for every part that runs before it
    begun: dict[int, list[int]] = {}  # the parts of each segment
    home: dict[Node, int] = {}
    for node in calls:
        read = {home[operand] for operand in node.all_input_nodes if operand in home}
        mine = begun.setdefault(id(of[node.name]), []) if node.name in of else []
        part = next((k for k in mine if all(k == other or not waits[other] >> k & 1 for other in read)), len(parts))
        if part == len(parts):
            parts.append([])
            waits.append(0)
            mine.append(part)
        home[node] = part
        parts[part].append(node)
        before = waits[part]
        for other in read - {part}:
            waits[part] |= 1 << other | waits[other]
        if waits[part] != before and len(parts[part]) > 1:
            for other, bits in enumerate(waits):
                if bits >> part & 1:
                    waits[other] = bits | waits[part]
    return parts
