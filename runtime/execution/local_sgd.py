"""Local SGD (Stich, ICLR 2019) and DiLoCo (Douillard et al. 2023): replicas step by themselves, and are averaged every
H steps.

All replicas keep the same *anchor* θ, where they last met. After H steps of their own

    Δ = θ - mean_r θ_r        the pseudo-gradient
    θ ← outer step on Δ       SGD with lr 1: the mean itself; DiLoCo: SGD with lr 0.7, Nesterov momentum 0.9
    θ_r ← θ

Inner optimizer states stay with their replicas. With a delay D the sum behind Δ is waited for D ≤ H steps later, and
what a replica has moved meanwhile stays: θ_r ← θ_r + θ - (θ_r as it was sent).

Delayed gradient averaging (Zhu et al., NeurIPS 2021): the mean of a step's gradients may arrive D steps later.

Replica r of p feeds its optimizer at step t

    g_r(t) - g_r(t - D) + mean_r g_r(t - D)        (the first D steps after a flush: g_r(t) alone)

its fresh gradient, its stale one taken back, and the stale mean in its place. A mean is started as soon as its step's
gradients are there and waited for D steps later. Under SGD with a constant learning rate replicas differ from what they
share by their last D gradients only, and a flush brings exactly what the missing means would: since all replicas
together take back what they put in, the mean of their parameters is the same before and after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..collectives.protocol import Pending
from ..compression.summing import CompressedSum
from ..parameters.optimizer import OptimizerFactory, name_parameter
from .replicas import BackendAllReduce, FlatBucket, MakeSum, Replicas, flat_buckets

__all__ = ["DelayedGradients", "PeriodicAverage", "average_replicas"]


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
        self.anchors = {id(leaf): _make_anchor(leaf) for leaf in self.leaves}
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
        average_replicas(self.plain, self.replicas, optimizer)
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

    def _anchors(self, bucket: FlatBucket) -> list[nn.Parameter]:
        return [self.anchors[id(leaf)] for leaf in bucket.leaves]


def _make_anchor(leaf: nn.Parameter) -> nn.Parameter:
    anchor = nn.Parameter(leaf.detach().clone())
    name, shape = getattr(leaf, "global_name", ""), getattr(leaf, "global_shape", leaf.shape)
    return name_parameter(anchor, name, shape)


@dataclass
class _Flight:
    """One bucket's gradients of one step: this replica's own, and the mean, which holds once ``work`` is done."""

    bucket: FlatBucket
    #: for each leaf of the bucket, whether it had a gradient
    there: list[bool]
    own: torch.Tensor
    mean: torch.Tensor
    work: Pending | None

    def land(self) -> torch.Tensor:
        """Wait; the mean less the own gradient [n]."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.mean.sub_(self.own)


class DelayedGradients:
    """Puts delayed means into the gradients of one rank's parameters.

    leaves: what the optimizer updates; their gradients are this replica's own (of its mean loss). make: of the sums by
    which gradients travel. waits: how many sums it has waited for so far.
    """

    def __init__(self, leaves: Sequence[nn.Parameter], replicas: Replicas, delay: int, make: MakeSum) -> None:
        assert delay > 0, delay
        self.leaves, self.replicas, self.delay = list(leaves), replicas, delay
        self.buckets = flat_buckets(self.leaves, make)
        self.plain = flat_buckets(self.leaves, replicas.backend_sum)  # of what a flush averages
        self.flying: deque[list[_Flight]] = deque()  # by step, the oldest first
        self.waits = 0
        self.drained = True  # no step since the last flush
        self._owed: list[torch.Tensor | None] = [None] * len(self.buckets)

    @torch.no_grad()
    def correct(self) -> None:
        """After the backwards of a step: start its means, and put in those of ``delay`` steps ago."""
        self.drained = False
        # the means start from the fresh gradients, before any correction is added to them
        self.flying.append([self._start(bucket) for bucket in self.buckets])
        for index, (bucket, owed) in enumerate(zip(self.buckets, self._owed, strict=True)):
            if owed is not None:
                _add_correction(bucket, owed, [leaf.grad is not None for leaf in bucket.leaves])
                self._owed[index] = None
        if len(self.flying) > self.delay:
            for flight in self.flying.popleft():
                self.waits += 1
                _add_correction(flight.bucket, flight.land(), flight.there)

    def _start(self, bucket: FlatBucket) -> _Flight:
        grads = [leaf.grad for leaf in bucket.leaves]
        own = bucket.gather(grads)
        mean = own / self.replicas.count
        return _Flight(bucket, [grad is not None for grad in grads], own, mean, bucket.sum.start(mean))

    @torch.no_grad()
    def flush(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for all that is on its way, and make replicas equal: parameters and optimizer states become their means.

        A code sends a part of a gradient now and owes the rest. The means of parameters have all of it, so what was
        sent less what was meant is put into the next step's gradient, lest the rest counts twice.
        """
        landed = [[flight.land() for flight in step] for step in self.flying]
        self.waits += sum(map(len, landed))
        self.flying.clear()
        for index, bucket in enumerate(self.buckets):
            # corrections of all replicas add up to zero where nothing is owed
            if landed and isinstance(bucket.sum, CompressedSum) and bucket.sum.residuals():
                owed = torch.stack([step[index] for step in landed]).sum(0).div_(self.replicas.count)
                BackendAllReduce(self.replicas.across).start(owed).wait()
                before = self._owed[index]
                self._owed[index] = owed if before is None else before.add_(owed)
        if not self.drained:
            average_replicas(self.plain, self.replicas, optimizer)
        self.drained = True

    def renew(self) -> None:
        """Begin at parameters that were loaded: nothing is owed."""
        self._owed = [None] * len(self.buckets)


@torch.no_grad()
def average_replicas(buckets: Sequence[FlatBucket], replicas: Replicas, optimizer: torch.optim.Optimizer) -> None:
    """Parameters, and the states of ``optimizer`` that have their shapes, become their means over the replicas.
    Collective."""
    for bucket in buckets:
        _average_in_place(bucket, [leaf.detach() for leaf in bucket.leaves], replicas)
        states = [optimizer.state.get(leaf, {}) for leaf in bucket.leaves]
        for key in sorted({key for state in states for key in state}):
            tensors = [_matching_state(state.get(key), leaf) for state, leaf in zip(states, bucket.leaves, strict=True)]
            if any(x is not None for x in tensors):
                _average_in_place(bucket, tensors, replicas)


def _matching_state(x: object, leaf: nn.Parameter) -> torch.Tensor | None:
    """An optimizer's state, if it is one of floats in the shape of its parameter."""
    fits = isinstance(x, torch.Tensor) and x.shape == leaf.shape and x.is_floating_point()
    return x if fits and isinstance(x, torch.Tensor) else None


def _average_in_place(bucket: FlatBucket, tensors: Sequence[torch.Tensor | None], replicas: Replicas) -> None:
    flat = bucket.gather(tensors).div_(replicas.count)
    bucket.sum.start(flat).wait()
    for tensor, view in zip(tensors, bucket.views(flat), strict=True):
        if tensor is not None:
            tensor.copy_(view)


def _add_correction(bucket: FlatBucket, correction: torch.Tensor, there: Sequence[bool]) -> None:
    """Add a correction to the gradients of the leaves that had one."""
    for leaf, view, had in zip(bucket.leaves, bucket.views(correction), there, strict=True):
        if had:
            leaf.grad = view.clone() if leaf.grad is None else leaf.grad.add_(view)
