"""The pairs in which parameters, inputs, buffers and constants may lie, and in which cases: ``problem._Builder._pairs``
for all variants at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.fx import Node

from .problem import steady
from .spec import P, Pair, R, S
from .variants import Variants

__all__ = ["placeholder_pairs", "wanted_pairs"]

Where = dict[Pair, np.ndarray]  # bool [num] by pair


def wanted_pairs(consumers: Sequence[tuple[np.ndarray, Sequence[Pair]]]) -> Where:
    """Where some offered choice wants each pair. consumers: (bool [num, choices], the pair that each choice wants)."""
    found: Where = {}
    for offered, pairs in consumers:
        columns: dict[Pair, list[int]] = {}
        for c, pair in enumerate(pairs):
            columns.setdefault(pair, []).append(c)
        for pair, at in columns.items():
            where = np.asarray(offered[:, at].any(axis=1))
            found[pair] = found[pair] | where if pair in found else where
    return found


def placeholder_pairs(variants: Variants, node: Node, wanted: Where, roles: Sequence[str | None]) -> Where:
    """The pairs in which a placeholder may lie, given those that its consumers want."""
    source, axes = node.meta["source"], variants.axes
    everywhere, whole = np.ones(variants.num, dtype=bool), (R,) * axes
    if source.kind == "parameter" and source.requires_grad and node.name in variants.layering.needs_grad:
        pairs = {p: w for p, w in wanted.items() if all(steady(v, c) for v, c in zip(p.value, p.cotangent))}
        return pairs | {Pair(whole, whole): everywhere, Pair(whole, (P,) * axes): everywhere}
    if any(r.kind == "buffer" and r.name == source.name for r in variants.source.results):
        return {Pair(whole, whole): everywhere}
    frozen, pairs = source.kind == "parameter", {Pair(whole, whole): everywhere}
    for pair, where in wanted.items():
        if not any(v.is_partial for v in pair.value):
            own = Pair(pair.value, pair.value if frozen else whole)
            pairs[own] = pairs[own] | where if own in pairs else where
    if source.kind == "input" and source.batch_dim is not None:
        return _by_role(pairs, source.batch_dim, roles)
    return pairs


def _by_role(pairs: Where, batch_dim: int, roles: Sequence[str | None]) -> Where:
    """Those that the roles allow where there are any, else all."""
    allowed = [
        all(role is None or (placement == S(batch_dim)) == (role == "data") for role, placement in zip(roles, p.value))
        for p in pairs
    ]
    some = np.zeros(len(next(iter(pairs.values()))), dtype=bool)
    for where, ok in zip(pairs.values(), allowed):
        if ok:
            some = some | where
    return {p: where if ok else where & ~some for (p, where), ok in zip(pairs.items(), allowed)}
