"""The context of a local program: collectives, the device's place on the mesh, and the counters of random ops.

The compiler emits programs against these protocols; ``runtime/`` implements them over torch.distributed, and
``LockstepGroup`` in ``verification/lockstep.py`` over threads of one process. Nothing here starts a process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = [
    "Arrival", "Comm", "CompletedArrival", "Context", "GatherPrefetch", "current_context", "cut_blocks", "merge_blocks",
    "use_context",
]  # fmt: skip


class Arrival(Protocol):
    """A collective that is in flight."""

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it. May be called once."""
        ...


@dataclass(frozen=True)
class CompletedArrival:
    """A collective that is complete when it starts."""

    x: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return the result."""
        return self.x


class Comm(Protocol):
    """Collectives along the axes of one logical mesh, seen from one device. Axes are positions: 0 is the major axis.

    Every method returns a new tensor and leaves its argument as it was. Tensors are contiguous on return.
    """

    def size(self, axis: int) -> int:
        """Number of devices along ``axis``."""
        ...

    def index(self, axis: int) -> int:
        """This device's coordinate along ``axis``."""
        ...

    def all_reduce(self, x: torch.Tensor, axis: int, op: str = "sum") -> torch.Tensor:
        """The sum (or "max") over the axis, on every device of it."""
        ...

    def all_gather(self, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        """The blocks of the axis concatenated along ``dim``."""
        ...

    def reduce_scatter(self, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        """This device's block along ``dim`` of the sum over the axis; the extent divides evenly."""
        ...

    def all_to_all(self, x: torch.Tensor, axis: int, split_dim: int, concat_dim: int) -> torch.Tensor:
        """From sharded along ``concat_dim`` to sharded along ``split_dim``."""
        ...

    def all_to_all_uneven(
        self, x: torch.Tensor, axis: int, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """``x`` [sum of sent, ...] goes in pieces of ``sent`` rows to the devices of the axis, in their order; returns
        [sum of received, ...]: the ``received`` rows of each. Counts may be 0."""
        ...

    def exchange(
        self, before: torch.Tensor | None, after: torch.Tensor | None, axis: int, cyclic: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send ``before`` to the device before this one along the axis and ``after`` to the one behind it; return the
        tensors that these two sent here, first that from the device before.

        Each of the two is None on all devices or has one shape on all of an axis; what is None or empty costs nothing.
        From beyond the ends come zeros, or, if ``cyclic``, what is at the other end.
        """
        ...

    def start_send(self, x: torch.Tensor, axis: int, to: int, source: int) -> Callable[[], torch.Tensor]:
        """Begin to send ``x`` to the device at coordinate ``to`` of the axis. The returned function waits for the
        tensor of the same shape that the device at ``source`` sends here.

        Every device of the axis sends once and receives once. Until then ``x`` must not be written.
        """
        ...

    def start_sum(self, x: torch.Tensor, axes: Sequence[int]) -> Arrival:
        """Begin to sum ``x`` over the axes, on every device. Until the sum arrives ``x`` must not be read or
        written."""
        ...

    def start_all_gather(self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none") -> Arrival:
        """Begin to gather the rows ``x`` [n] of the joint ``axes``: [devices of the axes, n], row-major in their
        coordinates. Until they arrive ``x`` must not be written. code: one of ``codecs.CARRIERS``, which encodes rows;
        all devices get the same values."""
        ...

    def start_reduce_scatter(
        self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none", draw: tuple[int, ...] = ()
    ) -> Arrival:
        """Begin to sum ``x`` [devices of the joint ``axes``, n] over them: this device's row [n]. Until it
        arrives ``x`` must not be written. code: one of ``codecs.CARRIERS``, by which each row is encoded once; draw:
        the counters of the codec's random numbers."""
        ...


def cut_blocks(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """[..., extent, ...] → contiguous [size, ..., extent / size, ...]."""
    assert x.shape[dim] % size == 0, f"{tuple(x.shape)} does not divide by {size} along dim {dim}"
    return x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0).contiguous()


def merge_blocks(blocks: torch.Tensor, dim: int) -> torch.Tensor:
    """[size, ..., extent, ...] → contiguous [..., size · extent, ...]."""
    return blocks.movedim(0, dim).flatten(dim, dim + 1).contiguous()


class GatherPrefetch(Protocol):
    """See ``weight_gathers.GatherPrefetcher``."""

    def arrival(self, number: int) -> Arrival:
        """The gather of this number, started now if it is not in flight yet."""
        ...

    def follow(self, number: int) -> None:
        """Note that this gather has arrived, and start the next one."""
        ...


@dataclass
class Context:
    """The state that is bound while a local program runs (``use_context``).

    Random numbers are a function of (seed, step, microbatch, op, global index).
    """

    comm: Comm
    seed: int = 0
    step: int = 0
    microbatch: int = 0
    #: the factor of gradients where they become those of fp32 weights: one over the scale of the loss
    unscale: float = 1.0
    #: a context manager that the backward enters around ops that it recomputes
    repeating: Callable[[], AbstractContextManager[None]] = nullcontext
    #: the prefetcher of weight gathers; None: each gather starts when an op needs it
    ahead: GatherPrefetch | None = None
    #: the codec by which sharded weights are gathered and their gradients scattered
    code: str = "none"


_CURRENT: ContextVar[Context] = ContextVar("meshwright_context")


def current_context() -> Context:
    """The bound context; an op that needs it in the backward must keep it from the forward (autograd has threads of its
    own)."""
    try:
        return _CURRENT.get()
    except LookupError:
        raise RuntimeError("a local program runs only inside `comm.use_context(...)`, but none is bound") from None


@contextmanager
def use_context(context: Context) -> Iterator[Context]:
    """Bind ``context`` for the block."""
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)
