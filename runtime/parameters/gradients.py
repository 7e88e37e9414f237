"""The reduction of gradients between a backward and the optimizer: sums over partial axes.

A gradient whose cotangent is P on some axes is summed over exactly those: in flat buckets, each started by autograd
hooks during a backward as soon as it is full, so communication hides behind computation. Whole sums are made once per
step, in the last microbatch's backward. Where the optimizer has only a block of a parameter (``optimizer_shards``),
each rank gets the sum of its block, in the last backward (ZeRO-1) or in every one (ZeRO-2), and lets go of the whole
gradient; blocks add up in ``OptimizerShards.parameter.grad``. Under mixed precision every backward's 16-bit gradients
are added to what will be sent, in fp32, and let go; the loss may have been scaled, which is undone there. The loss is
already the mean over the whole batch, so sums are all there is; nothing is divided.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compiler.plan.plan import BUCKET_BYTES, gradient_buckets
from ..collectives.protocol import Sum
from ..errors import NonFiniteGradient
from ..profiling.trace import Trace
from ..transport.process_groups import DistributedComm, PendingCollective
from ..transport.shared_memory import SharedMemoryAllReduce
from .gradient_all_reduce import GradientAllReduce
from .optimizer_shards import OptimizerShards, ShardBucket

__all__ = ["GradientReducer"]


class _Bucket:
    """Gradients that travel in one message, the parameters' last use first."""

    #: True if every microbatch reduces its gradients, False if only the last does
    often = False
    #: the all-reduce of the bucket's ranks; None: the backend's
    sum: Sum | None = None
    #: True if every microbatch adds its gradients to the message, False if the last brings the sums of all
    eager = False

    def __init__(self, leaves: Sequence[nn.Parameter]) -> None:
        self.parameters = list(leaves)
        self.arm()

    def arm(self) -> None:
        """Nothing is there yet."""
        self.filled = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.launched = False

    def fill(self, index: int, grad: torch.Tensor | None) -> None:
        """The gradient of one leaf is there; None: it has none."""
        self.missing -= not self.filled[index]
        self._take(index, grad)
        self.filled[index] = True

    def fill_up(self) -> bool:
        """After the backward: take what the hooks did not bring; whether there is anything to send. Every device of the
        axes runs the same program, so they agree on which gradients do not exist."""
        for index, leaf in enumerate(self.parameters):
            if not self.filled[index]:
                self.fill(index, leaf.grad)
        return self._any()

    def begin(self) -> None:
        """Before the first backward of a batch."""
        self.arm()

    def bind(self, sums: GradientAllReduce) -> None:
        """Get the sum that the plan asks for."""
        raise NotImplementedError

    def launch(self, comm: DistributedComm) -> None:
        """Start the reduction."""
        raise NotImplementedError

    def settle(self, comm: DistributedComm) -> None:
        """Wait for the reduction, if one is on its way, and put the results where they belong."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the last reduction of a batch."""

    def _take(self, index: int, grad: torch.Tensor | None) -> None:
        raise NotImplementedError

    def _any(self) -> bool:
        raise NotImplementedError


class _AllReduceBucket(_Bucket):
    """Gradients that end in the leaves, whole."""

    def __init__(self, leaves: Sequence[nn.Parameter], axes: tuple[int, ...]) -> None:
        super().__init__(leaves)
        self.axes = axes
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.shared: SharedMemoryAllReduce | None = None  # by which the bucket's ranks sum it in memory that they share
        self.wire: torch.Tensor | None = None
        self.work: Any = None
        self.kept: list[tuple[nn.Parameter, torch.Tensor]] = []

    def begin(self) -> None:
        """Gradients already summed (of an earlier batch of the same step) are put aside."""
        super().begin()
        self.kept = []
        for leaf in self.parameters:
            if leaf.grad is not None:
                # a clone, because the gradient is a view of the bucket that is about to be filled again
                self.kept.append((leaf, leaf.grad.clone()))
                leaf.grad = None

    def _take(self, index: int, grad: torch.Tensor | None) -> None:
        leaf = self.parameters[index]
        if len(self.parameters) == 1:
            self.wire = None if grad is None else grad.contiguous()
            return
        if self.flat is None:
            self._lay(leaf.new_empty(sum(p.numel() for p in self.parameters)))
        view = self.views[index]
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad)
            leaf.grad = view

    def _lay(self, flat: torch.Tensor) -> None:
        self.flat = flat
        pieces = flat.split([p.numel() for p in self.parameters])
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]

    def _any(self) -> bool:
        return any(leaf.grad is not None for leaf in self.parameters)

    def bind(self, sums: GradientAllReduce) -> None:
        """The sum over its axes. In memory that the ranks share, several gradients lie from the beginning; one alone is
        let go with the step, and takes no such memory."""
        first, shapes = self.parameters[0], [leaf.shape for leaf in self.parameters]
        size, several = sum(map(torch.Size.numel, shapes)), len(shapes) > 1
        self.sum = sums.make(self.axes, size, first.dtype, shapes, first.device)
        self.shared = sums.make_shared(self.axes, size, first.dtype, first.device, several)
        if self.shared is not None and several:
            self._lay(self.shared.buffer)

    def launch(self, comm: DistributedComm) -> None:
        """Start the sum, in place."""
        self.launched = True
        wire = self.wire if self.flat is None else self.flat
        assert wire is not None
        if self.sum is None:
            self.work = comm.start_all_reduce(wire, self.axes, self.shared)
        else:
            self.work = self.sum.start(wire.view(-1))

    def settle(self, comm: DistributedComm) -> None:
        """The sums become the leaves' gradients, if they are not already."""
        work, wire = self.work, self.wire
        self.work = self.wire = None  # whatever comes of it
        if work is not None:
            work.wait()
        if wire is not None and self.flat is None:
            self.parameters[0].grad = wire

    def finish(self) -> None:
        """Add what was put aside."""
        for leaf, kept in self.kept:
            leaf.grad = kept if leaf.grad is None else leaf.grad.add_(kept)
        self.kept = []


