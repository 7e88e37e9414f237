"""Batches as data loaders give them: dataclasses and mappings are containers of tensors, a mapping may be the keyword
arguments of a model.

``torch.export`` and ``torch.utils._pytree`` know tuples, lists, dicts and registered classes. ``register_containers``
registers the classes of the other containers that it finds, once per class.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

__all__ = ["call_arguments", "register_containers"]


def register_containers(*values: Any) -> None:
    """Make containers known to PyTorch that are inside of these values."""
    for value in values:
        kind = type(value)
        if isinstance(value, torch.Tensor) or value is None:
            continue
        if dataclasses.is_dataclass(value) and kind not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
        elif isinstance(value, Mapping) and kind not in pytree.SUPPORTED_NODES:
            _register_mapping(kind)
        register_containers(*_children(value))


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return []


def _register_mapping(kind: type) -> None:
    """A mapping class whose constructor takes a dict, such as Hugging Face's BatchEncoding."""

    def flatten(value: Any) -> tuple[list[Any], list[Any]]:
        return list(value.values()), list(value.keys())

    def flatten_with_keys(value: Any) -> tuple[list[Any], list[Any]]:
        return [(pytree.MappingKey(key), x) for key, x in value.items()], list(value.keys())

    def unflatten(values: Any, keys: list[Any]) -> Any:
        return kind(dict(zip(keys, values, strict=True)))

    pytree.register_pytree_node(
        kind, flatten, unflatten, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )  # fmt: skip


def call_arguments(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of ``model`` in these. args: what it is called with, or one batch.

    A mapping that stands alone gives keyword arguments if all of its keys are parameters of ``forward``, or if it has
    no other place there; else it is the one argument.
    """
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) and args[0]:
        parameters = inspect.signature(model.forward).parameters.values()
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        placed = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
        if names.issuperset(args[0]) or not placed:
            args, kwargs = (), args[0]
    register_containers(*args, *kwargs.values())
    return args, dict(kwargs)
