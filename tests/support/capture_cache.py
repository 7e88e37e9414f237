"""Captures of zoo models that ``parallelize`` made, kept by a rank: many tests train the same small models, and to
trace one takes longer than its steps. What a capture is, tests of its own say; they do not come here."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from meshwright.compiler.frontend import padding
from meshwright.compiler.ir.graph import Graph
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["keep_captures"]

MOST = 32


def keep_captures() -> None:
    """From now on ``parallelize`` traces an equal zoo model once in this process."""
    original, kept = padding.capture, dict[Hashable, Graph]()

    def remembered(
        model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, targets: Any = (),
        loss_fn: Any = None, *rest: Any, **options: Any,
    ) -> Graph:  # fmt: skip
        if not hasattr(model, "zoo") or loss_fn is not None:
            return original(model, args, kwargs, targets, loss_fn, *rest, **options)
        key = (_structure(model), _kinds((args, dict(kwargs or {}), targets), (rest, options)))
        if key not in kept:
            if len(kept) == MOST:
                del kept[next(iter(kept))]
            kept[key] = original(model, args, kwargs, targets, loss_fn, *rest, **options)
        return kept[key]

    padding.capture = remembered


def _structure(model: nn.Module) -> Hashable:
    """All that a capture may depend on of a model whose function and settings ``model.zoo`` names."""
    number: dict[int, int] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    rows = [(n, x.shape, x.dtype, x.requires_grad, number.setdefault(id(x), len(number))) for n, x in tensors]
    return model.zoo, repr(model), tuple(module.training for module in model.modules()), tuple(rows)


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