class _ReduceScatterBucket(_Bucket):
    """Gradients of which each rank keeps a block: what the optimizer updates. The leaves' own are let go."""

    unscale = 1.0

    def __init__(self, owned: Sequence[OptimizerShards]) -> None:
        self.bundle = ShardBucket(owned)
        self.often = owned[0].often
        self.eager = self.often or owned[0].mixed
        self.wire: torch.Tensor | None = None
        self.work: PendingCollective | None = None
        super().__init__([one.leaf for one in owned])

    def arm(self) -> None:
        """Nothing is there yet."""
        super().arm()
        self.there = [False] * len(self.parameters)

    def bind(self, sums: GradientAllReduce) -> None:
        """The sum of all ranks' blocks over all of its axes: what is sent is less than what is not needed."""
        first, parts = self.bundle.members[0].parameter, [owned.parameter.shape for owned in self.bundle.members]
        axes, size = tuple(sorted((*self.bundle.axes, *self.bundle.rest))), self.bundle.rows * self.bundle.starts[-1]
        self.sum = sums.make(axes, size, first.dtype, parts * self.bundle.rows, first.device)

    @torch.no_grad()
    def _take(self, index: int, grad: torch.Tensor | None) -> None:
        if self.wire is None:
            self.wire = self.bundle.wire()
        view = self.bundle.place(self.wire, index)
        if grad is None:
            if not self.there[index]:
                view.zero_()
            return
        blocks = self.bundle.members[index].cut.blocks(grad)
        if self.there[index]:  # of an earlier microbatch
            view.add_(blocks, alpha=self.unscale)
        else:
            view.copy_(blocks)
            if self.unscale != 1.0:
                view.mul_(self.unscale)
        self.there[index], self.parameters[index].grad = True, None

    def _any(self) -> bool:
        if not any(self.there):
            self.wire = None
        return any(self.there)

    def launch(self, comm: DistributedComm) -> None:
        """Start the sum of blocks; where every microbatch does, the next one's gradients may come. Blocks that are all
        of their parameters are summed in place."""
        assert self.wire is not None
        if self.sum is not None:
            mine = self.wire[comm.joint_index(self.bundle.axes)]
            self.work = PendingCollective(self.sum.start(self.wire.view(-1)), mine, self.wire, torch.clone)
        elif self.bundle.axes:
            self.work = comm.start_reduce_scatter(self.wire, self.bundle.axes)
        else:
            started = comm.start_all_reduce(self.wire, self.bundle.rest) if self.bundle.rest else None
            self.work = PendingCollective(started, self.wire.view(-1), self.wire)
        self.wire, self.arrives = None, self.there
        if self.often:
            self.arm()
        else:
            self.launched = True

    @torch.no_grad()
    def settle(self, comm: DistributedComm) -> None:
        """This rank's blocks join the gradients of its parameters."""
        if self.work is None:
            return
        work, self.work = self.work, None  # whatever comes of it
        row = work.wait()
        if self.sum is None and self.bundle.axes and self.bundle.rest:
            rest = comm.start_all_reduce(row, self.bundle.rest)
            if rest is not None:
                rest.wait()
        for owned, piece, there in zip(self.bundle.members, self.bundle.split(row), self.arrives, strict=True):
            parameter = owned.parameter
            if there and parameter.grad is None:
                parameter.grad = piece.to(parameter.dtype)
            elif there:
                parameter.grad.add_(piece)  # type: ignore[union-attr]


