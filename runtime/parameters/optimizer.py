"""Optimizers over local shards, and the norm of a gradient that many ranks hold.

The user's factory gets plain local leaves that carry ``global_name`` and ``global_shape``; torch.optim is elementwise,
so each rank updates its shards alone. An optimizer that looks at a tensor as a whole (a factorised moment, an
orthogonalised matrix, a trust ratio) gets whole parameters or is refused.

Dynamic loss scaling for fp16, whose smallest gradients would be zero otherwise (Micikevicius et al. 2018, 3.2).

    backward   from S times the loss; gradients are divided by S where they become fp32
    update     left out on every rank where any gradient on any rank is not finite, and S is halved then
    growth     S doubles after ``growth_interval`` updates in a row

With the constants of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...compiler.plan.cross_mesh import MeshLayout
from ...compiler.plan.plan import Plan

__all__ = [
    "LossScale", "OptimizerFactory", "clip_gradients", "gradient_norm", "make_optimizer", "name_parameter",
    "optimizer_name", "sharded_parameters",
]  # fmt: skip


OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

# these compute something from a whole tensor (row and column means, an orthogonal factor, a norm per tensor)
_WHOLE_TENSOR = ("adafactor", "muon", "shampoo", "soap", "lamb", "lars", "galore", "came", "kfac")
_WHOLE_MODEL = ("lbfgs", "sam", "dadapt", "prodigy")  # these compute something from all parameters together


def name_parameter(leaf: nn.Parameter, name: str, shape: Sequence[int]) -> nn.Parameter:
    """Attach ``global_name`` and ``global_shape`` to a local leaf."""
    leaf.global_name, leaf.global_shape = name, torch.Size(shape)  # type: ignore[attr-defined]
    return leaf


def sharded_parameters(plan: Plan) -> list[str]:
    """The parameters of which some device holds only a part."""
    names: dict[str, None] = {}
    for stage in plan.stages:
        for chunk in stage.chunks:
            for name, residency in chunk.parameters.items():
                if any(p.is_shard and size > 1 for p, size in zip(residency.optimizer, stage.mesh_shape, strict=True)):
                    names[name] = None
    return list(names)


def make_optimizer(factory: OptimizerFactory, parameters: Iterable[nn.Parameter], plan: Plan) -> torch.optim.Optimizer:
    """A real optimizer on every rank, over a dummy parameter where the rank owns none, so that schedulers work
    everywhere.

    Raises ValueError, alike on every rank, for an optimizer that needs more than a rank holds.
    """
    owned_parameters = list(parameters)
    if not owned_parameters:
        owned_parameters = [name_parameter(nn.Parameter(torch.empty(0, 0)), "", (0, 0))]
    optimizer = factory(owned_parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer= takes a function from parameters to a torch optimizer, but got {type(optimizer).__name__}"
        )
    names = {cls.__name__.lower() for cls in type(optimizer).__mro__[:-1] if cls is not torch.optim.Optimizer}
    title = type(optimizer).__name__
    if any(name.startswith(_WHOLE_MODEL) for name in names):
        raise ValueError(
            f"an optimizer must update each parameter by itself, but got {title}, which needs all of them at once; "
            "use SGD, Adam or AdamW"
        )
    if "sparseadam" in names:
        raise ValueError(
            "all gradients are dense, but got SparseAdam, which takes sparse ones only; use Adam or Adagrad"
        )
    sharded = sharded_parameters(plan)
    if sharded and any(word in name for name in names for word in _WHOLE_TENSOR):
        raise ValueError(
            f"{title} needs whole parameters, but got {len(sharded)} that this plan shards ({', '.join(sharded[:3])}); "
            "use an elementwise optimizer such as AdamW, or a plan without tensor parallelism"
        )
    return optimizer


def gradient_norm(
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, MeshLayout],
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    group: Any = None,
    alone: bool = False,
) -> torch.Tensor:
    """The 2-norm over all ranks' gradients in ``dtype`` (0-d); every unique element counts once. Collective over the
    group, by default the world.

    parameters: those that this rank's stage owns (tied copies left out), with the layout of each. rank: the one whose
    place in the layouts this rank has. alone: no other rank has any.
    """
    grads = [
        leaf.grad.to(dtype)
        for name, leaf in parameters.items()
        if leaf.grad is not None and layouts[name].is_first_copy(rank)
    ]
    local = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
    # squared in double: the square of a large fp32 norm overflows
    total = local.to(device=device, dtype=torch.float64).square().reshape(1)
    if not alone:
        dist.all_reduce(total, group=group)
    return total.sqrt().to(dtype).reshape(())


def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients so that the global ``norm`` is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_``
    does."""
    leaves: list[Any] = [leaf for leaf in parameters if leaf.grad is not None]
    if leaves:
        torch.nn.utils.clip_grads_with_norm_(leaves, max_norm, norm)


def optimizer_name(factory: OptimizerFactory) -> str:
    """The optimizer that ``factory`` makes, for its price and memory: "SGD+momentum", "AdamW", "AdamW+fused", …"""
    optimizer = factory([nn.Parameter(torch.zeros(1))])
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []  # else refused later
    momentum = isinstance(optimizer, torch.optim.SGD) and any(group.get("momentum") for group in groups)
    fused = any(group.get("fused") for group in groups)
    return type(optimizer).__name__ + ("+momentum" if momentum else "") + ("+fused" if fused else "")


@dataclass
class LossScale:
    """The dynamic loss scale S of fp16 training."""

    #: S
    scale: float = 2.0**16
    #: updates since S changed
    good: int = 0
    #: updates that were left out so far
    skipped: int = 0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000

    def update(self, finite: bool) -> None:
        """After a step whose gradients were all ``finite``, or not."""
        if not finite:
            self.scale, self.good, self.skipped = self.scale * self.backoff, 0, self.skipped + 1
            return
        self.good += 1
        if self.good == self.growth_interval:
            self.scale, self.good = self.scale * self.growth, 0
