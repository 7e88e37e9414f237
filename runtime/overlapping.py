"""Steps that overlap: batches go in, losses come out some steps later, and ``flush`` finishes what is in flight.

The last stage knows a batch's loss long before others have its gradients; waiting for it at once would drain the
pipeline. It is sent on its way at the end of the step and taken ``lag_steps`` steps later, when every rank has had
gradients that were made after it: so nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..compiler.asynchronous import lag_steps
from ..compiler.plan import Plan
from .facts import Facts
from .pipedream import StashingExecutor, unrecorded

__all__ = ["Overlapping"]

Losses = list[tuple[int, torch.Tensor]]
"""(step, 0-d loss), oldest first"""


class Overlapping:
    """The steps of an asynchronous pipeline. Its construction is collective.

    loss: (stage, facts) of the loss, if there is one. Raises ValueError for clipping, which needs all gradients.
    """

    def __init__(
        self,
        plan: Plan,
        executor: StashingExecutor,
        loss: tuple[int, Facts] | None,
        optimizer: torch.optim.Optimizer | None,
        clip_grad_norm: float | None,
        device: torch.device,
    ) -> None:
        if clip_grad_norm is not None:
            raise ValueError(
                f"under schedule {plan.schedule} no two stages have the gradients of a step at the same time, but got "
                f"clip_grad_norm={clip_grad_norm}, which is of all of them; leave it out or use another schedule"
            )
        self.schedule, self.executor, self.device = plan.schedule, executor, device
        self.lag = lag_steps(len(plan.stages), plan.microbatches)
        self.optimizer = optimizer
        if optimizer is not None:
            executor.update = optimizer.step
        self.root, self.dtype = 0, torch.float32
        if loss is not None and loss[1].loss is not None:
            self.root, self.dtype = plan.stages[loss[0]].devices[0], loss[1].loss.dtype
        self.group = dist.new_group()
        self.pending: deque[tuple[int, torch.Tensor, Any]] = deque()
        self.drained = True  # no batch was put in since the last flush

    def step(self, inputs: Mapping[str, torch.Tensor], step: int) -> Losses:
        """Put a batch in; the losses that are known by now."""
        if self.optimizer is None:
            raise ValueError(
                f"schedule {self.schedule} updates while it runs, but got no optimizer; "
                "pass optimizer=lambda ps: torch.optim.AdamW(ps)"
            )
        self.drained = False
        self.executor.advance(inputs, step)
        with self.executor.trace.span("loss"):
            self._send(step)
            return self._take(self.lag)

    def flush(self) -> Losses:
        """Finish everything in flight; the losses that were not known yet."""
        self.executor.flush()
        self.drained = True
        return self._take(0)

    def _send(self, step: int) -> None:
        """Start to tell everybody the loss of the batch; only the root's counts."""
        loss = self.executor.batch_loss
        mine = loss if dist.get_rank() == self.root else None
        out = torch.zeros(1, dtype=self.dtype, device=self.device) if mine is None else mine.reshape(1).clone()
        with unrecorded():
            self.pending.append((step, out, dist.broadcast(out, self.root, group=self.group, async_op=True)))

    def _take(self, least: int) -> Losses:
        """All but the ``least`` last losses, waited for."""
        taken = []
        while len(self.pending) > least:
            step, out, work = self.pending.popleft()
            work.wait()
            taken.append((step, out.reshape(())))
        return taken

    # ---- what cannot be done

    def require_drained(self, what: str) -> None:
        """ValueError while batches are in flight: stages then have weights of different steps."""
        if not self.drained:
            raise ValueError(
                f"{what} needs every stage at the same step, but got batches in flight under schedule "
                f"{self.schedule}; call flush() before"
            )

    def refuse_halves(self) -> NoReturn:
        """ValueError for a half of a step."""
        raise ValueError(
            f"under schedule {self.schedule} every stage updates when its own backwards are done, but got "
            "forward_backward or optimizer_step by themselves; call train_step, and flush at the end"
        )

    def refuse_norm(self) -> NoReturn:
        """ValueError for a norm of all gradients."""
        raise ValueError(
            f"under schedule {self.schedule} no two stages have the gradients of a step at the same time, so there is "
            "no grad_norm of all; use another schedule"
        )
