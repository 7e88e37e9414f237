"""The bytes that autograd saves for backward, with and without recomputation of layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from torch.fx import Node

from ...costmodel.compute import writes_scores
from ..ir.graph import op_name, output_of, tensor_operands, types_of
from ..plan.recompute import Recompute
from ..rules import MeshChoice, rule_for
from ..rules.common import argument
from .pricing import MeshPricer

__all__ = [
    "Saved",
    "SavedByReaders",
    "copied_operands",
    "extra_saved_bytes",
    "is_saved",
    "kept_operands",
    "saved_by_readers",
    "saved_bytes",
    "saved_of",
    "saved_tensors",
    "storage_roots",
]

Saved = set[str | tuple[str, int]]


class SavedByReaders(NamedTuple):
    """Results that stay for their readers alone (names, and (name, k)), and of each the one tensor that these save,
    itself or a view of it, with the bytes that stay per byte of it: all of the result, if it is a part."""

    results: Saved
    read: dict[str, float]


def saved_tensors(ops: Sequence[Node], grad: Collection[str]) -> Saved:
    """Storage roots that some of ``ops`` keeps for its backward: names, and (name, k) for outputs without a getitem."""
    root, kept = storage_roots(ops), Saved()
    for node in ops:
        for side, k in saved_of(node, grad):
            if side == "input":
                name = tensor_operands(node)[k].name
                kept.add(root.get(name, name))
            else:
                kept.add((node.name, k))
    for node in ops:  # a getitem's storage is its producer's k-th output
        if op_name(node) == "getitem" and node.name in kept:
            producer, index = output_of(node)
            kept.add((producer.name, index))
    return kept


def saved_of(node: Node, grad: Collection[str]) -> tuple[tuple[str, int], ...]:
    """What ``node`` keeps for its backward: ("input", k) and ("output", k). A factor of a product is kept where another
    one has a gradient."""
    if node.name not in grad or op_name(node) == "getitem":
        return ()
    rule, operands = rule_for(node), tensor_operands(node)
    saves = rule.saves(node)
    if not rule.is_product(node):
        return saves
    factors = {k for side, k in saves if side == "input" and operands[k].name in grad}
    return tuple((side, k) for side, k in saves if side == "output" or factors - {k})


def storage_roots(ops: Sequence[Node]) -> dict[str, str]:
    """The tensor whose storage each of ``ops`` that is a view of another's result shares."""
    root: dict[str, str] = {}
    for node in ops:
        if op_name(node) == "getitem":  # of what an op made, or a view as the others that the op makes of its operand
            if (source := root.get(output_of(node)[0].name)) is not None:
                root[node.name] = source
            continue
        if rule_for(node).cost_kind not in ("view", "free"):
            continue
        layout = node.meta.get("layout")
        if tensor_operands(node) and not (layout is not None and layout.copies_forward):
            first = tensor_operands(node)[0].name
            root[node.name] = root.get(first, first)
    return root


def kept_operands(ops: Sequence[Node], grad: Collection[str]) -> dict[str, set[int]]:
    """By op the operands of which it keeps its copy, where it wants another layout: those that it saves. An op that
    makes views of what another saves as its result keeps its copy if a view is saved."""
    views, kept = storage_roots(ops), {node.name: _saved_operands(node, grad) for node in ops}
    own = {node.name for node in ops if ("output", 0) in saved_of(node, grad)}
    for node in reversed(ops):
        if views.get(node.name) in own and any(_reads(user, kept.get(user.name, ()), node) for user in node.users):
            kept[node.name].add(0)
    return kept


def saved_by_readers(ops: Sequence[Node], grad: Collection[str], recompute: Recompute) -> SavedByReaders:
    """The results of ``ops`` of which one tensor is saved, by all that read it, and no layer of these is run again.
    Where such a reader wants another layout, its copy alone stays."""
    views, operands = storage_roots(ops), {node.name: _saved_operands(node, grad) for node in ops}
    by_root: dict[str, list[Node]] = {}
    for node in ops:
        by_root.setdefault(views.get(node.name, node.name), []).append(node)
    found = SavedByReaders(set(), {})
    for root, (maker, *others) in by_root.items():
        if maker.name != root or isinstance(maker.meta["type"], tuple):
            continue
        producer, index = output_of(maker)
        readers = {one: [user for user in one.users if user.name in operands] for one in (maker, *others)}
        saved = {one: [_reads(user, operands[user.name], one) for user in readers[one]] for one in readers}
        last, *more = [one for one, flags in saved.items() if any(flags)] or [maker]
        if more or not (saved[last] and all(saved[last])) or ("output", index) in saved_of(producer, grad):
            continue
        if not recompute or recompute.plain.issuperset(one.name for one in (*readers, *readers[last])):
            found.results.update((root, (producer.name, index)))
            found.read[last.name] = max(1.0, types_of(maker)[0].numel / max(1, types_of(last)[0].numel))
    return found


def _saved_operands(node: Node, grad: Collection[str]) -> set[int]:
    return {k for side, k in saved_of(node, grad) if side == "input"}


def _reads(user: Node, operands: Collection[int], node: Node) -> bool:
    """True if ``node`` is one of these operands of an op."""
    return any(tensor_operands(user)[k] is node for k in operands)


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
            heavy or (flows and is_saved(plain, node, k)) or (bool(recompute) and _crosses(node, k, members, recompute))
        )
        if stays or (flows and is_saved(saved, node, k)):
            local = np.array([pricer.local_bytes(kind, c.outputs[k].value) for c in choices])
            kept, held = (kept + local, held) if stays else (kept, held + local)
    if heavy:
        operands = tensor_operands(node)
        for place, choice in enumerate(choices):
            own = copied_operands(node, choice)
            kept[place] += sum(pricer.operand_bytes(operands[k], choice.inputs[k].value) for k in own)
    beside = kept if heavy or not recompute or node.name in recompute.plain else held
    if flows and (extra := extra_saved_bytes(node, pricer, grad)):
        beside += np.array([extra * choice.work_share for choice in choices])  # what the work is on, whatever comes out
    for k, factor in rule_for(node).kept_copies(node) if flows else ():
        operand = tensor_operands(node)[k]
        beside += factor * np.array([pricer.operand_bytes(operand, choice.inputs[k].value) for choice in choices])
    return kept, held


def copied_operands(node: Node, choice: MeshChoice) -> tuple[int, ...]:
    """The operands of which an op keeps copies of its own, which stay where its layer is run again but it is not: a
    ring has blocks of keys and values, and under a causal mask other queries (``ring_attention``)."""
    if rule_for(node).cost_kind != "attention" or "ring" not in choice.labels:
        return ()
    return (0, 1, 2) if argument(node, "is_causal") else (1, 2)


def is_saved(saved: Saved, node: Node, k: int) -> bool:
    """True if output ``k`` of an op is among saved tensors."""
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
