"""Programs whose backward is split into two actions: I sends the cotangents of activations on, W makes weight
gradients.

    y = f(x, w)      I:  dx = dy · ∂f/∂x, and (x, dy) are put by        W:  dw = dy · ∂f/∂w, added to the weight

``split_program`` replaces the ops that multiply with weights (linear, matrix products, convolutions, embeddings) by
autograd functions that do so. The weight may come to the op through views and reshards of parameters: W runs autograd
from the op's weight back to the leaf, so partial sums, hooks and accumulation are those of any backward. All else a
backward does, norms and biases added by themselves included, is done in I.

From I to W only x and dy of these ops are kept (of a convolution w too); what else a forward saved is freed by I.
Parameters are taken together where an op reads both or a weight is read twice: autograd then runs once per W through
them, so that a hook on a leaf fires once.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...compiler.ir.program import ChunkProgram

__all__ = ["SplitProgram", "register_halves", "split_program"]

aten = torch.ops.aten

_Edge = Tensor | GradientEdge
_DeferredGradient = tuple[int, Sequence[_Edge], Callable[[], Sequence[Tensor]]]
"""(group, where the gradients go, what makes them)"""
_Run = Callable[..., Tensor]
"""``_DeferredGradients.run`` of a group"""


@dataclass
class SplitProgram:
    """A program whose backward comes in two actions, I and W."""

    module: torch.fx.GraphModule
    #: slots of trainable parameters to whose gradients W adds
    late: tuple[int, ...]
    #: slots of trainable parameters to whose gradients I adds
    early: tuple[int, ...]
    #: the number of split ops in each group of parameters
    counts: Mapping[int, int]
    deferred: _DeferredGradients
    #: the gradients that I has deferred and W has not made, by microbatch
    owed: dict[int, list[_DeferredGradient]] = field(default_factory=dict)

    def begin(self, microbatch: int) -> None:
        """Before the forward of a microbatch."""
        self.deferred.debts = self.owed[microbatch] = []

    def settle(self, microbatch: int) -> None:
        """The W of a microbatch: every weight gradient that its I put off."""
        missing = dict(self.counts)
        edges: defaultdict[int, list[_Edge]] = defaultdict(list)
        grads: defaultdict[int, list[Tensor]] = defaultdict(list)
        debts = self.owed.pop(microbatch)
        debts.reverse()
        while debts:  # each is let go as soon as it is paid
            group, ends, make = debts.pop()
            edges[group] += ends
            grads[group] += make()
            del make
            missing[group] -= 1
            if not missing[group]:
                _accumulate(edges.pop(group), grads.pop(group))
        for group, left in edges.items():  # an op of the group had no part in the loss
            _accumulate(left, grads[group])


def _accumulate(edges: Sequence[Any], grads: Sequence[Tensor]) -> None:
    """Add gradients to leaves, through what lies between."""
    torch.autograd.backward(edges, grads)


@dataclass
class _DeferredGradients:
    """The deferred weight gradients of the current microbatch, and a leaf for ops whose activations need no
    gradient."""

    debts: list[_DeferredGradient] = field(default_factory=list)
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    def run(self, group: int, op: _HalvedOp, x: Tensor, *weights: Tensor | None) -> Tensor:
        """The op now; its weight gradients in W."""
        anchor = None if x.requires_grad else self.anchor
        return _Halves.apply(x, anchor, tuple(w for w in weights if w is not None), op, self.debts, group)


# ---- the pass


def split_program(program: ChunkProgram) -> SplitProgram:
    """The program with its backward in halves; the given one stays as it is."""
    graph: torch.fx.Graph = copy.deepcopy(program.graph)
    roots = _roots(graph, program)
    deferred = _DeferredGradients()
    weights_of: dict[torch.fx.Node, list[torch.fx.Node]] = {}  # op → its weights
    for node in graph.nodes:
        if node.op == "call_function" and (weights := _weights(node, roots)):
            weights_of[node] = weights
    leader = _merge_groups([frozenset().union(*(roots[w] for w in weights)) for weights in weights_of.values()])
    counts: Counter[int] = Counter()
    early = set(_slots_read_elsewhere(graph, roots, weights_of))
    for node, weights in weights_of.items():
        group, op = leader[min(roots[weights[0]])], _SPLIT_OPS[node.target]
        counts[group] += 1
        node.target = op.make(partial(deferred.run, group), node.args[op.w] is not weights[0])
    late = {slot for weights in weights_of.values() for w in weights for slot in roots[w]}
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    return SplitProgram(module, tuple(sorted(late)), tuple(sorted(early)), dict(counts), deferred)


def _roots(graph: torch.fx.Graph, program: ChunkProgram) -> dict[torch.fx.Node, frozenset[int]]:
    """Nodes made of trainable parameters alone → the slots of these."""
    roots: dict[torch.fx.Node, frozenset[int]] = {}
    slots = iter(enumerate(program.slots))
    for node in graph.nodes:
        if node.op == "placeholder":
            position, slot = next(slots)
            if slot.kind == "parameter" and slot.requires_grad:
                roots[node] = frozenset([position])
        elif node.op == "call_function":
            sources = node.all_input_nodes
            if sources and all(source in roots for source in sources):
                roots[node] = frozenset().union(*(roots[source] for source in sources))
    return roots


def _weights(node: torch.fx.Node, roots: Mapping[torch.fx.Node, frozenset[int]]) -> list[torch.fx.Node]:
    """The operands of an op whose gradients W makes; none where the op stays whole: its activation is a weight as well,
    or it has options that are not known here."""
    op = _SPLIT_OPS.get(node.target)
    if op is None or node.kwargs or len(node.args) > op.max_arguments:
        return []
    x, w = node.args[op.x], node.args[op.w]
    if op.either and x in roots:
        x, w = w, x
    bias = node.args[op.b] if op.b is not None and op.b < len(node.args) else None
    if x in roots or w not in roots or (bias is not None and bias not in roots):
        return []
    return [operand for operand in (w, bias) if isinstance(operand, torch.fx.Node)]


def _merge_groups(sets: Sequence[frozenset[int]]) -> dict[int, int]:
    """Slot → the least slot of those that are taken together with it."""
    leader: dict[int, int] = {slot: slot for group in sets for slot in group}
    for group in sets:
        old = {leader[slot] for slot in group}
        for slot, at in leader.items():
            if at in old:
                leader[slot] = min(old)
    return leader


def _slots_read_elsewhere(
    graph: torch.fx.Graph,
    roots: Mapping[torch.fx.Node, frozenset[int]],
    weights: Mapping[torch.fx.Node, Sequence[torch.fx.Node]],
) -> Iterator[int]:
    """Slots of trainable parameters that ops read whose gradients I makes."""
    for node in graph.nodes:
        if node not in roots:
            for source in node.all_input_nodes:
                if source in roots and source not in weights.get(node, ()):
                    yield from roots[source]


# ---- the functions


def _edge(weight: Tensor) -> _Edge:
    """The autograd edge that takes the gradient of a weight. It does not keep the weight itself alive."""
    return weight if weight.is_leaf else get_gradient_edge(weight)


class _Halves(torch.autograd.Function):
    """An op ``y = op.forward(x, *weights)`` whose backward gives the gradient of x and puts off those of the weights.

    op: one of the classes below. Its fields are the options of the op; ``saves_weight`` and ``reads_weight_late`` say
    whether I and W are given the weight, which is then kept until they are.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, weights: tuple[Tensor, ...], op: Any,
        debts: list[_DeferredGradient], group: int,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, *weights[: op.saves_weight])
        ctx.op, ctx.debts, ctx.group = op, debts, group
        ctx.edges, ctx.shapes = [_edge(w) for w in weights], [w.shape for w in weights]
        return op.forward(x, *weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, *weight), op = grads, ctx.saved_tensors, ctx.op
        late = weight if op.reads_weight_late else ()
        ctx.debts.append((ctx.group, ctx.edges, partial(op.weight_gradients, ctx.shapes, g, x, *late)))
        dx = op.input_gradient(g, x, *weight) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


