"""What happens to gradients between the last backward and the optimizer: sums over partial axes, and tied copies.

A gradient whose cotangent is P on some axes is summed over exactly those, once per step: in flat buckets, each started
by autograd hooks as soon as the last actions that add to its gradients (a chunk's last backward, or weight half of one)
have filled it, so communication hides behind computation. The loss is already the mean over the whole batch, so sums
are all there is; nothing is divided.

A parameter that several stages hold has an owner, the first of them. The others send their reduced gradient to it and
get the updated value back, so all copies stay bit-equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..compiler.buckets import gradient_buckets
from ..compiler.graph import TensorType
from ..compiler.plan import BUCKET_BYTES, Plan, parameter_stages
from .crossmesh import Layout, Port, tiles
from .groups import DistributedComm

__all__ = ["GradientReducer", "TiedParameters", "parameter_layout"]

_TIED_TAG = 1 << 30


@dataclass(eq=False)
class _Bucket:
    axes: tuple[int, ...]
    parameters: list[nn.Parameter] = field(default_factory=list)
    flat: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    filled: list[bool] = field(default_factory=list)
    missing: int = 0
    launched: bool = False
    work: Any = None
    wire: torch.Tensor | None = None


class GradientReducer:
    """Sums the partial gradients of one rank's parameters.

    parameters: (leaf, axes over which its gradient is partial, chunk) in program order; those without axes are left
    alone, and those of several chunks, whose last backwards end one after the other, share no bucket.
    """

    def __init__(
        self,
        comm: DistributedComm | None,
        parameters: Sequence[tuple[nn.Parameter, tuple[int, ...], int]],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.comm = comm
        self.armed: frozenset[int] = frozenset()  # ids of the parameters whose next gradient is the whole one
        self.next = 0
        self.kept: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.buckets = _buckets(parameters, bucket_bytes)
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), weakref.ref(bucket), index))

    def begin(self) -> None:
        """Before the first backward: gradients already summed (of an earlier batch of the same step) are put aside."""
        self.kept = []
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if parameter.grad is not None:
                    # a clone, because the gradient is a view of the bucket that is about to be filled again
                    self.kept.append((parameter, parameter.grad.clone()))
                    parameter.grad = None
        self.armed, self.next = frozenset(), 0
        for bucket in self.buckets:
            bucket.filled = [False] * len(bucket.parameters)
            bucket.missing = len(bucket.parameters)
            bucket.launched, bucket.work, bucket.wire = False, None, None

    def arm(self, parameters: frozenset[int]) -> None:
        """Before the last action that adds to the gradients of these (ids of leaves): as they come they are whole, and
        a bucket that is full starts its sum."""
        self.armed = parameters

    def finish(self) -> None:
        """After the last backward: start what has not started, and wait for all."""
        self.armed = frozenset()
        for bucket in self.buckets:
            if not bucket.launched:
                # Every device of the axes runs the same program, so they agree on which gradients do not exist.
                for index, parameter in enumerate(bucket.parameters):
                    if not bucket.filled[index]:
                        self._fill(bucket, index, parameter.grad)
                if any(parameter.grad is not None for parameter in bucket.parameters):
                    self._launch(bucket)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
            if bucket.wire is not None and bucket.flat is None:
                bucket.parameters[0].grad = bucket.wire
            bucket.wire = None
        for parameter, kept in self.kept:
            parameter.grad = kept if parameter.grad is None else parameter.grad.add_(kept)
        self.kept = []

    # ---- the parts

    def _fill(self, bucket: _Bucket, index: int, grad: torch.Tensor | None) -> None:
        bucket.filled[index] = True
        bucket.missing -= 1
        parameter = bucket.parameters[index]
        if len(bucket.parameters) == 1:
            bucket.wire = None if grad is None else grad.contiguous()
            return
        if bucket.flat is None:
            bucket.flat = parameter.new_empty(sum(p.numel() for p in bucket.parameters))
            pieces = bucket.flat.split([p.numel() for p in bucket.parameters])
            bucket.views = [piece.view(p.shape) for piece, p in zip(pieces, bucket.parameters, strict=True)]
        view = bucket.views[index]
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad)
            parameter.grad = view

    def _launch_full(self) -> None:
        # in order, so that every device of the axes starts the same sums in the same order
        while self.next < len(self.buckets) and self.buckets[self.next].missing == 0:
            self._launch(self.buckets[self.next])
            self.next += 1

    def _launch(self, bucket: _Bucket) -> None:
        assert self.comm is not None
        bucket.launched = True
        wire = bucket.wire if bucket.flat is None else bucket.flat
        assert wire is not None
        phase, self.comm.phase = self.comm.phase, "step"
        bucket.work = self.comm.start_all_reduce(wire, bucket.axes)
        self.comm.phase = phase


def _hook(
    reducer: weakref.ref[GradientReducer], bucket: weakref.ref[_Bucket], index: int
) -> Callable[[torch.Tensor], None]:
    """What autograd calls when a gradient is there. It holds nothing: a tensor is never collected from a cycle through
    its own hooks."""

    def hook(parameter: torch.Tensor) -> None:
        mine, here = reducer(), bucket()
        if mine is not None and here is not None and id(parameter) in mine.armed:
            mine._fill(here, index, parameter.grad)
            mine._launch_full()

    return hook


def _buckets(parameters: Sequence[tuple[nn.Parameter, tuple[int, ...], int]], bucket_bytes: int) -> list[_Bucket]:
    """Parameters by (axes, dtype, chunk), the last used first, in flat pieces of about ``bucket_bytes``."""
    keys = [((axes, p.dtype, chunk) if axes and p.requires_grad else None, p.nbytes) for p, axes, chunk in parameters]
    groups = gradient_buckets(keys, bucket_bytes)
    return [_Bucket(parameters[group[0]][1], [parameters[i][0] for i in group]) for group in groups]


# ---- tied weights across stages


def parameter_layout(plan: Plan, stage: int, name: str) -> Layout:
    """Where the parameter's value lives on that stage."""
    here = plan.stages[stage]
    residency = next(chunk.parameters[name] for chunk in here.chunks if name in chunk.parameters)
    return Layout(here.devices, here.mesh_shape, residency.compute.value)


