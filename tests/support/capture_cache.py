"""Captures that ``parallelize`` made, kept by a rank: many tests train the same small models, and to trace one takes
longer than its steps. What a capture is, tests of its own say; they do not come here."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import FunctionType
from typing import Any

import torch
from meshwright.compiler.frontend import padding
from meshwright.compiler.ir.graph import Graph
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["keep_captures"]

MOST = 32
PLAIN = (type(None), bool, int, float, str, torch.dtype)
OF_TORCH = frozenset(vars(nn.Module()))


def keep_captures() -> None:
    """From now on ``parallelize`` traces an equal model once in this process."""
    original, kept = padding.capture, dict[Hashable, Graph]()

    def remembered(
        model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, targets: Any = (),
        loss_fn: Any = None, *rest: Any, **options: Any,
    ) -> Graph:  # fmt: skip
        code = _code(model), _code(loss_fn)
        if None in code:
            return original(model, args, kwargs, targets, loss_fn, *rest, **options)
        key = (*code, _structure(model), _kinds((args, dict(kwargs or {}), targets), (rest, options)))
        if key not in kept:
            if len(kept) == MOST:
                del kept[next(iter(kept))]
            kept[key] = original(model, args, kwargs, targets, loss_fn, *rest, **options)
        return kept[key]

    padding.capture = remembered


def _code(found: object) -> Hashable:
    """What runs, if it is known to depend on nothing but tensors: models of the zoo, modules whose attributes are plain
    values, functions of a module."""
    if found is None:
        return "nothing"
    if isinstance(found, FunctionType):
        return found if found.__closure__ is None else None
    if not isinstance(found, nn.Module):
        return None
    if hasattr(found, "zoo"):
        return found.zoo
    rows = []
    for module in found.modules():
        own = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
        hooked = any(vars(module)[name] for name in OF_TORCH if name.endswith("hooks"))
        if hooked or not all(map(_is_plain, own.values())):
            return None
        rows.append((type(module), repr(own), repr(sorted(module._non_persistent_buffers_set))))
    return tuple(rows)


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if type(value) in (tuple, list) else isinstance(value, PLAIN)


def _structure(model: nn.Module) -> Hashable:
    """All that a capture may depend on of a model whose code is known."""
    number: dict[int, int] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    rows = [(n, x.shape, x.dtype, x.requires_grad, number.setdefault(id(x), len(number))) for n, x in tensors]
    return repr(model), tuple(module.training for module in model.modules()), tuple(rows)


def _kinds(inputs: Any, options: Any) -> Hashable:
    """What a capture may depend on of these. Without ``batch_dims`` it looks at no batch size, only at which tensors
    have the first one's as their dim 0."""
    leaves, spec = pytree.tree_flatten(inputs)
    free = not options[0] and options[1].get("batch_dims") is None
    batch = next((x.shape[:1] for x in leaves if free and isinstance(x, torch.Tensor)), None)

    def kind(x: object) -> Hashable:
        if not isinstance(x, torch.Tensor):
            return repr(x)
        alike = x.dim() > 0 and x.shape[:1] == batch
        return alike, x.shape[alike:], x.dtype

    return str(spec), tuple(map(kind, leaves)), repr(options)
