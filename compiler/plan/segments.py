"""Activation checkpointing: each recomputed layer of a local program becomes one ``Repeated`` module of its graph.

A *segment* is a set of nodes: a layer, with the conversions that are repeated with it. Nodes of no segment stay as they
are, so a program without recomputed layers stays the same. Nodes between those of a segment that do not depend on it,
such as conversions of tensors from earlier layers, run before it; where they do depend on it, the segment falls apart:
into those nodes that run before them, and the rest. So do two segments of which each needs the other.

A part of a program that the backward runs once more, because what its ops save is not kept (Chen et al. 2016).

    forward    runs the part; what autograd would save of a *repeated* op is dropped, and its place in the order of all
               that the part saves is remembered; results of *dear* ops are kept, and of what they save only those
               operands are dropped that repeated ops made
    backward   the first who asks for something dropped has the part run again from its inputs, with the results that
               were kept in place of dear ops; everything saved on the way is taken by its place, until it is asked for

Inputs and kept results live as long as the part's own graph. The part runs again under the context of its forward, on
whatever thread autograd asks: random ops draw the same, and collectives meet those of the other devices, which run
the same program. Nothing here writes to buffers: a part returns new statistics, and only the forward's are used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from ..frontend.layers import Layering
from ..ir.comm import Context, current_context, use_context
from ..ir.program import Segment, made_of
from ..ir.reshard import LOCAL_STEPS, run_steps
from .plan import Chunk
from .recompute import Recompute

__all__ = ["Repeated", "repeating", "segments_of"]


def segments_of(graph: torch.fx.Graph, chunk: Chunk, layering: Layering, recompute: Recompute) -> list[Segment]:
    """The layers of a chunk that the backward runs again, as nodes of its local ``graph``: their ops, outputs of
    several taken apart, and the conversions that are repeated with them. Of a layer that is not recomputed only the
    gathers of weights are repeated, and what is made of these alone."""
    found = []
    gathers = [node for node in graph.nodes if "layer" in node.meta]
    gathering, whole = {node.meta["layer"] for node in gathers}, {node.name for node in made_of(gathers, graph)}
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


def _goes_with(node: Node, members: Collection[str], ops: Collection[str], recompute: Recompute, mode: str) -> bool:
    """True if a node that is no op of the model is repeated with the layer: it takes a member apart, or converts one
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
    sends = any(step[0] not in LOCAL_STEPS for step in steps)
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
    """True if an op that is repeated reads the result of this one."""
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
        members = set(nodes)
        inputs = list(dict.fromkeys(o for node in nodes for o in node.all_input_nodes if o not in members))
        placed.update(members)
        for operand in inputs:
            visit(operand)
        outputs = [node for node in nodes if any(user not in members for user in node.users)]
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


class Repeated(torch.nn.Module):
    """One part of a program: ``body(run, *inputs) -> tuple(outputs)``, in which ``run.dear(k, …)`` stands for
    ``dear[k](…)``. kept: those of them whose results repeated ops read. Without autograd it runs as it is written."""

    def __init__(self, body: torch.fx.GraphModule, dear: Sequence[Callable[..., Any]], kept: Collection[int]) -> None:
        super().__init__()
        self.body, self.ops, self.kept = body, tuple(dear), frozenset(kept)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """The part's outputs; its backward will run it again."""
        if not torch.is_grad_enabled():
            outputs: tuple[Any, ...] = self.body.forward(_Plain(self.ops), *inputs)
            return outputs
        run = _First(self.body, self.ops, self.kept, inputs, replace(current_context()))
        with saved_tensors_hooks(run.pack, run.unpack):
            outputs = self.body.forward(run, *inputs)
        return outputs


@dataclass(frozen=True)
class _Plain:
    ops: tuple[Callable[..., Any], ...]

    def dear(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.ops[index](*args, **kwargs)


@dataclass(frozen=True)
class _Operand:
    """A tensor that a dear op saves: where it lies in the storage of one of its operands."""

    place: int  # among the op's tensor operands
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, operand: torch.Tensor) -> torch.Tensor:
        """The same part of ``operand``."""
        x = operand.detach()
        if x.size() == self.size and x.stride() == self.stride and x.storage_offset() == self.offset:
            return x
        return x.as_strided(self.size, self.stride, self.offset)