class GradientReducer:
    """Reduces the partial gradients of one rank's parameters.

    parameters: (leaf, axes over which its gradient is partial, chunk) in program order; those without axes are left
    alone, and those of several chunks, whose last backwards end one after the other, share no bucket.
    owned: of those leaves of which the optimizer has a block. sums: how they travel, if not as the backend does it.
    Time in which a backward waits for an earlier reduction is noted in ``trace``. fault: what the last batch's
    gradients had that no code can send.
    """

    def __init__(
        self,
        comm: DistributedComm | None,
        parameters: Sequence[tuple[nn.Parameter, tuple[int, ...], int]],
        bucket_bytes: int = BUCKET_BYTES,
        owned: Sequence[OptimizerShards] = (),
        trace: Trace | None = None,
        sums: GradientAllReduce | None = None,
    ) -> None:
        self.comm, self.trace = comm, trace
        self.fault: NonFiniteGradient | None = None
        self.buckets = _buckets(parameters, {id(one.leaf): one for one in owned}, bucket_bytes)
        self.armed: frozenset[int] = frozenset()  # ids of the leaves whose next gradient is the whole one
        self.lasting = [bucket for bucket in self.buckets if not bucket.often]
        self.next = 0  # of those
        self.flying: _ReduceScatterBucket | None = None
        for bucket in self.buckets:
            if sums is not None:
                bucket.bind(sums)
            for index, leaf in enumerate(bucket.parameters):
                leaf.register_post_accumulate_grad_hook(_hook(weakref.ref(self), weakref.ref(bucket), index))

    def begin(self, unscale: float = 1.0) -> None:
        """Before the first backward of a batch. unscale: what mixed gradients are multiplied with."""
        self.armed, self.next, self.fault = frozenset(), 0, None
        for bucket in self.buckets:
            if isinstance(bucket, _ReduceScatterBucket):
                bucket.unscale = unscale
            bucket.begin()

    def arm(self, leaves: frozenset[int]) -> None:
        """Before an action that adds to gradients. Those of ``leaves`` (ids) are whole with it: a bucket full of them
        starts its reduction; one that every microbatch reduces always does."""
        self._land()
        self.armed = leaves

    def finish(self) -> None:
        """After the last backward: start what has not started, and wait for all."""
        self.armed = frozenset()
        for bucket in self.buckets:
            started = bucket.launched or (bucket.often and not any(bucket.filled))
            if not started and bucket.fill_up():
                self._launch(bucket)
        for bucket in self.buckets:
            self._settle(bucket)
            bucket.finish()
        self.flying = None

    # ---- the parts

    def _fill(self, bucket: _Bucket, index: int, grad: torch.Tensor | None) -> None:
        bucket.fill(index, grad)
        if bucket.often:
            if not bucket.missing:
                self._launch(bucket)
            return
        # in order, so that every device of the axes starts the same reductions in the same order
        while self.next < len(self.lasting) and self.lasting[self.next].missing == 0:
            self._launch(self.lasting[self.next])
            self.next += 1

    def _launch(self, bucket: _Bucket) -> None:
        assert self.comm is not None
        phase, self.comm.phase = self.comm.phase, "step"
        if isinstance(bucket, _ReduceScatterBucket) and bucket.bundle.axes:
            # a message and its result are held until it has landed: with one at a time, memory has one bucket more
            self._land()
            self.flying = bucket
        bucket.launch(self.comm)
        self.comm.phase = phase

    def _land(self) -> None:
        flying, self.flying = self.flying, None
        if flying is not None:
            begin = None if self.trace is None else self.trace.mark()
            self._settle(flying)
            if self.trace is not None:
                self.trace.exchanged(begin)

    def _settle(self, bucket: _Bucket) -> None:
        """One that fails on all ranks of its group leaves the others to be waited for."""
        assert self.comm is not None
        try:
            bucket.settle(self.comm)
        except NonFiniteGradient as error:
            self.fault = self.fault or error


def _hook(
    reducer: weakref.ref[GradientReducer], bucket: weakref.ref[_Bucket], index: int
) -> Callable[[torch.Tensor], None]:
    """The hook that autograd calls when a gradient is there. It holds weak references only: a tensor is never collected
    from a cycle through its own hooks."""

    def hook(parameter: torch.Tensor) -> None:
        mine, here = reducer(), bucket()
        if mine is None or here is None:
            return
        if here.often or id(parameter) in mine.armed:
            mine._fill(here, index, parameter.grad)
        elif here.eager:
            here._take(index, parameter.grad)

    return hook


def _buckets(
    parameters: Sequence[tuple[nn.Parameter, tuple[int, ...], int]],
    owned: Mapping[int, OptimizerShards],
    bucket_bytes: int,
) -> list[_Bucket]:
    """Parameters by what must agree (axes and dtype), the last used first, in flat pieces of about ``bucket_bytes``."""
    keys: list[tuple[Hashable | None, int]] = []
    for leaf, axes, chunk in parameters:
        part = owned.get(id(leaf))
        key = (axes, leaf.dtype, chunk) if part is None else (*part.key, chunk)
        size = leaf.nbytes if part is None else leaf.numel() * part.parameter.itemsize
        keys.append((key if (axes or part is not None) and leaf.requires_grad else None, size))
    buckets: list[_Bucket] = []
    for group in gradient_buckets(keys, bucket_bytes):
        leaves, axes = [parameters[i][0] for i in group], parameters[group[0]][1]
        parts = [owned[id(leaf)] for leaf in leaves if id(leaf) in owned]
        buckets.append(_ReduceScatterBucket(parts) if parts else _AllReduceBucket(leaves, axes))
    return buckets
