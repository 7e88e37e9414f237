"""Rules of ops that read or write by index: gathers, scatters, ``x[indices]``, embeddings.

Dims that no index names pass through. A dim of the indices may be cut too: each device then looks up its own indices
in the whole table, and gives an addend of the table's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import tensor_operands, types_of
from ..ir.ops.local_ops import embedding_shard
from . import register, whole
from .base import FREE_GRAD, ROW, WHOLE, AxisChoice, Rule, shard
from .common import argument, axes_of, cut, random_float
from .view import DimsRule, Track, nonnegative_dim, operand_shapes, tracks_except

__all__ = ["EmbeddingRule"]


def _scatter_into(node: Node) -> list[Track]:
    """slice_scatter, select_scatter: (x, source, dim, …)."""
    first, source = operand_shapes(node)
    fixed = nonnegative_dim(argument(node, "dim"), len(first))
    selects = len(source) < len(first)
    return [
        Track((d, d - (selects and d > fixed)), (d,), extent)
        for d, extent in enumerate(first)
        if d != fixed and extent > 1
    ]


def _index_select(node: Node) -> list[Track]:
    x, index = operand_shapes(node)
    dim = nonnegative_dim(argument(node, "dim"), len(x))
    tracks = [Track((d, None), (d,), extent) for d, extent in enumerate(x) if d != dim and extent > 1]
    return tracks + ([Track((None, 0), (dim,), index[0])] if index and index[0] > 1 else [])


def _gather(node: Node) -> list[Track]:
    x, index = operand_shapes(node)
    dim = nonnegative_dim(argument(node, "dim"), len(x))
    tracks = []
    for d, extent in enumerate(index):
        if extent > 1 and (d == dim or x[d] == extent):
            tracks.append(Track((None if d == dim else d, d), (d,), extent))
    return tracks


def _index(node: Node) -> list[Track]:
    """``x[indices]``: dims that no index names pass through; dims of the indices themselves cut them and leave ``x``
    whole."""
    x, *indices = operand_shapes(node)
    given = list(node.args[1])  # type: ignore[arg-type]
    operands = tensor_operands(node)[1:]
    if any(operand.meta["type"].dtype in (torch.bool, torch.uint8) for operand in operands):
        return []
    named = [d for d, index in enumerate(given) if index is not None]
    broadcast = torch.broadcast_shapes(*indices)
    adjacent = named == list(range(named[0], named[-1] + 1))
    at = named[0] if adjacent else 0
    kept = [d for d in range(len(x)) if d not in named]
    places = [p for p in range(len(kept) + len(broadcast)) if not at <= p < at + len(broadcast)]
    tracks = [Track((d, *(None for _ in indices)), (place,), x[d]) for d, place in zip(kept, places) if x[d] > 1]
    for j, extent in enumerate(broadcast):
        if extent > 1:
            cut = [j - (len(broadcast) - len(shape)) for shape in indices]
            dims = (c if c >= 0 and shape[c] == extent else None for c, shape in zip(cut, indices))
            tracks.append(Track((None, *dims), (at + j,), extent))
    return tracks


def _search(node: Node) -> list[Track]:
    """searchsorted: rows of both, and the values of each row; the sorted numbers of a row are used whole."""
    (*rows, _), values = operand_shapes(node)[:2]
    inner = len(values) - 1
    tracks = [Track((d, d), (d,), extent) for d, extent in enumerate(rows) if extent > 1]
    free = [inner] if rows else range(len(values))
    return tracks + [Track((None, d), (d,), values[d]) for d in free if d >= 0 and values[d] > 1]


def _index_bound(node: Node) -> int:
    """The least extent that an index of ``index.Tensor`` meets."""
    x = operand_shapes(node)[0]
    return min(x[d] for d, index in enumerate(node.args[1]) if index is not None)  # type: ignore[arg-type]


def _extent_of_dim(node: Node) -> int:
    x = operand_shapes(node)[0]
    return x[nonnegative_dim(int(node.args[1]), len(x))]  # type: ignore[arg-type]


register("aten.slice_scatter.default", "aten.select_scatter.default")(DimsRule(_scatter_into))
register("aten.index_select.default")(DimsRule(_index_select, linear=(0,), saves=(1,), high=_extent_of_dim))
register("aten.gather.default")(DimsRule(_gather, linear=(0,), saves=(1,), high=_extent_of_dim))
register("aten.index.Tensor")(DimsRule(_index, linear=(0,), saves=(1, 2, 3, 4), high=_index_bound))
register("aten.scatter.src", "aten.scatter.value")(
    DimsRule(tracks_except("dim"), linear=(), saves=(1,), high=_extent_of_dim)
)
register("aten.searchsorted.Tensor")(DimsRule(_search, linear=()))
register("aten.one_hot.default")(
    DimsRule(
        lambda node: [Track((d,), (d,), extent) for d, extent in enumerate(operand_shapes(node)[0]) if extent > 1],
        linear=(),
        high=lambda node: types_of(node)[0].shape[-1],
    )
)


class _IndexAddRule(DimsRule):
    """The rule of ops that add values at places along one dim: other dims are free, and the values contract."""

    def __init__(self, tracks: Callable[[Node], list[Track]]) -> None:
        super().__init__(tracks, linear=(), saves=(1,), high=_extent_of_dim)

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """Also "values": each device adds its own to an addend of the whole."""
        index, source = (operand.meta["type"].shape for operand in tensor_operands(node)[1:])
        dim = nonnegative_dim(argument(node, "dim"), len(source))
        if not index or index[-1 if len(index) == 1 else dim] != source[dim] or source[dim] == 1:
            return super().axis_choices(node)
        place = 0 if len(index) == 1 else dim
        values = AxisChoice("values", (ROW, shard(place), shard(dim)), (ROW,), source[dim])
        return (*super().axis_choices(node), values)


def _index_add(node: Node) -> list[Track]:
    x, _, source = operand_shapes(node)
    fixed = nonnegative_dim(argument(node, "dim"), len(x))
    return [Track((d, None, d), (d,), extent) for d, extent in enumerate(x) if d != fixed and source[d] == extent > 1]


register("aten.index_add.default")(_IndexAddRule(_index_add))
register("aten.scatter_add.default")(_IndexAddRule(tracks_except("dim")))


# ---- Table look-ups: the index's dims are free, the hidden dim is free, and the rows contract


class EmbeddingRule(Rule):
    """The rule of a look-up: weight [rows, hidden], index [b0, b1, …].

    If rows are cut, each row is on one device and the others contribute zeros.

    ``scale_grad_by_freq`` counts over the whole index and table: only the hidden dim may then be cut.
    """

    cost_kind = "embedding"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "b0", "b1", …, "vocab", "hidden", and "grad": all look up whole, each has a share of the gradient."""
        weight, index = (operand.meta["type"].shape for operand in tensor_operands(node))
        choices = [whole(node)]
        if not argument(node, "scale_grad_by_freq"):
            choices += [cut(node, f"b{d}", extent, [None, d], [d]) for d, extent in enumerate(index) if extent > 1]
            choices.append(cut(node, "vocab", weight[0], [0, None], [None]))
        choices.append(cut(node, "hidden", weight[1], [1, None], [len(index)]))
        choices.append(AxisChoice("grad", (FREE_GRAD, WHOLE), (FREE_GRAD,), extent=1, splits_work=False))
        return tuple(choices)

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """``embedding_shard`` where rows are cut."""
        axes = axes_of(labels, "vocab")
        if not axes:
            return super().localize(node, labels, mesh_shape)
        weight, index = tensor_operands(node)
        return embedding_shard, (weight, index, argument(node, "padding_idx"), False, False), {"vocab_axes": axes}

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The index."""
        return (("input", 1),)

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor]:
        """An index within the table."""
        weight, index = tensor_operands(node)
        kind = index.meta["type"]
        rows = weight.meta["type"].shape[0]
        return [random_float(weight, generator), torch.randint(0, rows, kind.shape, generator=generator).to(kind.dtype)]


register("aten.embedding.default")(EmbeddingRule())