@dataclass(eq=False)
class _First:
    """One run of a part in the forward, and what its backward needs to run it again."""

    body: torch.fx.GraphModule
    ops: tuple[Callable[..., Any], ...]
    read: frozenset[int]
    inputs: tuple[Any, ...]
    context: Context
    count: int = 0  # tensors that repeated ops have saved so far
    kept: dict[int, Any] = field(default_factory=dict)  # dear op → its results, without their graph
    wanted: dict[int, list[_Operand]] = field(default_factory=dict)  # dear op → repeated operands that it saves
    lasting: set[int] = field(default_factory=set)  # storages of inputs and of what dear ops make
    addresses: list[StorageWeakRef] = field(default_factory=list)  # so that no other storage gets one of these
    found: dict[Any, torch.Tensor] = field(default_factory=dict)  # of the last repetition, until asked for

    def __post_init__(self) -> None:
        self.lasting.update(x.untyped_storage()._cdata for x in _tensors(self.inputs))

    def pack(self, x: torch.Tensor) -> int:
        """Save the place of a tensor in place of the tensor."""
        self.count += 1
        return self.count - 1

    def dear(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Call an op that is not repeated, and keep its results."""
        given = {
            x.untyped_storage()._cdata: (place, x.dtype)
            for place, x in enumerate(_tensors((*args, *kwargs.values())))
            if x.untyped_storage()._cdata not in self.lasting
        }
        wanted = self.wanted[index] = []

        def pack(x: torch.Tensor) -> Any:
            place, dtype = given.get(x.untyped_storage()._cdata, (-1, x.dtype))
            if place < 0 or dtype != x.dtype:
                return x
            wanted.append(_Operand(place, x.size(), x.stride(), int(x.storage_offset())))
            return index, len(wanted) - 1

        with saved_tensors_hooks(pack, self.unpack):
            made = self.ops[index](*args, **kwargs)
        if index in self.read:
            self.kept[index] = tuple(map(_leaf, made)) if isinstance(made, tuple) else _leaf(made)
        for x in _tensors((made,)):
            self.lasting.add(x.untyped_storage()._cdata)
            self.addresses.append(StorageWeakRef(x.untyped_storage()))
        return made

    def unpack(self, key: Any) -> torch.Tensor:
        """Return the tensor that was saved there. It is kept no longer, so asking twice repeats the part twice."""
        if isinstance(key, torch.Tensor):
            return key
        if key not in self.found:
            self.found = _Again(self).run()
        return self.found.pop(key)


@dataclass(eq=False)
class _Again:
    """A repetition: collects what ``first`` dropped."""

    first: _First
    count: int = 0
    found: dict[Any, torch.Tensor] = field(default_factory=dict)

    def run(self) -> dict[Any, torch.Tensor]:
        """Everything that was dropped, by its place."""
        first = self.first
        with (
            use_context(first.context),
            first.context.repeating(),
            torch.enable_grad(),
            saved_tensors_hooks(self.pack, _never),
        ):
            first.body.forward(self, *first.inputs)
        assert self.count == first.count, f"a repeated part saved {first.count} tensors at first, now {self.count}"
        return self.found

    def pack(self, x: torch.Tensor) -> None:
        """Take it; places are counted up."""
        self.found[self.count] = x.detach()
        self.count += 1

    def dear(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Return the results of the forward; the operands of the op exist again now."""
        operands = list(_tensors((*args, *kwargs.values())))
        for number, one in enumerate(self.first.wanted[index]):
            self.found[index, number] = one.of(operands[one.place])
        return self.first.kept.get(index, _NOTHING)


def _never(_: Any) -> torch.Tensor:
    raise AssertionError("no backward runs through a repetition")


def _leaf(x: Any) -> Any:
    """The same values, differentiable or not as before, without what made them."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


class _Nothing:
    """Stands for what a dear op made, in a repetition in which no repeated op reads it."""

    def __getitem__(self, _: Any) -> _Nothing:
        return self


_NOTHING = _Nothing()


def _tensors(arguments: Sequence[Any]) -> Iterator[Any]:
    """All tensors, and what stands for tensors."""
    for x in arguments:
        if isinstance(x, torch.Tensor | _Nothing):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)
