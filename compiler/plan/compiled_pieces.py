"""Pieces of a local program for ``torch.compile``: runs of ops between those that have to run by themselves.

An op runs by itself if it talks to other devices, if its shape depends on data, if it belongs to no layer (it is made
of no activations), or if its function is not known here. A *piece* has ops of one layer, or of the few that make a
block of the model (``units``), which are all repeated by the backward or all not (``segments``). It is one node of the
program and one of autograd, so gradients of a layer come when the backward is through with it, and what stands between
pieces runs as before.

    phase(input) = -1
    phase(n)     = max over operands o of phase(o) + [n is in a piece, and o in none or in one of another kind]

(kind: unit, segment, whether a repetition leaves it out; a phase in a piece is at least 0.) Ops of one kind and one
phase are a piece: from piece to piece the phase grows, whatever lies between, so no two wait for each other. An op that
depends on inputs alone goes to the phase of those that read it, if these are of its kind.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from ..ir.ops import local_ops
from ..ir.ops.local_ops import dropout_ticket, plain_cross_entropy, ticketed_dropout
from ..ir.program import Segment, made_of
from ..rules.common import argument, parameters

__all__ = ["MakePiece", "in_pieces", "units"]

MakePiece = Callable[[torch.fx.Graph], Callable[..., tuple[Any, ...]]]
"""A maker of functions: a graph of plain ops → a function from tensors to a tuple, which autograd can differentiate."""

_Kind = tuple[int, bool, int]  # (segment or -1, whether a repetition leaves it out, unit)

_FEWEST = 2  # ops that compute; fewer are not worth a call
_FREE = frozenset({"reshape", "contiguous", "flatten", "unflatten", "chunk", "getitem"})  # and views
_TAGS = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
_LOCAL: Mapping[Any, Any] = {
    local_ops.cross_entropy: plain_cross_entropy,
    local_ops.batch_norm: local_ops.batch_norm,
    local_ops.embedding_bag: local_ops.embedding_bag,
    local_ops.embedding_shard: local_ops.embedding_shard,
}
"""Functions of ours that a compiler can take where no mesh axis cuts them, and in which form"""


@dataclass(eq=False)
class _Piece:
    nodes: list[Node]
    segment: int
    heavy: bool


def in_pieces(
    module: torch.fx.GraphModule,
    segments: Sequence[Segment],
    unit_of: Mapping[str, int],
    apart: Collection[int],
    make: MakePiece,
) -> tuple[torch.fx.GraphModule, tuple[Segment, ...]]:
    """The program with its pieces made callable by ``make``, and the segments of the new nodes.

    unit_of: of the model's ops (``units``). apart: positions of inputs; what is made of these alone stays out of
    pieces, because its backward runs at another time.
    """
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    pieces = _pieces(graph, segments, unit_of, made_of([inputs[position] for position in apart], graph))
    if not pieces:
        return module, tuple(segments)
    return _Rewriting(graph, segments, pieces, make).run()


# ---- which ops run together


def units(classes: Sequence[str]) -> list[int]:
    """Per layer, given its class, the number of its *unit*: a sequence of layers that others repeat (attention, then
    MLP), so that it is compiled once, too; any other layer is one by itself."""
    found: list[int] = []
    while (at := len(found)) < len(classes):
        length, times = 1, 1
        for one in range(1, (len(classes) - at) // 2 + 1):
            first, again = classes[at : at + one], 1
            while classes[at + again * one : at + (again + 1) * one] == first:
                again += 1
            if again > 1 and again * one > length * times:
                length, times = one, again
        number = found[-1] + 1 if found else 0
        found += [number + k // length for k in range(length * times)]
    return found


def _pieces(
    graph: torch.fx.Graph, segments: Sequence[Segment], unit_of: Mapping[str, int], apart: Collection[Node]
) -> list[_Piece]:
    kinds = _kinds(graph, segments, unit_of, apart)
    phase = _phases(graph, kinds)
    groups: dict[tuple[_Kind, int], _Piece] = {}
    for node in graph.nodes:
        if node in kinds:
            segment, heavy, _ = kind = kinds[node]
            groups.setdefault((kind, phase[node]), _Piece([], segment, heavy)).nodes.append(node)
    return [piece for piece in groups.values() if sum(map(_computes, piece.nodes)) >= _FEWEST]


def _kinds(
    graph: torch.fx.Graph, segments: Sequence[Segment], unit_of: Mapping[str, int], apart: Collection[Node]
) -> dict[Node, _Kind]:
    home = {name: index for index, segment in enumerate(segments) for name in segment.nodes}
    kinds: dict[Node, _Kind] = {}
    for node in graph.nodes:
        if node in apart or not _compiles(node):
            continue
        if node.target is operator.getitem:
            if node.args[0] in kinds:  # what takes an op's outputs apart goes with it
                kinds[node] = kinds[node.args[0]]
        elif node.name in unit_of:
            at = home.get(node.name, -1)
            kinds[node] = at, at >= 0 and node.name in segments[at].heavy, unit_of[node.name]
    return kinds


def _phases(graph: torch.fx.Graph, kinds: Mapping[Node, _Kind]) -> dict[Node, int]:
    phase: dict[Node, int] = {}
    early: set[Node] = set()  # in a piece, but made of inputs alone
    for node in graph.nodes:
        operands, kind = node.all_input_nodes, kinds.get(node)
        if kind is None:
            phase[node] = max((phase[o] for o in operands), default=-1)
            continue
        phase[node] = max((phase[o] + (kinds.get(o) != kind) for o in operands), default=0)
        if all(o.op == "placeholder" or o in early for o in operands):
            early.add(node)
    for node in reversed(graph.nodes):
        if node in early and node.users and all(kinds.get(user) == kinds[node] for user in node.users):
            phase[node] = min(phase[user] for user in node.users)
    return phase


def _compiles(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        op = node.target
        plain = op.namespace == "aten" and not op._schema.is_mutable and not _TAGS.intersection(op.tags)
        return plain and not _may_draw(node)
    if node.target is local_ops.dropout or node.target is operator.getitem:
        return True
    cut = any(value for name, value in node.kwargs.items() if name.endswith("_axes"))
    return node.target in _LOCAL and not cut


def _may_draw(node: Node) -> bool:
    """True if an op may draw random numbers: all that are tagged so, except an attention without dropout."""
    if torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    return "dropout_p" not in parameters(node) or bool(argument(node, "dropout_p"))


def _computes(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem
    schema = node.target._schema
    is_view = any(value.alias_info is not None for value in schema.returns)
    return not is_view and schema.name.removeprefix("aten::") not in _FREE


# ---- the new program


def _dropout_arguments(x: Any, p: Any, op_index: Any, cuts: Any = ()) -> tuple[Node, float, int, local_ops.Cuts]:
    """The arguments of a call of ``local_ops.dropout``, by its signature."""
    return x, p, op_index, cuts


class _Rewriting:
    def __init__(
        self, graph: torch.fx.Graph, segments: Sequence[Segment], pieces: Sequence[_Piece], make: MakePiece
    ) -> None:
        self.graph, self.segments, self.make = graph, segments, make
        self.home = {node: piece for piece in pieces for node in piece.nodes}
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.out, self.new = torch.fx.Graph(), dict[Node, Node]()
        gone = {node.name for node in self.home}
        self.nodes = [set(segment.nodes - gone) for segment in segments]
        self.heavy = [set(segment.heavy - gone) for segment in segments]

    def run(self) -> tuple[torch.fx.GraphModule, tuple[Segment, ...]]:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.new[node] = self.out.node_copy(node)
        for node in self.graph.nodes:
            # what reads nothing but inputs would draw its whole piece forward
            if node not in self.home or any(o.op != "placeholder" for o in node.all_input_nodes):
                self._place(node)
        segments = tuple(Segment(frozenset(n), frozenset(h)) for n, h in zip(self.nodes, self.heavy, strict=True))
        return torch.fx.GraphModule(torch.nn.Module(), self.out), segments

    def _place(self, node: Node) -> None:
        """Emit a node, or its piece, after all that it reads."""
        if node in self.new:
            return
        piece = self.home.get(node)
        nodes = [node] if piece is None else piece.nodes
        members = set(nodes)
        inputs = list(dict.fromkeys(o for n in nodes for o in n.all_input_nodes if o not in members))
        for operand in inputs:
            self._place(operand)
        if piece is None:
            self.new[node] = self.out.node_copy(node, self.new.__getitem__)
        else:
            self._call(piece, inputs)

    def _call(self, piece: _Piece, inputs: Sequence[Node]) -> None:
        body, members = torch.fx.Graph(), set(piece.nodes)
        given = [self.new[node] for node in inputs]
        inner = {node: body.placeholder(f"x{index}") for index, node in enumerate(inputs)}
        for node in piece.nodes:
            target: Any = _LOCAL.get(node.target, node.target)
            if target is local_ops.dropout:
                x, p, op_index, cuts = _dropout_arguments(*node.args, **node.kwargs)
                given.append(self.out.call_function(dropout_ticket, (op_index, cuts)))
                ticket = body.placeholder(f"x{len(given) - 1}")
                dims = tuple(dict.fromkeys(dim for _, dim in cuts))
                inner[node] = body.call_function(ticketed_dropout, (inner[x], ticket, p, dims))
                continue
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), inner.__getitem__)
            inner[node] = body.call_function(target, args, dict(kwargs))
        outputs = [node for node in piece.nodes if any(user not in members for user in node.users)]
        body.output(tuple(inner[node] for node in outputs))
        call = self.out.create_node("call_function", self.make(body), tuple(given), name=f"piece_{len(self.new)}")
        names = {call.name}
        for index, node in enumerate(outputs):
            got = self.out.create_node("call_function", operator.getitem, (call, index), name=node.name)
            got.meta, self.new[node] = node.meta, got
            names.add(got.name)
        for node in piece.nodes:
            self.new.setdefault(node, call)
        if piece.segment >= 0:
            self.nodes[piece.segment] |= names
            if piece.heavy:
                self.heavy[piece.segment].add(call.name)
