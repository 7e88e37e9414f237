"""The rewrite passes over a freshly captured graph: they drop ops that no plan needs, and replace ops that would not
give the same result when cut by ops of this package.

Each pass takes the graph and changes it in place; ``PASSES`` is their order. New nodes get their types by running the
op on meta tensors, and the module and line of the node that they replace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from ..errors import CaptureError
from ..ir.graph import Graph, TensorType, op_name, tensor_operands, types_of
from ..ir.ops import local_ops
from ..ir.precision import PRECISIONS
from .dense_experts import route_dense_experts
from .graph_edits import Insertion, arguments_of, find_nodes, outputs_of, replace_node
from .layers import floating_ops
from .random_ops import draw_random_numbers

__all__ = ["PASSES", "rewrite"]

aten = torch.ops.aten


def rewrite(graph: Graph) -> Graph:
    """``graph`` after all ``PASSES`` (changed in place), its results pointing at the nodes that now make them."""
    for apply_pass in PASSES:
        apply_pass(graph)
    (outputs,) = next(node for node in graph.fx.nodes if node.op == "output").args
    return replace(
        graph, results=tuple(replace(r, node=node.name) for r, node in zip(graph.results, outputs, strict=True))
    )


# ---- passes


def drop_unused(graph: Graph) -> None:
    """Drop ops that no result needs. (Every op is functional, so nothing else can need them.)"""
    for node in reversed(list(graph.fx.nodes)):
        if node.op == "call_function" and not node.users:
            graph.fx.erase_node(node)


def drop_copies(graph: Graph) -> None:
    """Drop copies that change neither values nor dtype: clone, alias, contiguous, lift, casts to the same dtype. Views
    then need ``reshape``."""
    same = (
        aten.clone.default,
        aten.alias.default,
        aten.contiguous.default,
        aten.lift_fresh_copy.default,
        aten._to_copy.default,
    )
    for node in find_nodes(graph, *same):
        source = node.args[0]
        assert isinstance(source, Node)
        if node.meta["type"] == source.meta["type"]:
            replace_node(graph, node, source)


def differentiate_assignments(graph: Graph) -> None:
    """Replace ``copy`` of floats, which an assignment to a slice becomes and which has no derivative, by a cast and an
    expand of what is assigned."""
    for node in find_nodes(graph, aten.copy.default):
        if not node.meta["type"].is_float:
            continue
        kind, new, at = node.meta["type"], node.args[1], Insertion(graph, node)
        assert isinstance(new, Node)
        if new.meta["type"].dtype != kind.dtype:
            new = at(aten._to_copy.default, new, dtype=kind.dtype)
        if new.meta["type"].shape != kind.shape:
            new = at(aten.expand.default, new, list(kind.shape))
        replace_node(graph, node, new)


def join_assignments(graph: Graph) -> None:
    """Replace assignments to slices that together cover a dim by a ``cat`` of what is assigned."""
    for node in reversed(find_nodes(graph, aten.slice_scatter.default)):
        parts: list[tuple[int, int, Node]] = []
        base: Any = node
        while isinstance(base, Node) and base.target is aten.slice_scatter.default:
            arguments = arguments_of(base)
            if (base is not node and len(base.users) > 1) or arguments["step"] != 1:
                break
            dim, extent = arguments["dim"], base.meta["type"].shape[arguments["dim"]]
            if dim != arguments_of(node)["dim"]:
                break
            start, stop, _ = slice(arguments["start"], arguments["end"]).indices(extent)
            parts.append((start, stop, arguments["src"]))
            base = arguments["self"]
            covered = sorted(parts, key=lambda part: part[0])
            edges = [0, *(stop for _, stop, _ in covered)]
            if [start for start, _, _ in covered] == edges[:-1] and edges[-1] == extent:
                pieces = [src for _, _, src in covered]
                new = pieces[0] if len(pieces) == 1 else Insertion(graph, node)(aten.cat.default, pieces, dim)
                replace_node(graph, node, new)
                break


def join_complex_assignments(graph: Graph) -> None:
    """Replace assignments to slices of complex tensors, which have no derivative, by a ``cat`` of what is before, what
    is assigned, and what is behind."""
    for node in find_nodes(graph, aten.slice_scatter.default, aten.select_scatter.default):
        kind, arguments, at = node.meta["type"], arguments_of(node), Insertion(graph, node)
        if not kind.dtype.is_complex or arguments.get("step", 1) != 1:
            continue
        base, new, dim = arguments["self"], arguments["src"], arguments["dim"] % len(kind.shape)
        extent = kind.shape[dim]
        if node.target is aten.select_scatter.default:
            start = arguments["index"] % extent
            stop, new = start + 1, at(aten.unsqueeze.default, new, dim)
        else:
            start, stop, _ = slice(arguments["start"], arguments["end"]).indices(extent)
        around = [at(aten.slice.Tensor, base, dim, a, b) if a < b else None for a, b in ((0, start), (stop, extent))]
        pieces = [piece for piece in (around[0], new, around[1]) if piece is not None]
        replace_node(graph, node, at(aten.cat.default, pieces, dim))


def spell_out_broadcasts(graph: Graph) -> None:
    """Replace ``broadcast_tensors`` (the losses begin with it) by one expand per tensor that changes."""
    for node in find_nodes(graph, aten.broadcast_tensors.default):
        operands: Any = node.args[0]
        for index, getitem in outputs_of(node).items():
            kind, source = getitem.meta["type"], operands[index]
            same = source.meta["type"] == kind
            replace_node(
                graph,
                getitem,
                source if same else Insertion(graph, node)(aten.expand.default, source, list(kind.shape)),
            )
        graph.fx.erase_node(node)


def drop_idle_ops(graph: Graph) -> None:
    """Drop views, expands, slices and pads that change nothing, and detaches of tensors without a gradient."""
    views = aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default, aten.slice.Tensor
    pads = aten.pad.default, aten.constant_pad_nd.default
    for node in find_nodes(graph, *views, *pads):
        source = node.args[0]
        assert isinstance(source, Node)
        changes = node.target in pads and any(arguments_of(node)["pad"])
        if node.meta["type"] == source.meta["type"] and not changes:
            replace_node(graph, node, source)
    for node in find_nodes(graph, aten.detach.default):
        source = node.args[0]
        assert isinstance(source, Node)
        if not graph.training or not _may_have_gradient(source):
            replace_node(graph, node, source)


def _may_have_gradient(node: Node) -> bool:
    seen: set[Node] = set()
    stack = [node]
    while stack:
        ancestor = stack.pop()
        if (
            ancestor in seen
            or ancestor.target is aten.detach.default
            or not any(t.is_float for t in types_of(ancestor))
        ):
            continue
        seen.add(ancestor)
        if ancestor.op == "placeholder" and ancestor.meta["source"].requires_grad:
            return True
        stack += ancestor.all_input_nodes
    return False


def normalize_arguments(graph: Graph) -> None:
    """Give every call one spelling: view for its variants, whole sizes for -1, no layout and pinning, ``device`` only
    on ops without operands."""
    for node in find_nodes(graph, aten._unsafe_view.default, aten.reshape.default):
        node.target = aten.view.default
    for node in find_nodes(graph, aten.view.default, aten.expand.default):
        node.args = (node.args[0], list(node.meta["type"].shape))
        node.kwargs = {}
    for node in graph.fx.nodes:
        if node.op != "call_function" or not node.kwargs:
            continue
        drop = {"layout", "pin_memory", "memory_format", "non_blocking"} | (
            {"device"} if tensor_operands(node) else set()
        )
        node.kwargs = {key: value for key, value in node.kwargs.items() if key not in drop}


def expand_attention_dropout(graph: Graph) -> None:
    """Replace attention with dropout by matmul, mask, softmax, dropout, matmul: the fused op would draw from a
    generator of its own."""
    for node in find_nodes(graph, aten.scaled_dot_product_attention.default):
        arguments = arguments_of(node)
        if not arguments["dropout_p"]:
            continue
        if not graph.training:  # a functional call without training=... : eager drops out in eval too
            raise CaptureError(
                f"{node.meta['line']}: eval has no dropout, but got dropout_p={arguments['dropout_p']}; "
                "pass 0.0 in eval"
            )
        at = Insertion(graph, node)
        query, key, value, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
        *_, length, width = query.meta["type"].shape
        if arguments["enable_gqa"]:
            key, value = (_repeat_heads(at, t, query.meta["type"].shape[-3]) for t in (key, value))
        total = key.meta["type"].shape[-2]
        scale = arguments["scale"] if arguments["scale"] is not None else 1 / math.sqrt(width)
        scores = at(aten.matmul.default, at(aten.mul.Tensor, query, scale), at(aten.transpose.int, key, -2, -1))
        # not -inf: a row that is masked throughout must not become NaN
        lowest = torch.finfo(scores.meta["type"].dtype).min
        if arguments["is_causal"]:
            rows = at(aten.unsqueeze.default, at(aten.arange.default, length, device=torch.device("cpu")), 1)
            hidden = at(aten.lt.Tensor, rows, at(aten.arange.default, total, device=torch.device("cpu")))
            scores = at(aten.masked_fill.Scalar, scores, hidden, lowest)
        if mask is not None and mask.meta["type"].dtype == torch.bool:
            scores = at(aten.masked_fill.Scalar, scores, at(aten.logical_not.default, mask), lowest)
        elif mask is not None:
            scores = at(aten.add.Tensor, scores, mask)
        weights = at(aten.softmax.int, scores, -1)
        dropped = at(aten.dropout.default, weights, arguments["dropout_p"], True, type=weights.meta["type"])
        replace_node(graph, node, at(aten.matmul.default, dropped, value, type=node.meta["type"]))


def _repeat_heads(at: Insertion, x: Node, heads: int) -> Node:
    """[..., K, S, D] → [..., heads, S, D], each head ``heads // K`` times in a row."""
    *lead, groups, length, width = x.meta["type"].shape
    if groups == heads:
        return x
    wide = at(aten.expand.default, at(aten.unsqueeze.default, x, -3), [*lead, groups, heads // groups, length, width])
    return at(aten.view.default, wide, [*lead, heads, length, width])


def number_dropouts(graph: Graph) -> None:
    """Replace dropout by ``local_ops.dropout`` with a running number; drop it if p is 0 or in eval mode."""
    index = 0
    for node in find_nodes(graph, aten.native_dropout.default, aten.dropout.default):
        operands: Any = (*node.args, True)
        x, p, train = operands[:3]
        single = node.target is aten.dropout.default
        outputs = {0: node} if single else outputs_of(node)
        if 1 in outputs and outputs[1].users:
            raise CaptureError(
                f"{node.meta['line']}: dropout gives a tensor, but its mask is used too; "
                "make the mask an input of the model"
            )
        if train is False or p == 0:
            new = x
        else:
            new = Insertion(graph, node)(local_ops.dropout, x, float(p), index, type=x.meta["type"])
            index += 1
        outputs[0].replace_all_uses_with(new)
        for dead in [*outputs.values(), node] if not single else [node]:
            graph.fx.erase_node(dead)


def refuse_generators(graph: Graph) -> None:
    """Refuse every other random op: PyTorch's generator gives numbers that depend on the cut of the tensor."""
    for node in graph.fx.nodes:
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        arguments = arguments_of(node)  # attention and recurrent nets are tagged random for the dropout in them
        probability = arguments.get("dropout_p", arguments.get("dropout"))
        if probability is None or (probability and arguments.get("train", True)):
            raise CaptureError(
                f"{node.meta['line'] or node.name}: random numbers are uniform, normal, exponential, integers, "
                f"choices or dropout, but got {op_name(node)}; draw these outside of forward and pass them in"
            )


def refuse_packed_attention(graph: Graph) -> None:
    """Refuse attention over sequences of any lengths in one row: where one ends is known to values only, so neither a
    microbatch nor a split could be told which part of the row is its own."""
    for node in graph.fx.nodes:
        if node.op == "call_function" and op_name(node).startswith("torch_attn."):
            raise CaptureError(
                f"{node.meta['line'] or node.name}: sequences are rows of a batch, but got varlen_attn, whose "
                "sequences share one row; use scaled_dot_product_attention or flex_attention with a mask of documents, "
                "[batch, sequence]"
            )


def split_cross_entropy(graph: Graph) -> None:
    """Replace cross entropy over class indices by its sum and count, so that parts of a batch add up; with class
    weights it stays as it is."""
    for node in find_nodes(graph, aten.cross_entropy_loss.default):
        arguments = arguments_of(node)
        logits, target = arguments["self"], arguments["target"]
        kind, rank = logits.meta["type"], len(logits.meta["type"].shape)
        mean, total = arguments["reduction"] == 1, arguments["reduction"] == 2
        if arguments["weight"] is not None or target.meta["type"].is_float or rank < 2 or not (mean or total):
            continue
        at = Insertion(graph, node)
        if rank > 2:  # [N, C, d...] → [N, d..., C]
            logits = at(aten.permute.default, logits, [0, *range(2, rank), 1])
            logits = at(aten.view.default, logits, [logits.meta["type"].numel // kind.shape[1], kind.shape[1]])
            target = at(aten.view.default, target, [target.meta["type"].numel])
        number = TensorType((), torch.promote_types(kind.dtype, torch.float32))
        both = at(
            local_ops.cross_entropy,
            logits,
            target,
            arguments["ignore_index"],
            arguments["label_smoothing"],
            type=(number, TensorType((), torch.int64)),
        )
        loss, count = at.items(both)
        if mean:
            loss = at(aten.div.Tensor, loss, count)
        else:
            graph.fx.erase_node(count)
        # the loss itself stays in fp32
        if kind.dtype != number.dtype and any(user.op != "output" for user in node.users):
            loss = at(aten._to_copy.default, loss, dtype=kind.dtype)
        replace_node(graph, node, loss)


def keep_loss_dims(graph: Graph) -> None:
    """Undo the reshape that merges the leading dims of cross entropy's operands: of a merged dim only the first
    factor could be cut. The sum is the same. So it is without a cast of 16-bit logits to fp32, in which cross entropy
    computes in any case: two more tensors of logits in fp32."""
    for node in find_nodes(graph, local_ops.cross_entropy):
        operands = tensor_operands(node)[:2]
        merged = [operand.meta["type"].shape for operand in operands]
        logits, target = map(_as_made, operands)
        shape = logits.meta["type"].shape
        if shape[-1] == merged[0][-1] and shape[:-1] == target.meta["type"].shape and len(shape) >= len(merged[0]):
            node.args = (logits, target, *node.args[2:])


def _as_made(node: Node) -> Node:
    """The tensor with which a chain of reshapes and casts from 16 bits to fp32 began."""
    views = aten.view.default, aten._unsafe_view.default, aten.reshape.default
    while node.op == "call_function" and (node.target in views or _widens(node)):
        (node,) = node.all_input_nodes
    return node


def _widens(node: Node) -> bool:
    return (
        node.target is aten._to_copy.default
        and node.meta["type"].dtype == torch.float32
        and node.all_input_nodes[0].meta["type"].dtype in PRECISIONS.values()
    )


def split_batch_norm(graph: Graph) -> None:
    """Replace training batch norm by ``local_ops.batch_norm`` and pointwise updates of the running statistics; eval
    batch norm stays."""
    for node in find_nodes(
        graph, aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats
    ):
        arguments, outputs = arguments_of(node), outputs_of(node)
        if not arguments["training"] or any(outputs[i].users for i in (1, 2) if i in outputs):
            continue
        at = Insertion(graph, node)
        x, momentum = arguments["input"], arguments["momentum"]
        stats = TensorType((x.meta["type"].shape[1],), types_of(node)[1].dtype)
        normalized = at(
            local_ops.batch_norm,
            x,
            arguments["weight"],
            arguments["bias"],
            arguments["eps"],
            type=(x.meta["type"], stats, stats),
        )
        y, mean, var = at.items(normalized)
        if 0 in outputs:
            outputs[0].replace_all_uses_with(y)
        else:  # nothing is made of it but running statistics
            graph.fx.erase_node(y)
        for index, old, new in ((3, arguments.get("running_mean"), mean), (4, arguments.get("running_var"), var)):
            if index in outputs:
                decayed, addend = at(aten.mul.Tensor, old, 1 - momentum), at(aten.mul.Tensor, new, momentum)
                outputs[index].replace_all_uses_with(at(aten.add.Tensor, decayed, addend))
        for dead in (*outputs.values(), node):
            graph.fx.erase_node(dead)


def localize_experts(graph: Graph) -> None:
    """Replace ``meshwright::experts`` by ``local_ops.experts``; ``gated`` is given only where it is False, biases only
    where there are any."""
    for node in find_nodes(graph, torch.ops.meshwright.experts.default):
        *args, gated, gate_up_bias, down_bias = arguments_of(node).values()
        kwargs: dict[str, Any] = {} if gated else {"gated": False}
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        kwargs |= {name: bias for name, bias in biases.items() if bias is not None}
        replace_node(graph, node, Insertion(graph, node)(local_ops.experts, *args, type=node.meta["type"], **kwargs))


def even_bags(graph: Graph) -> None:
    """Replace ``embedding_bag`` of a flattened index [bag, rows of a bag] by ``local_ops.embedding_bag``, whose bags
    can be cut."""
    for node in find_nodes(graph, aten.embedding_bag.default, aten.embedding_bag.padding_idx):
        given, outputs = arguments_of(node), outputs_of(node)
        flat, offsets = given["indices"], given["offsets"]
        views = (aten.view.default, aten._unsafe_view.default)  # the latter becomes the former
        index = flat.args[0] if flat.op == "call_function" and flat.target in views else None
        shape: tuple[int, ...] = index.meta["type"].shape if index is not None else ()
        plain = not given["scale_grad_by_freq"] and given["per_sample_weights"] is None
        if set(outputs) != {0} or len(shape) != 2 or not plain or given["include_last_offset"]:
            continue
        if offsets.target is not aten.arange.start_step or offsets.args[:3] != (0, shape[0] * shape[1], shape[1]):
            continue
        padding = given.get("padding_idx")
        bags = Insertion(graph, node)(
            local_ops.embedding_bag, given["weight"], index, given["mode"], -1 if padding is None else padding
        )
        outputs[0].replace_all_uses_with(bags)


def make_gradients_dense(graph: Graph) -> None:
    """Make the gradients of tables that ask for sparse ones (``nn.Embedding(sparse=True)``) dense, with equal values:
    sums over devices and microbatches, and sharded optimizer states, are of dense tensors."""
    tables = aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx
    for node in find_nodes(graph, *tables):
        arguments = arguments_of(node)
        if arguments["sparse"]:
            node.args, node.kwargs = tuple((arguments | {"sparse": False}).values()), {}


def merge_equal_ops(graph: Graph) -> None:
    """Replace floating ops (masks, positions: ``layers``) by earlier ones with the same arguments. Blocks that each
    make the same mask would keep a copy each for their backward."""
    floating, made = floating_ops(graph), dict[tuple[Any, ...], Node]()
    for node in list(graph.fx.nodes):
        if node.name not in floating or not op_name(node).startswith("aten.") or "split" in node.meta:
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        first = made.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)  # a node's repr is its name
        if first is not node:
            replace_node(graph, node, first)


#: the passes, in the order in which they run
PASSES: tuple[Callable[[Graph], None], ...] = (
    drop_unused,
    differentiate_assignments,
    drop_unused,
    join_assignments,
    join_complex_assignments,
    drop_unused,
    drop_copies,
    route_dense_experts,
    localize_experts,
    expand_attention_dropout,
    number_dropouts,
    draw_random_numbers,
    refuse_packed_attention,
    split_cross_entropy,
    keep_loss_dims,
    split_batch_norm,
    make_gradients_dense,
    even_bags,
    refuse_generators,
    spell_out_broadcasts,
    drop_idle_ops,
    normalize_arguments,
    merge_equal_ops,
    drop_unused,
)
