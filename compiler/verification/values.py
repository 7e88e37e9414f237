"""Weights and batches for a check: the model's own where they say enough, random ones where they do not.

A tensor of equal values (a bias of zeros, the scale of a norm, a table that begins at zero) would hide what is wrong
with whatever it is multiplied by, so noise is added to it. Weights on the meta device are made up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..ir.graph import Graph, Source, TensorType

__all__ = ["batch_of", "buffers_of", "chunked", "weights_of"]

NOISE = 0.1


def weights_of(model: nn.Module, graph: Graph, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Parameters by name, floats in ``dtype`` (None: each in its own), none of them constant."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        source.name: _weight(source.name, parameters[source.name], dtype) for source in _sources(graph, "parameter")
    }


def buffers_of(model: nn.Module, graph: Graph, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Buffers by name, floats in ``dtype`` (None: each in its own), otherwise as they are; zeros (or ones, for
    variances) on the meta device."""
    buffers, out = dict(model.named_buffers(remove_duplicate=False)), {}
    for source in _sources(graph, "buffer"):
        x = buffers[source.name].detach()
        if x.is_meta:
            fill = torch.ones if source.name.endswith("var") else torch.zeros
            x = fill(x.shape, dtype=x.dtype)
        out[source.name] = as_dtype(x, dtype)
    return out


def batch_of(
    graph: Graph, inputs: Mapping[str, Any], microbatches: int, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Source name → a batch of ``microbatches`` times the graph's extent, made of the example's rows; the rows that it
    lacks are drawn from it, floats with noise, so that no two microbatches are equal."""
    out = {}
    for node in graph.placeholders("input"):
        source, kind = node.meta["source"], node.meta["type"]
        shape = list(kind.shape)
        if source.batch_dim is not None:
            shape[source.batch_dim] *= microbatches
        out[source.name] = as_dtype(_rows(source, TensorType(tuple(shape), kind.dtype), inputs[source.name]), dtype)
    return out


def chunked(graph: Graph, batch: Mapping[str, Tensor], microbatches: int) -> list[dict[str, Tensor]]:
    """The microbatches: contiguous pieces of what has a batch, the rest whole."""
    pieces: dict[str, list[Tensor]] = {}
    for source in _sources(graph, "input"):
        x, dim = batch[source.name], source.batch_dim
        pieces[source.name] = [x] * microbatches if dim is None else list(x.chunk(microbatches, dim))
    return [{name: several[i] for name, several in pieces.items()} for i in range(microbatches)]


def as_dtype(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy on the CPU; floats in ``dtype``, if one is given, and complex numbers of two of these."""
    return x.detach().to("cpu", _dtype_of(x, dtype), copy=True)


def _dtype_of(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or not (x.is_floating_point() or x.is_complex()):
        return x.dtype
    return dtype.to_complex() if x.is_complex() else dtype


def _sources(graph: Graph, kind: str) -> list[Source]:
    return [node.meta["source"] for node in graph.placeholders(kind)]


def _generator(name: str) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    return torch.Generator().manual_seed(seed)


def _weight(name: str, given: Tensor, dtype: torch.dtype | None) -> Tensor:
    generator = _generator(name)
    if given.is_meta:
        noise = torch.randn(given.shape, generator=generator, dtype=_dtype_of(given, dtype))
        return noise / max(1, given.shape[-1]) ** 0.5 if given.ndim > 1 else 1 + NOISE * noise
    x = as_dtype(given, dtype)
    if (x.is_floating_point() or x.is_complex()) and x.numel() and bool((x == x.reshape(-1)[0]).all()):
        x += NOISE * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return x


def _rows(source: Source, kind: TensorType, given: Any) -> Tensor:
    generator, dim = _generator(source.name), source.batch_dim
    if given.is_meta:
        if kind.is_float:
            wide = torch.complex128 if kind.dtype.is_complex else torch.float64
            return torch.randn(kind.shape, generator=generator, dtype=wide)
        return torch.randint(0, 2, kind.shape, generator=generator).to(kind.dtype)
    if dim is None:
        return given
    have, need = given.shape[dim], kind.shape[dim]
    if have >= need:
        return given.narrow(dim, 0, need)
    rows = torch.arange(need)
    rows[have:] = torch.randint(0, have, (need - have,), generator=generator)
    out = given.detach().cpu().index_select(dim, rows)
    if kind.is_float:
        more = out.narrow(dim, have, need - have)
        wide = torch.complex128 if out.is_complex() else torch.float64
        more += NOISE * torch.randn(more.shape, generator=generator, dtype=wide).to(out.dtype)
    return out