class _HalvedOp:
    saves_weight = True
    reads_weight_late = False


@dataclass(frozen=True)
class _Linear(_HalvedOp):
    """x @ wᵀ + b, and with ``across`` x @ w + b. x: [.., i]; w: [o, i], across [i, o]; b: [o] or None."""

    across: bool

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return aten.addmm.default(b, x, w) if self.across else aten.linear.default(x, w, b)

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return g @ w.t() if self.across else g @ w

    def weight_gradients(self, shapes: Sequence[torch.Size], g: Tensor, x: Tensor) -> list[Tensor]:
        rows, out = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        weight = rows.t() @ out if self.across else out.t() @ rows
        return [weight, out.sum(0)] if len(shapes) > 1 else [weight]


@dataclass(frozen=True)
class _Product(_HalvedOp):
    """a @ b of at least two dims each, broadcast over the others; the weight is b, or a where ``first``."""

    first: bool

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(w, x) if self.first else torch.matmul(x, w)

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return (w.mT @ g if self.first else g @ w.mT).sum_to_size(x.shape)

    def weight_gradients(self, shapes: Sequence[torch.Size], g: Tensor, x: Tensor) -> list[Tensor]:
        (shape,) = shapes
        if len(shape) == 2 and not self.first:
            return [x.reshape(-1, x.shape[-1]).t() @ g.reshape(-1, g.shape[-1])]
        return [(g @ x.mT if self.first else x.mT @ g).sum_to_size(shape)]


