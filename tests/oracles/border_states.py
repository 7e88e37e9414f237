"""The states in which tensors may cross the border between two layers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.compiler.frontend.layers import Layering
from meshwright.compiler.ir.spec import Pair, R, S

__all__ = ["border_states", "is_even"]


def is_even(kind: Any, spec: Sequence[Any], mesh: tuple[int, ...]) -> bool:
    """Whether every cut dim divides."""
    cut = {p.dim: 1 for p in spec if p.is_shard}
    for p, size in zip(spec, mesh):
        if p.is_shard:
            cut[p.dim] *= size
    return all(kind.shape[dim] % size == 0 for dim, size in cut.items())


def border_states(
    layering: Layering, nodes: Mapping[str, Any], mesh: tuple[int, ...], border: int
) -> list[dict[str, Pair]]:
    """What crosses before layer ``border``: per mesh axis all whole, all with their batch cut, or one of them cut
    along another dim."""
    names = layering.crossing[border]
    kinds = [nodes[name].meta["type"] for name in names]
    batch = [layering.batch_dims[name][0] for name in names]
    modes = [[R] * len(names), [R if b is None else S(b) for b in batch]]
    for t, kind in enumerate(kinds):
        for dim in range(len(kind.shape)):
            if dim != batch[t]:
                modes.append([S(dim) if u == t else R for u in range(len(names))])
    found: dict[tuple, dict[str, Pair]] = {}
    for combination in itertools.product(modes, repeat=len(mesh)):
        specs = [tuple(mode[t] for mode in combination) for t in range(len(names))]
        if all(is_even(kind, spec, mesh) for kind, spec in zip(kinds, specs)):
            found[tuple(specs)] = {name: Pair(spec, spec) for name, spec in zip(names, specs)}
    return list(found.values())