class TiedParameters:
    """The parameters that more than one stage holds, as this rank sees them.

    local: this rank's leaves by name; types: the global type of each parameter.
    """

    def __init__(
        self,
        plan: Plan,
        local: Mapping[str, nn.Parameter],
        types: Mapping[str, TensorType],
        rank: int,
        device: torch.device,
        group: Any,
    ) -> None:
        mine = plan.stage_of(rank)
        self.local = local
        self.up: list[tuple[str, Port, bool]] = []  # copies → owner (gradients); whether this rank is the owner
        self.down: list[tuple[str, Port, bool]] = []  # owner → copies (values)
        self.copies: set[str] = set()  # names whose owner is another stage
        tag = _TIED_TAG
        for name, stages in parameter_stages(plan.stages).items():
            owner, *others = stages
            if mine in others:
                self.copies.add(name)
            for other in others:
                home, away = parameter_layout(plan, owner, name), parameter_layout(plan, other, name)
                for source, target, ports in ((away, home, self.up), (home, away, self.down)):
                    messages = tiles(types[name].shape, source, target)
                    shape = target.local_shape(types[name].shape)
                    port = Port.make(messages, rank, tag, shape, types[name].dtype, device=device, group=group)
                    tag += len(messages)
                    if mine in (owner, other):
                        ports.append((name, port, mine == owner))

    def gather_gradients(self) -> None:
        """Each owner's gradient becomes the sum over all copies; the copies' gradients are let go."""
        active = [(name, port, owner) for name, port, owner in self.up if self.local[name].requires_grad]
        arriving = [(name, port.receive(0)) for name, port, owner in active if owner]
        started = []
        for name, port, owner in active:
            if not owner:
                leaf = self.local[name]
                started += port.send(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, 0)
                leaf.grad = None
        for name, incoming in arriving:
            leaf, addend = self.local[name], incoming.wait()
            # not in place: the gradient may be a view of a bucket
            leaf.grad = addend if leaf.grad is None else leaf.grad + addend
        for work, _ in started:
            work.wait()

    def publish_values(self) -> None:
        """Every copy becomes bit-equal to its owner's value."""
        active = [(name, port, owner) for name, port, owner in self.down if self.local[name].requires_grad]
        arriving = [(name, port.receive(0)) for name, port, owner in active if not owner]
        started = []
        for name, port, owner in active:
            if owner:
                started += port.send(self.local[name].detach(), 0)
        for name, incoming in arriving:
            with torch.no_grad():
                self.local[name].copy_(incoming.wait())
        for work, _ in started:
            work.wait()
