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

    def anchor_for(self, x: Tensor) -> Tensor | None:
        return None if x.requires_grad else self.anchor


# ---- the pass


def split_program(program: ChunkProgram) -> SplitProgram:
    """The program with its backward in halves; the given one stays as it is."""
    graph: torch.fx.Graph = copy.deepcopy(program.module.graph)
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
        node.target = op.make(deferred, group, node.args[op.w] is not weights[0])
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


class _Linear(torch.autograd.Function):
    """x @ wᵀ + b, and with ``across`` x @ w + b. x: [.., i]; w: [o, i], across [i, o]; b: [o] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor | None,
        parts: tuple[Tensor, Tensor | None],
        across: bool,
        deferred: _DeferredGradients,
        group: int,
    ) -> Tensor:
        w, b = parts
        ctx.save_for_backward(x, w)
        ctx.debts, ctx.group, ctx.across = deferred.debts, group, across
        ctx.edges = [_edge(w)] if b is None else [_edge(w), _edge(b)]
        if not across:
            return aten.linear.default(x, w, b)
        return aten.mm.default(x, w) if b is None else aten.addmm.default(b, x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, w), across = grads, ctx.saved_tensors, ctx.across
        biased = len(ctx.edges) > 1

        def make() -> list[Tensor]:
            rows, out = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
            weight = rows.t() @ out if across else out.t() @ rows
            return [weight, out.sum(0)] if biased else [weight]

        ctx.debts.append((ctx.group, ctx.edges, make))
        dx = (g @ w.t() if across else g @ w) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


class _Product(torch.autograd.Function):
    """a @ b of at least two dims each, broadcast over the others; the weight is b, or a where ``first``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor | None,
        parts: tuple[Tensor],
        first: bool,
        deferred: _DeferredGradients,
        group: int,
    ) -> Tensor:
        (w,) = parts
        ctx.save_for_backward(x, w)
        ctx.debts, ctx.group, ctx.first, ctx.edges = deferred.debts, group, first, [_edge(w)]
        return torch.matmul(w, x) if first else torch.matmul(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, w), first = grads, ctx.saved_tensors, ctx.first
        shape = w.shape

        def make() -> list[Tensor]:
            if len(shape) == 2 and not first:
                return [x.reshape(-1, x.shape[-1]).t() @ g.reshape(-1, g.shape[-1])]
            return [(g @ x.mT if first else x.mT @ g).sum_to_size(shape)]

        ctx.debts.append((ctx.group, ctx.edges, make))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (w.mT @ g if first else g @ w.mT).sum_to_size(x.shape)
        return dx, None, None, None, None, None


