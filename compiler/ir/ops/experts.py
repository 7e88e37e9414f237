"""A mixture's experts as one op, so that capture sees ``experts(x, index, weight, …)`` and not sorts, histograms and
grouped matmuls.

``meshwright::experts`` is a ``torch.library`` op that runs and differentiates eagerly (by ``local_ops.experts``, on
one device) and is opaque to ``torch.export``. ``transformers`` models are led to it through their own interface for
experts (``register_experts``); hand-written models call ``experts``. ``rewrites`` turns it back into
``local_ops.experts``, which knows how to run on a mesh.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from . import local_ops

__all__ = ["EXPERTS_NAME", "experts", "register_experts"]

EXPERTS_NAME = "meshwright"


@torch.library.custom_op("meshwright::experts", mutates_args=())
def experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    gated: bool = True,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token through its chosen experts, summed by weight; differentiable in all but ``index``.

    x: [T, H]. index: [T, K] int64, the experts of each token (one outside [0, E) contributes nothing). weight: [T, K].
    gate_up: [E, 2F, H], the gate's rows first, or [E, 2, F, H], or [E, F, H] if not ``gated``. down: [E, H, F].
    activation: a key of ``local_ops.ACTIVATIONS``. gate_up_bias: like gate_up without H; down_bias: [E, H]. Returns
    [T, H] of x's dtype.
    """
    return local_ops.experts(
        x, index, weight, gate_up, down, activation, gated, gate_up_bias=gate_up_bias, down_bias=down_bias
    )


@experts.register_fake
def _experts_type(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.activation, ctx.gated, gate_up_bias, down_bias = inputs
    ctx.save_for_backward(*tensors, gate_up_bias, down_bias)


def _experts_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    saved: list[Any] = [None if t is None else t.detach() for t in ctx.saved_tensors]
    leaves = [t.requires_grad_() for k, t in enumerate(saved) if t is not None and k != 1]
    x, index, weight, gate_up, down, up_bias, down_bias = saved
    given = ctx.activation, ctx.gated
    with torch.enable_grad():
        out = local_ops.experts(x, index, weight, gate_up, down, *given, gate_up_bias=up_bias, down_bias=down_bias)
    grads = iter(torch.autograd.grad(out, leaves, grad))
    found = [None if t is None or k == 1 else next(grads) for k, t in enumerate(saved)]
    return *found[:5], None, None, *found[5:]


experts.register_autograd(_experts_backward, setup_context=_save)


def _transformers_experts(module: Any, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The implementation that ``transformers`` calls; experts of an unsupported kind run by its own ``grouped_mm``."""
    gated, normed, parallel = (
        _said(module, name) for name in ("has_gate", "has_post_expert_norm", "_is_expert_parallel")
    )
    activation = _gate_name(module) if gated else _activation_name(module)
    if activation is None or normed or parallel or weight.shape != index.shape:
        interface = sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS
        return interface["grouped_mm"](module, x, index, weight)
    name = "gate_up_proj" if gated else "up_proj"
    up, down = getattr(module, name), module.down_proj
    biases = [getattr(module, f"{name}_bias"), module.down_proj_bias] if module.has_bias else [None, None]
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if gated and not _said(module, "is_concatenated"):  # rows gate, up, gate, up, …: [E, 2F, …] → [E, 2, F, …]
        up = up.unflatten(1, (-1, 2)).transpose(1, 2)
        biases[0] = None if biases[0] is None else biases[0].unflatten(1, (-1, 2)).transpose(1, 2)
    return experts(x, index, weight, up, down, activation, gated, *biases)


#: what experts are where ``transformers`` before 5.20 does not say it
_UNSAID = {"has_gate": True, "is_concatenated": True, "has_post_expert_norm": False, "_is_expert_parallel": False}


def _said(module: Any, name: str) -> bool:
    return bool(getattr(module, name, _UNSAID[name]))


def _activation_name(module: Any) -> str | None:
    name = getattr(module.config, "hidden_act", None) or getattr(module.config, "hidden_activation", None)
    return name if name in local_ops.ACTIVATIONS else None


def _gate_name(module: Any) -> str | None:
    """The name under which the module's gate stands among the activations or gates; None if it is no function of pairs
    of gate and up, or reads tensors of the module."""
    kind = type(module)
    if kind._apply_gate.__name__ == "_default_apply_gate":
        return _activation_name(module) if _said(module, "is_concatenated") else None
    names = [name for name in kind._apply_gate.__code__.co_names if hasattr(module, name)]
    read = {name: getattr(module, name) for name in dict.fromkeys(names)}
    parts = [part for value in read.values() if isinstance(value, nn.Module) for part in value.parameters()]
    if parts or any(isinstance(value, torch.Tensor) for value in read.values()):
        return None
    digest = hashlib.sha256(inspect.getsource(kind._apply_gate).encode()).hexdigest()[:8]
    settings = ", ".join(f"{key}={value}" for key, value in read.items())
    name = f"{kind.__qualname__}@{digest}({settings})"
    if name not in local_ops.GATES:
        apply_gate = functools.partial(kind._apply_gate, SimpleNamespace(**read))
        if not _acts_on_pairs(apply_gate, _said(module, "is_concatenated")):
            return None
        local_ops.GATES[name] = functools.partial(_gate_of_pairs, apply_gate)
    return name


def _gate_of_pairs(apply_gate: Callable[..., Any], gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gate of one column each: these stand in the same order, whether the gate takes halves or interleaved
    columns."""
    gated: torch.Tensor = apply_gate(torch.stack((gate, up), -1)).squeeze(-1)
    return gated


def _acts_on_pairs(apply_gate: Callable[..., Any], concatenated: bool) -> bool:
    """True if the gate of several columns is that of each pair of them."""
    with _disable_current_modes():
        gate, up = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10
        joined = torch.cat((gate, up), -1) if concatenated else torch.stack((gate, up), -1).flatten(-2)
        try:
            return torch.equal(apply_gate(joined), _gate_of_pairs(apply_gate, gate, up))
        except (RuntimeError, AttributeError):
            return False


def register_experts() -> bool:
    """Make ``_experts_implementation = EXPERTS_NAME`` known to ``transformers``; False where it is not loaded or has
    no such interface."""
    moe = sys.modules.get("transformers.integrations.moe")
    interface = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)
    if interface is None:
        return False
    interface.register(EXPERTS_NAME, _transformers_experts)
    return True
