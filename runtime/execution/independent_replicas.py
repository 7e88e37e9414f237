"""Training with replicas that step by themselves, as a session sees it: delayed gradients or periodic averages.

Between two flushes nothing waits for another replica but for means that are old enough. Losses and gradient norms are
each replica's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.distributed as dist
from torch import nn

from ...compiler.ir.program import ChunkProgram
from ...compiler.plan.cross_mesh import MeshLayout
from ...compiler.plan.plan import Plan
from ..collectives.protocol import Sum
from ..collectives.worker import LANES
from ..parameters.gradient_all_reduce import GradientAllReduce
from ..parameters.optimizer import OptimizerFactory, gradient_norm
from ..parameters.tied import TiedParameters
from .executor import Executor
from .local_sgd import DelayedGradients, PeriodicAverage
from .pipedream import StashingExecutor
from .replicas import Replicas

__all__ = ["SYNCHRONOUS", "IndependentReplicas", "LocalUpdates"]


@dataclass(frozen=True)
class LocalUpdates:
    """The freedom of replicas to update by themselves.

    Raises ValueError for values out of range.
    """

    #: steps for which a mean of gradients (of parameters, if ``every`` > 1) may be on its way
    delay: int = 0
    #: steps between two averages of parameters; 1: gradients are averaged instead
    every: int = 1
    #: the optimizer that applies these averages; None: parameters become the average
    outer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        if self.delay < 0 or self.every < 1:
            raise ValueError(
                f"delay is a number of steps >= 0 and local_steps >= 1, but got delay={self.delay} and "
                f"local_steps={self.every}"
            )
        if self.every > 1 and self.delay > self.every:
            raise ValueError(
                "an average of parameters must come before the next one leaves, but got "
                f"delay={self.delay} and local_steps={self.every}; use delay <= local_steps"
            )
        if self.outer is not None and self.every == 1:
            raise ValueError(
                "an outer optimizer applies averages of parameters, but got outer_optimizer without local_steps > 1"
            )

    @property
    def is_synchronous(self) -> bool:
        """True if every step waits for its own gradients."""
        return self.delay == 0 and self.every == 1


SYNCHRONOUS = LocalUpdates()
"""Every step waits for its own gradients, and replicas are always equal."""


class IndependentReplicas:
    """The steps of a session whose replicas update by themselves. Its construction is collective; ``bind`` follows once
    there are parameters."""

    def __init__(
        self, local_updates: LocalUpdates, plan: Plan, programs: Sequence[ChunkProgram], stage: int | None
    ) -> None:
        self.local_updates, self.plan = local_updates, plan
        self.replicas = Replicas(plan, programs, stage)
        self.means: DelayedGradients | PeriodicAverage | None = None

    def bind(
        self, executor: Executor, tied: TiedParameters, leaves: Sequence[nn.Parameter], sums: GradientAllReduce
    ) -> None:
        """leaves: what the optimizer updates; sums: how it travels, if not as the backend does it. ValueError if
        anything of ``executor`` or ``tied`` goes from one replica to another."""
        if isinstance(executor, StashingExecutor):
            raise ValueError(
                f"delay= and local_steps= need a schedule whose steps end, but got {self.plan.schedule}; use another"
            )
        if self.plan.precision == "fp16":
            raise ValueError(
                "under fp16 replicas leave out steps together, but got delay= or local_steps=; use precision='bf16'"
            )
        self.replicas.require_apart(executor.parts if executor.programs else (), tied)

        lanes = cycle(range(LANES))

        def make_sum(n: int, dtype: torch.dtype, shapes: Sequence[torch.Size], device: torch.device) -> Sum:
            replicas, lane = self.replicas, next(lanes)
            return sums.make(replicas.axes, n, dtype, shapes, device, lane) or replicas.backend_sum(
                n, dtype, shapes, device
            )

        updates = self.local_updates
        if updates.every > 1:
            self.means = PeriodicAverage(leaves, self.replicas, updates.every, updates.delay, updates.outer, make_sum)
        else:
            self.means = DelayedGradients(leaves, self.replicas, updates.delay, make_sum)

    # ---- a step

    def share_loss(
        self, loss: torch.Tensor | None, stage: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """This replica's loss, from its ranks on ``stage``, on all of its ranks."""
        replicas = self.replicas
        if len(self.plan.stages[stage].devices) == self.plan.num_devices:
            assert loss is not None
            return loss
        out = torch.zeros(1, dtype=dtype, device=device) if loss is None else loss.reshape(1).clone()
        root = next(rank for rank in self.plan.stages[stage].devices if replicas.of[rank] == replicas.index)
        if replicas.inside is not None:
            dist.broadcast(out, root, group=replicas.inside)
        return out.reshape(())

    def before_update(self) -> None:
        """Between the backwards and the optimizer."""
        if isinstance(self.means, DelayedGradients):
            self.means.correct()

    def after_update(self) -> None:
        """Once the optimizer has stepped."""
        if isinstance(self.means, PeriodicAverage):
            self.means.step()

    def gradient_norm(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, MeshLayout],
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The norm of this replica's gradient (0-d)."""
        place = self.replicas.first.get(rank, rank)
        return gradient_norm(
            parameters, layouts, place, device, dtype, self.replicas.inside, self.replicas.inside is None
        )

    # ---- between steps

    @property
    def waits(self) -> int:
        """The number of sums over replicas that this rank has waited for."""
        return 0 if self.means is None else self.means.waits

    @property
    def outer(self) -> tuple[torch.optim.Optimizer, Mapping[int, nn.Parameter]] | None:
        """The optimizer that averages parameters, and what it updates by the id of what the inner one does."""
        means = self.means
        return (means.outer, means.anchors) if isinstance(means, PeriodicAverage) else None

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of the replicas' losses. Collective."""
        total = loss.detach().reshape(1) / self.replicas.count
        if self.replicas.across is not None:
            dist.all_reduce(total, group=self.replicas.across)
        return total.reshape(())

    def flush(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for what is on its way, and make replicas equal."""
        assert self.means is not None
        self.means.flush(optimizer)

    def renew(self) -> None:
        """After parameters were loaded."""
        assert self.means is not None
        self.means.renew()

    def require_drained(self, what: str) -> None:
        """ValueError while replicas differ."""
        if self.means is not None and not self.means.drained:
            raise ValueError(
                f"{what} needs replicas that are alike, but got steps since the last flush under "
                f"delay={self.local_updates.delay}, local_steps={self.local_updates.every}; call flush() before"
            )