class _Convolution(torch.autograd.Function):
    """A convolution of 1 to 3 dims; options: (stride, padding, dilation, groups)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, parts: tuple[Tensor, Tensor | None], options: tuple[Any, ...],
        deferred: _DeferredGradients, group: int,
    ) -> Tensor:  # fmt: skip
        w, b = parts
        stride, padding, dilation, groups = options
        ctx.save_for_backward(x, w)
        ctx.debts, ctx.group, ctx.bias = deferred.debts, group, None if b is None else list(b.shape)
        ctx.edges = [_edge(w)] if b is None else [_edge(w), _edge(b)]
        zeros = [0] * len(stride)
        ctx.rest = (stride, padding, dilation, False, zeros, groups)
        return aten.convolution.default(x, w, b, *ctx.rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, w) = grads, ctx.saved_tensors
        sizes, rest = ctx.bias, ctx.rest

        def make() -> list[Tensor]:
            mask = [False, True, sizes is not None]
            return list(aten.convolution_backward.default(g, x, w, sizes, *rest, mask)[1 : 2 + (sizes is not None)])

        ctx.debts.append((ctx.group, ctx.edges, make))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = aten.convolution_backward.default(g, x, w, sizes, *rest, [True, False, False])[0]
        return dx, None, None, None, None, None


class _Embedding(torch.autograd.Function):
    """Rows of a table; options: (padding_idx, scale_grad_by_freq)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor | None,
        parts: tuple[Tensor],
        options: tuple[int, bool],
        deferred: _DeferredGradients,
        group: int,
    ) -> Tensor:
        (w,) = parts
        ctx.save_for_backward(x)
        ctx.debts, ctx.group, ctx.edges, ctx.rest = deferred.debts, group, [_edge(w)], (w.shape[0], *options)
        return aten.embedding.default(w, x, options[0], options[1], False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (g,), (x,), rest = grads, ctx.saved_tensors, ctx.rest
        ctx.debts.append((ctx.group, ctx.edges, lambda: [aten.embedding_dense_backward.default(g, x, *rest)]))
        return None, None, None, None, None, None


class _RegisteredOp(torch.autograd.Function):
    """An op of ``register_halves``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor | None,
        parts: tuple[Tensor],
        rules: _Rules,
        deferred: _DeferredGradients,
        group: int,
    ) -> Tensor:
        (w,) = parts
        ctx.save_for_backward(x, w)
        ctx.debts, ctx.group, ctx.rules, ctx.edges = deferred.debts, group, rules, [_edge(w)]
        return rules.op(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, w), rules = grads, ctx.saved_tensors, ctx.rules
        ctx.debts.append((ctx.group, ctx.edges, lambda: [rules.of_weight(g, x, w)]))
        return rules.of_input(g, x, w) if ctx.needs_input_grad[0] else None, None, None, None, None, None


# ---- what replaces which op: closures that take the arguments of the op


def _linear(deferred: _DeferredGradients, group: int, first: bool) -> Callable[..., Tensor]:
    def halved_linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return _Linear.apply(x, deferred.anchor_for(x), (w, b), False, deferred, group)

    return halved_linear


def _addmm(deferred: _DeferredGradients, group: int, first: bool) -> Callable[..., Tensor]:
    def halved_addmm(b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return _Linear.apply(x, deferred.anchor_for(x), (w, b), True, deferred, group)

    return halved_addmm


def _product(deferred: _DeferredGradients, group: int, first: bool) -> Callable[..., Tensor]:
    def halved_product(a: Tensor, b: Tensor) -> Tensor:
        if min(a.ndim, b.ndim) < 2:
            return torch.matmul(a, b)
        x, w = (b, a) if first else (a, b)
        return _Product.apply(x, deferred.anchor_for(x), (w,), first, deferred, group)

    return halved_product


def _convolution(deferred: _DeferredGradients, group: int, first: bool) -> Callable[..., Tensor]:
    def halved_convolution(
        x: Tensor, w: Tensor, b: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:  # fmt: skip
        options = (*(_expand_option(value, w.ndim - 2) for value in (stride, padding, dilation)), groups)
        return _Convolution.apply(x, deferred.anchor_for(x), (w, b), options, deferred, group)

    return halved_convolution


def _expand_option(value: int | Sequence[int], dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _embedding(deferred: _DeferredGradients, group: int, first: bool) -> Callable[..., Tensor]:
    def halved_embedding(w: Tensor, x: Tensor, padding_idx: int = -1, by_frequency: bool = False) -> Tensor:
        return _Embedding.apply(x, deferred.anchor, (w,), (padding_idx, by_frequency), deferred, group)

    return halved_embedding


@dataclass(frozen=True)
class _Rules:
    op: Callable[[Tensor, Tensor], Tensor]
    of_input: Callable[[Tensor, Tensor, Tensor], Tensor]
    of_weight: Callable[[Tensor, Tensor, Tensor], Tensor]


def register_halves(
    op: torch._ops.OpOverload,
    of_input: Callable[[Tensor, Tensor, Tensor], Tensor],
    of_weight: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    """Let schedules put off the weight's gradient of an op ``y = op(x, w)`` of your own.

    of_input: (dy, x, w) → dx; of_weight: (dy, x, w) → dw. Without this the whole backward of the op is done in I.
    """
    rules = _Rules(op, of_input, of_weight)

    def make(deferred: _DeferredGradients, group: int, first: bool) -> Callable[..., Tensor]:
        def halved(x: Tensor, w: Tensor) -> Tensor:
            return _RegisteredOp.apply(x, deferred.anchor_for(x), (w,), rules, deferred, group)

        return halved

    _SPLIT_OPS[op] = _Op(make, max_arguments=2)


@dataclass(frozen=True)
class _Op:
    """The replacement of an op by one whose weight gradient is deferred."""

    make: Callable[[_DeferredGradients, int, bool], Callable[..., Tensor]]
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
