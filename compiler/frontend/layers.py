"""Clustering of a graph's ops into layers, between which a pipeline may be cut, and of equal layers into classes.

1. *Floating* ops (derived from inputs, constants and unchanged buffers alone: masks, positions, rotary tables) belong
   to no layer. Every stage that needs them computes them itself, so that they never cross a cut. *Static* ops are
   floating ops that do not even depend on an input.
2. All other ops are in program order. At each position some tensors are alive (made before, used after). Cuts go to the
   local minima of the bytes alive: inside a transformer block an intermediate is alive with the residual stream,
   between blocks the stream alone is.
3. Segments without a heavy op (matmul, attention, convolution, embedding, routing) join a neighbour. If there are more
   than ``max_layers``, adjacent ones are merged so that FLOPs stay balanced (Alpa, OSDI'22, section 5.2: little
   crosses, compute is even).
4. A layer's *class* is a hash of its structure up to renaming: ops, literals, types, the connections of operands, and
   the tensors that cross its borders. Layers of one class are priced and solved once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf, isclose
from typing import Any

from torch.fx import Node

from ..ir.graph import PRIME, Graph, Source, op_name, output_of, types_of
from ..rules import rule_for
from ..rules.prune import Pruner

__all__ = ["Layer", "Layering", "cluster_layers", "differentiable_nodes", "floating_ops"]

HEAVY = frozenset({"matmul", "attention", "convolution", "embedding", "routing"})


@dataclass(frozen=True)
class Layer:
    """A contiguous run of non-floating ops (node names, program order, getitems included)."""

    name: str
    ops: tuple[str, ...]
    class_key: str
    flops: float


@dataclass(frozen=True)
class Layering:
    """The layers of a graph and the tensors that cross between them."""

    layers: tuple[Layer, ...]
    #: at [i] the tensors (node names) alive between layer i-1 and layer i; [0] and [-1] are empty
    crossing: tuple[tuple[str, ...], ...]
    #: the floating ops, in program order
    floating: tuple[str, ...]
    #: the floating ops that depend on no input
    static: frozenset[str]
    #: the nodes through which gradients flow (``differentiable_nodes``)
    needs_grad: frozenset[str]
    #: the filter of strategies, which caches its results
    pruner: Pruner
    #: node → for each output the dim that scales with the batch, or None
    batch_dims: Mapping[str, tuple[int | None, ...]]
    #: the batch extent at which FLOPs are given
    batch: int

    @cached_property
    def layer_of(self) -> dict[str, int]:
        """The layer of each op; floating ops, static ones among them, are in none."""
        return {name: index for index, layer in enumerate(self.layers) for name in layer.ops}

    def between_neighbours(self, graph: Graph) -> list[tuple[int, ...]]:
        """By border the numbers, in ``crossing``, of the tensors that the layer in front of it makes and the one behind
        it reads."""
        nodes, found = graph.by_name(), []
        for border, names in enumerate(self.crossing):
            made = [n for n, name in enumerate(names) if self.layer_of[name] == border - 1]
            readers = set(self.layers[border].ops) if made else ()
            found.append(tuple(n for n in made if any(user.name in readers for user in nodes[names[n]].users)))
        return found

    def shared_weights(self, graph: Graph) -> list[tuple[Node, list[int]]]:
        """The parameters that several layers read, and these layers."""
        return [(node, layers) for node, layers in self.readers(graph) if len(layers) > 1]

    def readers(self, graph: Graph) -> list[tuple[Node, list[int]]]:
        """The parameters, and the layers that read each of them."""
        return [(node, self._layers_reading(node)) for node in graph.placeholders("parameter")]

    def _layers_reading(self, node: Node) -> list[int]:
        """The layers that read a placeholder, directly or through floating ops."""
        layers, seen, stack = set[int](), set[Node](), [node]
        while stack:
            for user in stack.pop().users:
                if user.name in self.layer_of:
                    layers.add(self.layer_of[user.name])
                elif user not in seen:
                    seen.add(user)
                    stack.append(user)
        return sorted(layers)

    def updated_across(self, graph: Graph) -> dict[int, str]:
        """The borders (numbers of the layers behind them) on both sides of which one buffer is read and updated, and
        the name of the buffer: in a pipeline the next microbatch would read it before the last one has updated it."""
        borders: dict[int, str] = {}
        results = {result.name: result.node for result in graph.results if result.kind == "buffer"}
        for node in graph.placeholders("buffer"):
            name = node.meta["source"].name
            if name in results:
                made = output_of(graph.node(results[name]))[0].name
                layers = [*self._layers_reading(node), *([self.layer_of[made]] if made in self.layer_of else [])]
                borders.update(dict.fromkeys(range(min(layers, default=0) + 1, max(layers, default=0) + 1), name))
        return borders

    @cached_property
    def twins(self) -> dict[str, str]:
        """Op of a layer → the op in its place in the first layer of that class."""
        first: dict[str, tuple[str, ...]] = {}
        pairs = [zip(layer.ops, first.setdefault(layer.class_key, layer.ops)) for layer in self.layers]
        return {op: twin for some in pairs for op, twin in some}

    @cached_property
    def growing(self) -> frozenset[str]:
        """The static ops that grow with the batch."""
        return frozenset(name for name in self.static if any(dim is not None for dim in self.batch_dims[name]))

    @cached_property
    def of_stages(self) -> Layering:
        """What a whole stage is solved by: there an op that grows with the batch is none of the static ones, which run
        whole on every device and are priced behind."""
        return replace(self, static=self.static - self.growing)

    @property
    def total_flops(self) -> float:
        """Forward FLOPs of all layers."""
        return sum(layer.flops for layer in self.layers)

    def ops_of(self, graph: Graph, first: int, end: int) -> list[Node]:
        """Ops of layers [first, end) with the floating ops that they need, in program order."""
        wanted = {name for layer in self.layers[first:end] for name in layer.ops}
        floating = set(self.floating)
        nodes = graph.by_name()
        stack = list(wanted)
        if end == len(self.layers):  # results that no parameter touches are made by the last stage
            stack += [r.node for r in graph.results if r.node in floating]
            wanted.update(stack)
        while stack:
            for operand in nodes[stack.pop()].all_input_nodes:
                if operand.name in floating and operand.name not in wanted:
                    wanted.add(operand.name)
                    stack.append(operand.name)
        return [node for node in graph.ops() if node.name in wanted]


def cluster_layers(graph: Graph, max_layers: int = 128, sequence: bool = False) -> Layering:
    """Cluster ``graph`` (at any batch extent) into at most ``max_layers`` layers; sequence: as in ``Pruner``. Found
    once."""
    key = max_layers, sequence
    if key not in graph._layerings:
        graph._layerings[key] = _clustered(graph, max_layers, sequence)
    found: Layering = graph._layerings[key]
    return found


def _clustered(graph: Graph, max_layers: int, sequence: bool) -> Layering:
    floating, static, needs_grad = _classify(graph)
    fixed = [node for node in graph.ops() if node.name not in floating]
    if not fixed:
        raise ValueError(
            "a model to parallelize computes something from its parameters, but this one's graph uses none of them"
        )
    alive = _alive_tensors(graph, fixed, floating)
    capture = graph.origin or graph
    nbytes = {n.name: sum(t.nbytes for t in types_of(n)) for n in capture}
    cost = [sum(nbytes.get(name, inf) for name in names) for names in alive]
    flops = [0.0 if op_name(node) == "getitem" else rule_for(node).flops(node) for node in fixed]
    heavy = [_is_heavy(node) for node in fixed]
    cuts = _merge_light_segments(_cut_positions(cost, heavy), flops, max_layers)
    cuts = _with_annotated_stages(cuts, fixed, heavy, cost)
    names = _layer_names(fixed, cuts)
    layers = []
    crossing = [tuple(alive[c]) for c in cuts]
    for index, (first, end) in enumerate(pairwise(cuts)):
        members = fixed[first:end]
        key = _class_key(capture, members, floating, needs_grad, crossing[index], crossing[index + 1])
        layers.append(Layer(names[index], tuple(n.name for n in members), key, float(sum(flops[first:end]))))
    order = tuple(node.name for node in graph.ops() if node.name in floating)
    return Layering(
        tuple(layers),
        tuple(crossing),
        order,
        static,
        needs_grad,
        Pruner(_at_small_batch(capture), sequence),
        _batch_dims(capture),
        graph.batch,
    )


def _at_small_batch(capture: Graph) -> Graph:
    """The graph at a small batch extent, which is enough for the pruner: live dims do not depend on the batch."""
    for batch in (8, 64, 1024):
        try:
            return capture.with_batch(batch)
        except ValueError:
            continue
    return capture


def differentiable_nodes(graph: Graph) -> frozenset[str]:
    """The nodes through which a gradient flows from the loss to some parameter, those parameters included. Found once
    for all batch extents of a graph."""
    first = graph.origin or graph
    if first._differentiable is None:
        first._differentiable = _classify(first)[2]
    return first._differentiable


def floating_ops(graph: Graph) -> frozenset[str]:
    """The ops that no weight and no changing buffer decides."""
    return _classify(graph)[0]


def _classify(graph: Graph) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """(floating ops, static ops, nodes between a parameter that needs a gradient and the loss)."""
    mutated = {r.name for r in graph.results if r.kind == "buffer"}
    bound: set[str] = set()  # depends on a parameter or a changing buffer
    moving: set[str] = set()  # depends on an input as well
    grad: set[str] = set()
    for node in graph:
        if node.op == "placeholder":
            source: Source = node.meta["source"]
            if source.kind == "parameter" or (source.kind == "buffer" and source.name in mutated):
                bound.add(node.name)
            if source.kind == "input":
                moving.add(node.name)
            if source.kind == "parameter" and source.requires_grad:
                grad.add(node.name)
            continue
        operands = {n.name for n in node.all_input_nodes}
        if operands & bound or op_name(node) in _DRAWS:
            bound.add(node.name)
        if operands & moving:
            moving.add(node.name)
        if operands & grad and any(t.is_float for t in types_of(node)) and not _blocks_gradient(node):
            grad.add(node.name)
    reached = {r.node for r in graph.results if r.kind == "loss"}
    for node in reversed(list(graph)):
        if node.name in reached and node.name in grad:
            reached.update(operand.name for operand in node.all_input_nodes)
    grad &= reached
    floating = frozenset(n.name for n in graph.ops() if n.name not in bound)
    return floating, frozenset(n for n in floating if n not in moving), frozenset(grad)


_DRAWS = ("meshwright.dropout", "meshwright.random_tensor")  # their last argument is the op's running number
_WITHOUT_GRADIENT = frozenset(
    ["detach", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"]
)


def _blocks_gradient(node: Node) -> bool:
    """A detach, a new tensor of a given type, or an output that is not differentiable: the statistics of a batch
    norm."""
    if op_name(node).removeprefix("aten.").partition(".")[0] in _WITHOUT_GRADIENT:
        return True
    producer, index = output_of(node)
    return index != 0 and op_name(producer) == "meshwright.batch_norm"


def _alive_tensors(graph: Graph, fixed: Sequence[Node], floating: frozenset[str]) -> list[list[str]]:
    """For each position 0…len(fixed): the tensors made before it by fixed ops and used at or after it, in program
    order."""
    position = {node.name: index for index, node in enumerate(fixed)}
    last: dict[str, int] = {}
    for index, node in enumerate(fixed):
        for operand in node.all_input_nodes:
            if operand.name in position:
                last[operand.name] = index
    for result in graph.results:
        if result.node in position and result.kind in ("loss", "output"):
            last[result.node] = len(fixed) - 1 if result.kind == "output" else position[result.node]
    out: list[list[str]] = [[] for _ in range(len(fixed) + 1)]
    for node in fixed:
        if isinstance(node.meta["type"], tuple):
            # an op of several outputs is never cut from its getitems: the empty name costs infinitely much
            for p in range(position[node.name] + 1, last.get(node.name, -1) + 1):
                out[p].append("")
            continue
        for p in range(position[node.name] + 1, last.get(node.name, -1) + 1):
            out[p].append(node.name)
    return out


def _is_heavy(node: Node) -> bool:
    return op_name(node) != "getitem" and rule_for(node).cost_kind in HEAVY


def _cut_positions(cost: Sequence[float], heavy: Sequence[bool]) -> list[int]:
    """The positions [0, …, n] of cuts at the local minima of ``cost``.

    A cut goes to the cheapest position between two heavy ops (the first of equals), if that is no dearer than in the
    gaps before and after, and less than twice as dear as at the neighbouring cuts (a position bias that is looked up in
    the middle of an attention makes a shallow minimum there).
    """
    heavy_positions = [p for p, is_heavy in enumerate(heavy) if is_heavy]
    gaps = [min(range(a + 1, b + 1), key=cost.__getitem__) for a, b in pairwise(heavy_positions)]
    price = [inf, *(cost[p] for p in gaps), inf]
    cuts = [p for k, p in enumerate(gaps, 1) if price[k] <= min(price[k - 1], price[k + 1]) and price[k] < inf]
    while True:
        price = [0.0, *(cost[p] for p in cuts), 0.0]
        steep = [p for k, p in enumerate(cuts, 1) if price[k] >= 2 * max(price[k - 1], price[k + 1]) > 0]
        if not steep:
            return [0, *cuts, len(heavy)]
        cuts.remove(max(steep, key=cost.__getitem__))


def _merge_light_segments(cuts: list[int], flops: Sequence[float], max_layers: int) -> list[int]:
    """Drop cuts until at most ``max_layers`` segments remain: those between the lightest neighbours, all pairs of equal
    weight together, so that repeated blocks stay alike. Pairs of which there are enough to end with come first, so that
    no lighter one between them and the ends makes a block unlike the others."""
    cuts = list(cuts)
    while (excess := len(cuts) - 1 - max_layers) > 0:
        weight = [sum(flops[a:b]) for a, b in pairwise(cuts)]
        pairs = [left + right for left, right in pairwise(weight)]
        often = sorted(one for one, count in Counter(pairs).items() if count >= excess)
        enough = [one for one in often if len(cuts) - len(_merged(cuts, pairs, one)) >= excess]
        cuts = _merged(cuts, pairs, enough[0] if enough else min(pairs))
    return cuts


def _merged(cuts: Sequence[int], pairs: Sequence[float], weight: float) -> list[int]:
    """The cuts without those inside neighbours that weigh so much together."""
    remaining, joined = [cuts[0]], False
    for cut, pair in zip(cuts[1:], [*pairs, inf]):
        joined = isclose(pair, weight, rel_tol=1e-9) and not joined
        if not joined:
            remaining.append(cut)
    return remaining


def _with_annotated_stages(
    cuts: Sequence[int], fixed: Sequence[Node], heavy: Sequence[bool], cost: Sequence[float]
) -> list[int]:
    """The cuts, with one where each annotated stage begins, in the place of one between the same two heavy ops; none
    among the outputs of an op."""
    found, stage = list(cuts), 0
    for position, node in enumerate(fixed):
        begun, stage = stage, max(stage, node.meta.get("stage", 0))
        if stage > begun and position > 0 and cost[position] < inf:
            before = max((p for p in range(position) if heavy[p]), default=-1)
            after = min((p for p in range(position, len(fixed)) if heavy[p]), default=len(fixed) - 1)
            found = sorted({position, *(p for p in found if not before < p <= after or p in (0, len(fixed)))})
    return found


def _layer_names(fixed: Sequence[Node], cuts: Sequence[int]) -> list[str]:
    """The name of each segment: the module path that its heavy ops share, made unique."""
    names: list[str] = []
    for first, end in pairwise(cuts):
        paths = [n.meta.get("module", "").split(".") for n in fixed[first:end] if _is_heavy(n)]
        common: list[str] = []
        for parts in zip(*paths):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        name = ".".join(common) or (".".join(paths[0]) if paths else "") or f"layer{len(names)}"
        unique, count = name, 2
        while unique in names:
            unique, count = f"{name}#{count}", count + 1
        names.append(unique)
    return names


def _class_key(
    graph: Graph,
    members: Sequence[Node],
    floating: frozenset[str],
    needs_grad: frozenset[str],
    entering: Sequence[str],
    leaving: Sequence[str],
) -> str:
    """A hash equal for layers that are the same program up to renaming, with the same borders and gradients there."""
    nodes = graph.by_name()
    number: dict[str, int] = {}
    lines: list[str] = []
    results = {r.node: r.kind for r in graph.results}

    def ref(node: Node) -> str:
        if node.name in number:
            return f"%{number[node.name]}"
        if node.op == "placeholder":
            source = node.meta["source"]
            number[node.name] = len(number)
            return f"%{number[node.name]}={source.kind}:{source.requires_grad}:{source.batch_dim}:{node.meta['type']}"
        if node.name in floating:
            text = emit(node)
            number[node.name] = len(number)
            return f"%{number[node.name]}=({text})"
        number[node.name] = len(number)
        return f"%{number[node.name]}=in:{node.meta['type']}"

    def literal(value: Any) -> str:
        if isinstance(value, Node):
            return ref(value)
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(literal, value)) + "]"
        return repr(value)

    def emit(node: Node) -> str:
        skip_last = op_name(node) in _DRAWS  # the op's running number does not change its price
        args = node.args[:-1] if skip_last else node.args
        kwargs = ",".join(f"{k}={literal(v)}" for k, v in node.kwargs.items() if not skip_last)
        return f"{op_name(node)}({','.join(map(literal, args))};{kwargs})"

    for node in members:
        text = emit(nodes[node.name])
        number[node.name] = len(number)
        flags = f"{'>' if node.name in leaving else ''}{results.get(node.name, '')}"
        lines.append(f"%{number[node.name]}{flags}:{' '.join(map(str, types_of(nodes[node.name])))}={text}")
    borders = [
        [f"{number.get(n, 'through')}:{nodes[n].meta['type']}:{n in needs_grad}" for n in side]
        for side in (entering, leaving)
    ]
    text = "\n".join([*lines, f"enter {borders[0]} leave {borders[1]}"])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _batch_dims(graph: Graph) -> dict[str, tuple[int | None, ...]]:
    """The dim of each output that scales with the batch. At the capture extent it is the one divisible by the prime."""
    return {
        node.name: tuple(next((d for d, e in enumerate(t.shape) if e and e % PRIME == 0), None) for t in types_of(node))
        for node in graph
    }