@dataclass(frozen=True)
class _Convolution(_HalvedOp):
    """A convolution of 1 to 3 dims; options: stride, padding, dilation, transposed, output padding, groups."""

    options: tuple[Any, ...]
    reads_weight_late = True

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return aten.convolution.default(x, w, b, *self.options)

    def input_gradient(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return aten.convolution_backward.default(g, x, w, None, *self.options, [True, False, False])[0]

    def weight_gradients(self, shapes: Sequence[torch.Size], g: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        bias = list(shapes[1]) if len(shapes) > 1 else None
        mask = [False, True, bias is not None]
        return list(aten.convolution_backward.default(g, x, w, bias, *self.options, mask)[1 : 1 + len(shapes)])


@dataclass(frozen=True)
class _Embedding(_HalvedOp):
    """Rows of a table."""

    padding_idx: int
    by_frequency: bool
    saves_weight = False

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return aten.embedding.default(w, x, self.padding_idx, self.by_frequency, False)

    def weight_gradients(self, shapes: Sequence[torch.Size], g: Tensor, x: Tensor) -> list[Tensor]:
        rows = shapes[0][0]
        return [aten.embedding_dense_backward.default(g, x, rows, self.padding_idx, self.by_frequency)]


@dataclass(frozen=True)
class _RegisteredOp(_HalvedOp):
    """An op of ``register_halves``."""

    forward: Callable[[Tensor, Tensor], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    reads_weight_late = True

    def weight_gradients(self, shapes: Sequence[torch.Size], g: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        return [self.weight_gradient(g, x, w)]


# ---- what replaces which op: closures that take the arguments of the op


def _linear(halves: _Run, first: bool) -> Callable[..., Tensor]:
    op = _Linear(across=False)

    def halved_linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return halves(op, x, w, b)

    return halved_linear


def _addmm(halves: _Run, first: bool) -> Callable[..., Tensor]:
    op = _Linear(across=True)

    def halved_addmm(b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return halves(op, x, w, b)

    return halved_addmm


def _product(halves: _Run, first: bool) -> Callable[..., Tensor]:
    op = _Product(first)

    def halved_product(a: Tensor, b: Tensor) -> Tensor:
        if min(a.ndim, b.ndim) < 2:
            return torch.matmul(a, b)
        return halves(op, b, a) if first else halves(op, a, b)

    return halved_product


def _convolution(halves: _Run, first: bool) -> Callable[..., Tensor]:
    def halved_convolution(
        x: Tensor, w: Tensor, b: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:  # fmt: skip
        dims = w.ndim - 2
        stride, padding, dilation = (_expand_option(value, dims) for value in (stride, padding, dilation))
        return halves(_Convolution((stride, padding, dilation, False, [0] * dims, groups)), x, w, b)

    return halved_convolution


def _expand_option(value: int | Sequence[int], dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _embedding(halves: _Run, first: bool) -> Callable[..., Tensor]:
    def halved_embedding(w: Tensor, x: Tensor, padding_idx: int = -1, by_frequency: bool = False) -> Tensor:
        return halves(_Embedding(padding_idx, by_frequency), x, w)

    return halved_embedding


def register_halves(
    op: torch._ops.OpOverload,
    of_input: Callable[[Tensor, Tensor, Tensor], Tensor],
    of_weight: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    """Let schedules put off the weight's gradient of an op ``y = op(x, w)`` of your own.

    of_input: (dy, x, w) → dx; of_weight: (dy, x, w) → dw. Without this the whole backward of the op is done in I.
    """

    registered = _RegisteredOp(op, of_input, of_weight)

    def make(halves: _Run, first: bool) -> Callable[..., Tensor]:
        def halved(x: Tensor, w: Tensor) -> Tensor:
            return halves(registered, x, w)

        return halved

    _SPLIT_OPS[op] = _Op(make, max_arguments=2)


@dataclass(frozen=True)
class _Op:
    """The replacement of an op by one whose weight gradient is deferred."""

    make: Callable[[_Run, bool], Callable[..., Tensor]]
    #: the positions of activation, weight and bias among its arguments
    x: int = 0
    w: int = 1
    b: int | None = None
    #: True if activation and weight may change places
    either: bool = False
    #: the number of arguments that the replacement understands
    max_arguments: int = 7


_SPLIT_OPS: dict[Any, _Op] = {
    aten.linear.default: _Op(_linear, b=2),
    aten.addmm.default: _Op(_addmm, x=1, w=2, b=0),
    **{op.default: _Op(_product, either=True) for op in (aten.mm, aten.bmm, aten.matmul)},
    **{op.default: _Op(_convolution, b=2) for op in (aten.conv1d, aten.conv2d, aten.conv3d)},
    aten.embedding.default: _Op(_embedding, x=1, w=0, max_arguments=4),
}
