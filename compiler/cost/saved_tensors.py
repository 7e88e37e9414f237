"""The bytes that autograd saves for backward, with and without recomputation of layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import numpy as np
from torch.fx import Node

from ...costmodel.compute import writes_scores
from ..ir.graph import op_name, output_of, tensor_operands, types_of
from ..plan.recompute import Recompute
from ..rules import MeshChoice, rule_for
from .pricing import MeshPricer

__all__ = ["extra_saved_bytes", "saved_bytes", "saved_tensors"]

Saved = set[str | tuple[str, int]]


def saved_tensors(ops: Sequence[Node], grad: Collection[str]) -> Saved:
    """Storage roots that some of ``ops`` keeps for its backward: names, and (name, k) for outputs without a getitem."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        return root.get(name, name)

    for node in ops:
        if op_name(node) != "getitem" and rule_for(node).cost_kind in ("view", "free") and tensor_operands(node):
            root[node.name] = find(tensor_operands(node)[0].name)
    kept: Saved = set()
    for node in ops:
        if op_name(node) == "getitem" or node.name not in grad:
            continue
        for side, k in rule_for(node).saves(node):
            if side == "input":
                kept.add(find(tensor_operands(node)[k].name))
            else:
                kept.add((node.name, k))
    for node in ops:  # a getitem's storage is its producer's k-th output
        if op_name(node) == "getitem" and node.name in kept:
            producer, index = output_of(node)
            kept.add((producer.name, index))
    return kept


def saved_bytes(
    node: Node,
    choices: Sequence[MeshChoice],
    pricer: MeshPricer,
    saved: Saved,
    plain: Saved,
    grad: Collection[str],
    members: Collection[str],
    recompute: Recompute,
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes on one device under each choice: (kept per microbatch in flight, held while the op's layer is recomputed).

    saved: of ``saved_tensors``; plain: what of it is kept because ops save it whose layer is not recomputed. members:
    the nodes of the section that the op is in.
    """
    kept, held = np.zeros(len(choices)), np.zeros(len(choices))
    flows = node.name in grad
    heavy = flows and node.name in recompute.heavy
    for k, kind in enumerate(types_of(node)):
        stays = (
            heavy or (flows and _is_in(plain, node, k)) or (bool(recompute) and _crosses(node, k, members, recompute))
        )
        if stays or (flows and _is_in(saved, node, k)):
            local = np.array([pricer.local_bytes(kind, c.outputs[k].value) for c in choices])
            kept, held = (kept + local, held) if stays else (kept, held + local)
    if flows and (extra := extra_saved_bytes(node, pricer, grad)):
        size = np.array([extra * choice.work_share for choice in choices])  # what the work is on, whatever comes out
        stays = heavy or not recompute or node.name in recompute.plain
        kept, held = (kept + size, held) if stays else (kept, held + size)
    return kept, held


def _is_in(saved: Saved, node: Node, k: int) -> bool:
    return (node.name, k) in saved or (k == 0 and node.name in saved)


def extra_saved_bytes(node: Node, pricer: MeshPricer, grad: Collection[str]) -> float:
    """Whole bytes that the op keeps beside operands and outputs."""
    extra = rule_for(node).temporary_bytes(node)
    if rule_for(node).cost_kind == "attention":
        queries, keys, _, *masks = tensor_operands(node)
        learned = pricer.device.kind == "cpu" and any(mask.name in grad for mask in masks)  # no fused kernel has that
        if learned or writes_scores(pricer.device):
            q, k = queries.meta["type"], keys.meta["type"]
            extra += prod(q.shape[:-1]) * k.shape[-2] * q.dtype.itemsize  # the probabilities
    return extra


def _crosses(node: Node, k: int, members: Collection[str], recompute: Recompute) -> bool:
    """True if output ``k`` is kept because a later layer of this section is recomputed from it."""
    layer_of, plain, outputs = recompute.layer_of, recompute.plain, [node]
    if isinstance(node.meta["type"], tuple):
        outputs = [user for user in node.users if op_name(user) == "getitem" and output_of(user)[1] == k]
    return any(
        out.name in recompute.kept and layer_of.get(user.name, layer_of[out.name]) != layer_of[out.name]
        for out in outputs
        for user in out.users
        if user.name in members and user.name not in plain
    )
