"""Experts that a model runs on every token, although the router's scores are zero but for the best: each token goes to
its own experts instead.

The pattern, which Llama 4 has (all tokens once for every expert, T tokens, E experts, K for each token)::

    values, index = topk(logits, K)                                [T, K]
    scores = sigmoid(scatter(-inf, index, values))                 [T, E]
    rows = repeat(x, E) * scores of each expert                    [E, T, H]
    gate, up = split(bmm(rows, gate_up))                           [E, T, F]
    out = sum over experts of bmm(act(gate) * up, down)            [T, H]

An expert without biases whose activation keeps zero makes zero of a row of zeros, and passes no gradient on. So the
sum is that over the K experts of a token: ``experts(x * sigmoid(values), index, 1)``, 1/E of the work per expert.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import Graph, op_name, output_of
from ..ir.ops import local_ops
from .graph_edits import Insertion, arguments_of, find_nodes, replace_node

__all__ = ["route_dense_experts"]

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_CASTS = (aten._to_copy.default, aten.to.dtype)
#: activations that keep zero, by op
_ACTIVATIONS = {"aten.silu.default": "silu", "aten.relu.default": "relu", "aten.gelu.default": "gelu"}


@dataclass(frozen=True)
class _DenseExperts:
    """The operands of one occurrence of the pattern."""

    x: Node
    values: Node
    index: Node
    gate_up: Node
    down: Node
    activation: str


def route_dense_experts(graph: Graph) -> None:
    """Replace each occurrence of the pattern by ``local_ops.experts`` of the chosen experts."""
    for node in find_nodes(graph, aten.sum.dim_IntList):
        found = _match(node)
        if found is None:
            continue
        at = Insertion(graph, node)
        tokens, chosen = found.index.meta["type"].shape
        hidden = found.x.meta["type"].shape[1]
        scores, index, x = at(aten.sigmoid.default, found.values), found.index, found.x
        if chosen > 1:
            x = at(aten.expand.default, at(aten.unsqueeze.default, x, 1), [tokens, chosen, hidden])
            x = at(aten.view.default, x, [tokens * chosen, hidden])
            index, scores = (at(aten.view.default, t, [tokens * chosen, 1]) for t in (index, scores))
        if scores.meta["type"].dtype != x.meta["type"].dtype:
            scores = at(aten._to_copy.default, scores, dtype=x.meta["type"].dtype)
        rows = at(aten.mul.Tensor, x, scores)
        weights = [at(aten.transpose.int, weight, 1, 2) for weight in (found.gate_up, found.down)]
        ones = at(aten.ones_like.default, scores)
        out = at(local_ops.experts, rows, index, ones, *weights, found.activation, type=rows.meta["type"])
        if chosen > 1:
            out = at(aten.sum.dim_IntList, at(aten.view.default, out, [tokens, chosen, hidden]), [1])
        replace_node(graph, node, out)


def _match(node: Node) -> _DenseExperts | None:
    if [dim % 3 for dim in arguments_of(node)["dim"]] != [0] or arguments_of(node)["keepdim"]:
        return None
    last = _through(arguments_of(node)["self"], _VIEWS)
    if last.target is not aten.bmm.default:
        return None
    product, down = _args(last)
    gate_up_product = _gated(product)
    if gate_up_product is None:
        return None
    first, activation = gate_up_product
    rows, gate_up = _args(first)
    scaled = _through(rows, _VIEWS)
    if scaled.target is not aten.mul.Tensor:
        return None
    for repeated, weight in (_args(scaled), _args(scaled)[::-1]):
        scores = _scores(weight)
        if isinstance(repeated, Node) and repeated.target is aten.repeat.default and scores is not None:
            x, times = _args(repeated)
            experts = down.meta["type"].shape[0]
            if isinstance(x, Node) and list(times) == [experts, 1]:
                return _DenseExperts(x, *scores, gate_up, down, activation)
    return None


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def _through(node: Any, targets: tuple[Any, ...]) -> Node:
    """The tensor with which a chain of these ops began."""
    while node.target in targets:
        node = node.args[0]
    return node


def _gated(product: Any) -> tuple[Node, str] | None:
    """(the product with gate and up, the activation) if ``product`` is act(gate) * up of its halves, in this order."""
    if not isinstance(product, Node) or product.target is not aten.mul.Tensor:
        return None
    for acted, up in (_args(product), _args(product)[::-1]):
        if not isinstance(acted, Node) or not isinstance(up, Node) or op_name(acted) not in _ACTIVATIONS:
            continue
        if len(acted.args) > 1 or acted.kwargs:
            continue
        halves = [_half(acted.args[0]), _half(up)]
        if halves[0] is not None and halves[1] is not None and halves[0][0] is halves[1][0]:
            source, sides = halves[0][0], (halves[0][1], halves[1][1])
            if sides == (0, 1) and source.target is aten.bmm.default:
                return source, _ACTIVATIONS[op_name(acted)]
    return None


def _half(node: Any) -> tuple[Node, int] | None:
    """(the tensor, which half) if the node is a half of a tensor's last dim."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None
    split, index = output_of(node)
    if split.target is not aten.split.Tensor or len(split.meta["type"]) != 2:
        return None
    source: Any = split.args[0]
    return (source, index) if arguments_of(split)["dim"] % len(source.meta["type"].shape) == 2 else None


def _scores(weight: Any) -> tuple[Node, Node] | None:
    """(values, index) if the weight is the column of scores of all experts, one after the other."""
    column = _through(weight, _VIEWS) if isinstance(weight, Node) else None
    if column is None or column.target is not aten.transpose.int or sorted(_args(column)[1:]) != [0, 1]:
        return None
    scores = _through(column.args[0], _CASTS)
    if scores.target is not aten.sigmoid.default:
        return None
    scatter = _through(scores.args[0], _CASTS)
    if scatter.target is not aten.scatter.src:
        return None
    base, dim, index, values = _args(scatter)
    lowest = isinstance(base, Node) and base.target is aten.full_like.default and base.args[1] == -inf
    return (values, index) if lowest and dim == 1 else None
