"""A mixture's experts as one op, so that capture sees ``experts(x, index, weight, …)`` and not sorts, histograms and
grouped matmuls.

``meshwright::experts`` is a ``torch.library`` op that runs and differentiates eagerly (by ``local_ops.experts``, on
one device) and is opaque to ``torch.export``. ``transformers`` models are led to it through their own interface for
experts (``register_experts``); hand-written models call ``experts``. ``rewrites`` turns it back into
``local_ops.experts``, which knows how to run on a mesh.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

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
) -> torch.Tensor:
    """Each token through its chosen experts, summed by weight; differentiable in all but ``index``.

    x: [T, H]. index: [T, K] int64, the experts of each token (one outside [0, E) contributes nothing). weight: [T, K].
    gate_up: [E, 2F, H], the gate's rows first, or [E, F, H] if not ``gated``. down: [E, H, F]. activation: a key of
    ``local_ops.ACTIVATIONS``. Returns [T, H] of x's dtype.
    """
    return local_ops.experts(x, index, weight, gate_up, down, activation, gated)


@experts.register_fake
def _experts_type(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.activation, ctx.gated = inputs
    ctx.save_for_backward(*tensors)


def _experts_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, index, weight, gate_up, down = (t.detach() for t in ctx.saved_tensors)
    leaves = [t.requires_grad_() for t in (x, weight, gate_up, down)]
    with torch.enable_grad():
        out = local_ops.experts(x, index, weight, gate_up, down, ctx.activation, ctx.gated)
    dx, dweight, dgate_up, ddown = torch.autograd.grad(out, leaves, grad)
    return dx, None, dweight, dgate_up, ddown, None, None


experts.register_autograd(_experts_backward, setup_context=_save)


def _transformers_experts(module: Any, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The implementation that ``transformers`` calls; experts of an unsupported kind run by its own ``grouped_mm``."""
    activation = getattr(module.config, "hidden_act", None) or getattr(module.config, "hidden_activation", None)
    plain = (
        module.has_gate
        and module.is_concatenated
        and not (module.has_bias or module.is_transposed or module.has_post_expert_norm)
    )
    default_gate = type(module)._apply_gate.__name__ == "_default_apply_gate"
    if plain and default_gate and activation in local_ops.ACTIVATIONS and not module._is_expert_parallel:
        return experts(x, index, weight, module.gate_up_proj, module.down_proj, activation)
    interface = sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS
    return interface["grouped_mm"](module, x, index, weight)


def register_experts() -> bool:
    """Make ``_experts_implementation = EXPERTS_NAME`` known to ``transformers``; False where it is not loaded or has
    no such interface."""
    moe = sys.modules.get("transformers.integrations.moe")
    interface = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)
    if interface is None:
        return False
    interface.register(EXPERTS_NAME, _transformers_experts)
    return True
