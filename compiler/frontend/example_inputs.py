"""Example inputs as fake tensors at the capture extent, and the batch dim of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from ..ir.graph import Graph

__all__ = ["Inputs", "batch_dims_of", "batch_extent", "fake_inputs", "flat_inputs"]


@dataclass(frozen=True)
class Inputs:
    """Fake inputs, and the source name and the batch dim of each."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]
    #: one per flat leaf of args, kwargs and targets, in this order
    names: tuple[str, ...]
    #: one per flat leaf; None if it has no batch dim
    batch_dims: tuple[int | None, ...]


def fake_inputs(
    mode: FakeTensorMode,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[Any, ...],
    overrides: Mapping[str, int | None] | Sequence[int | None] | None,
    extent: int,
) -> Inputs:
    """Fakes of these inputs with the batch dim at ``extent``; ``overrides`` is ``batch_dims`` of ``capture``,
    ValueError if it does not fit."""
    paths, tree = pytree.tree_flatten_with_path((args, kwargs, targets))
    names = tuple(_source_name(path) for path, _ in paths)
    leaves = [leaf for _, leaf in paths]
    for name, leaf in zip(names, leaves):
        if isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
            what = "a nested tensor" if leaf.is_nested else f"a tensor of {leaf.layout}"
            raise ValueError(
                f"inputs are dense tensors, but got {name}, {what}; pass its indices or lengths and its values as two "
                "tensors, or pad it"
            )
    dims = _batch_dims(names, leaves, overrides)

    def fake(leaf: Any, dim: int | None) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = list(leaf.shape)
        if dim is not None:
            shape[dim] = extent
        with mode:
            return torch.empty(shape, dtype=leaf.dtype, device="cpu", requires_grad=leaf.requires_grad)

    fakes = pytree.tree_unflatten([fake(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)], tree)
    fake_args, fake_kwargs, fake_targets = fakes
    return Inputs(fake_args, fake_kwargs, fake_targets, names, dims)


def flat_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> dict[str, Any]:
    """Source name → leaf, as capture names them."""
    paths, _ = pytree.tree_flatten_with_path((args, kwargs, targets))
    return {_source_name(path): leaf for path, leaf in paths}


def batch_dims_of(
    inputs: Mapping[str, Any], overrides: Mapping[str, int | None] | Sequence[int | None] | None
) -> dict[str, int | None]:
    """Source name → the batch dim of that input (None: it has none), for ``flat_inputs`` and ``batch_dims`` of
    ``capture``; ValueError if they do not fit."""
    return dict(zip(inputs, _batch_dims(tuple(inputs), tuple(inputs.values()), overrides), strict=True))


def batch_extent(graph: Graph, inputs: Mapping[str, Any]) -> int:
    """The batch size of these inputs (source name → leaf) of ``graph``; ValueError if none of them has a batch."""
    for node in graph.placeholders("input"):
        source = node.meta["source"]
        if source.batch_dim is not None and source.name in inputs:
            return int(inputs[source.name].shape[source.batch_dim])
    raise ValueError("global_batch is the batch of the example inputs, but none of them has one; pass global_batch=")


def _source_name(path: Sequence[Any]) -> str:
    """``(args, kwargs, targets)`` key path → "args.0", "kwargs.labels", "targets.0.key"."""
    keys = [str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in path]
    return ".".join([("args", "kwargs", "targets")[int(keys[0])], *keys[1:]])


def _batch_dims(
    names: Sequence[str], leaves: Sequence[Any], overrides: Mapping[str, int | None] | Sequence[int | None] | None
) -> tuple[int | None, ...]:
    given: dict[str, int | None] = {}
    if isinstance(overrides, Mapping):
        given = dict(overrides)
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(f"batch_dims names inputs, but got {unknown}; the inputs are {', '.join(names)}")
    elif overrides is not None:
        if len(overrides) != len(names):
            raise ValueError(
                f"batch_dims has one entry per input ({', '.join(names)}), but got {len(overrides)} entries"
            )
        given = dict(zip(names, overrides, strict=True))
    tensors = {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
    for name, dim in given.items():
        if dim is not None and (name not in tensors or not 0 <= dim < tensors[name].dim()):
            got = f"a tensor of shape {list(tensors[name].shape)}" if name in tensors else "not a tensor"
            raise ValueError(f"batch_dims of {name} is {dim}, but it is {got}; give one of its dims, or None")
    extents = {name: tensors[name].shape[dim] for name, dim in given.items() if dim is not None}
    if len(set(extents.values())) > 1:
        raise ValueError(f"the batch has one extent, but got {extents}; make the example inputs agree")
    candidates = [*extents.values(), *(t.shape[0] for name, t in tensors.items() if t.dim() and name not in given)]
    batch = candidates[0] if candidates else None

    def dim_of(name: str) -> int | None:
        if name in given:
            return given[name]
        return 0 if name in tensors and tensors[name].dim() and tensors[name].shape[0] == batch else None

    return tuple(dim_of(name) for name in names)
