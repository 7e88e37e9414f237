"""Local SGD (Stich, ICLR 2019) and DiLoCo (Douillard et al. 2023): replicas step by themselves, and are averaged every
H steps.

All replicas keep the same *anchor* θ, where they last met. After H steps of their own

    Δ = θ - mean_r θ_r        the pseudo-gradient
    θ ← outer step on Δ       SGD with lr 1: the mean itself; DiLoCo: SGD with lr 0.7, Nesterov momentum 0.9
    θ_r ← θ

Inner optimizer states stay with their replicas. With a delay D the sum behind Δ is waited for D ≤ H steps later, and
what a replica has moved meanwhile stays: θ_r ← θ_r + θ - (θ_r as it was sent).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .collectives.protocol import Pending
from .delayed import average
from .optimizer import OptimizerFactory, name_parameter
from .replicas import Flat, MakeSum, Replicas, flat_buckets

__all__ = ["PeriodicAverage"]


class PeriodicAverage:
    """Averages one rank's parameters with those of the other replicas.

    leaves: what the optimizer updates. every: H; delay: D. outer: a function from parameters to the outer optimizer;
    None: plain averaging. make: of the sums by which pseudo-gradients travel. waits: how many sums it has waited for so
    far.
    """

    def __init__(
        self, leaves: Sequence[nn.Parameter], replicas: Replicas, every: int, delay: int,
        outer: OptimizerFactory | None, make: MakeSum,
    ) -> None:  # fmt: skip
        assert 0 <= delay <= every, (delay, every)
        self.leaves, self.replicas, self.every, self.delay = list(leaves), replicas, every, delay
        self.buckets = flat_buckets(self.leaves, make)
        self.plain = flat_buckets(self.leaves, replicas.backend_sum)
        self.anchors = {id(leaf): _anchor(leaf) for leaf in self.leaves}
        anchors = list(self.anchors.values()) or [nn.Parameter(torch.empty(0, 0))]
        self.outer = torch.optim.SGD(anchors, lr=1.0) if outer is None else outer(anchors)
        self.flying: list[tuple[torch.Tensor, torch.Tensor, Pending]] = []  # sent, pseudo-gradient, work; by bucket
        self.since = 0  # steps since replicas were sent
        self.waits = 0
        self.drained = True

    @torch.no_grad()
    def step(self) -> None:
        """After the inner optimizer's step: send replicas every ``every`` steps, and take what comes late."""
        self.drained, self.since = False, self.since + 1
        if self.flying and self.since == self.delay:
            self._land(moved=True)
        if self.since == self.every:
            self._send()
            if not self.delay:
                self._land(moved=False)

    @torch.no_grad()
    def flush(self, optimizer: torch.optim.Optimizer) -> None:
        """Finish what is on its way, and make replicas equal: an outer step at once for the steps since the last one,
        and the mean of the inner optimizer's states."""
        if self.drained:
            return
        if self.flying:
            self._land(moved=self.since > 0)
        if self.since:
            self._send()
            self._land(moved=False)
        average(self.plain, self.replicas, optimizer)
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Begin at the parameters as they are, which are alike on all replicas."""
        for leaf in self.leaves:
            self.anchors[id(leaf)].copy_(leaf)
        self.since, self.drained = 0, True

    def _send(self) -> None:
        self.since = 0
        for bucket in self.buckets:
            sent = bucket.gather(bucket.leaves)
            gradient = bucket.gather(self._anchors(bucket)).sub_(sent).div_(self.replicas.count)
            self.flying.append((sent, gradient, bucket.sum.start(gradient)))

    def _land(self, moved: bool) -> None:
        """The outer step. moved: replicas have stepped since they were sent."""
        for bucket, (_, gradient, work) in zip(self.buckets, self.flying, strict=True):
            work.wait()
            self.waits += 1
            for anchor, view in zip(self._anchors(bucket), bucket.views(gradient), strict=True):
                anchor.grad = view
        self.outer.step()
        for bucket, (sent, _, _) in zip(self.buckets, self.flying, strict=True):
            for leaf, anchor, was in zip(bucket.leaves, self._anchors(bucket), bucket.views(sent), strict=True):
                if moved:
                    leaf.add_(anchor - was)
                else:
                    leaf.copy_(anchor)
                anchor.grad = None
        self.flying = []

    def _anchors(self, bucket: Flat) -> list[nn.Parameter]:
        return [self.anchors[id(leaf)] for leaf in bucket.leaves]


def _anchor(leaf: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(leaf.detach().clone())
    name, shape = getattr(leaf, "global_name", ""), getattr(leaf, "global_shape", leaf.shape)
    return name_parameter(made, name, shape)
