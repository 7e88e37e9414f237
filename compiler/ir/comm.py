"""What a local program needs from whoever runs it: its place on the mesh, collectives, and the counters of random ops.

The compiler emits programs against these protocols; ``runtime/`` implements them over torch.distributed, and
``LockstepGroup`` in ``rules/lockstep.py`` over threads of one process. Nothing here starts a process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Arrival", "Comm", "CompletedArrival", "Context", "GatherPrefetch", "current_context", "use_context"]


class Arrival(Protocol):
    """A collective on its way."""

    def wait(self) -> torch.Tensor:
        """Its result. To be asked for once."""
        ...


@dataclass(frozen=True)
class CompletedArrival:
    """A collective that is over when it starts."""

    x: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Its result."""
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
        """Sends ``before`` to the device before this one along the axis and ``after`` to the one behind it, and returns
        what these two sent here, from the one before first.

        Each of the two is None on all devices or has one shape on all of an axis; what is None or empty costs nothing.
        From beyond the ends come zeros, or, if ``cyclic``, what is at the other end.
        """
        ...

    def start_send(self, x: torch.Tensor, axis: int, to: int, source: int) -> Callable[[], torch.Tensor]:
        """Begin to send ``x`` to the device at coordinate ``to`` of the axis; returns what waits for what the one at
        ``source`` sends here, of the same shape.

        Every device of the axis sends once and is sent to once. Until then nobody may write to ``x``.
        """
        ...

    def start_sum(self, x: torch.Tensor, axes: Sequence[int]) -> Arrival:
        """Begin to sum ``x`` over the axes, on every device. Until it is there nobody may read or write ``x``."""
        ...

    def start_all_gather(self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none") -> Arrival:
        """Begin to gather the rows ``x`` [n] of the joint ``axes``: [devices of the axes, n], row-major in their
        coordinates. Until it is there nobody may write to ``x``. code: one of ``codecs.CARRIERS``, in which rows
        travel; all devices get the same."""
        ...

    def start_reduce_scatter(
        self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none", draw: tuple[int, ...] = ()
    ) -> Arrival:
        """Begin to sum ``x`` [devices of the joint ``axes``, n] over them: this device's row [n]. Until it is there
        nobody may write to ``x``. code: one of ``codecs.CARRIERS``, in which each row travels once; draw: of its random
        numbers."""
        ...


class GatherPrefetch(Protocol):
    """See ``weight_gathers.Ahead``."""

    def arrival(self, number: int) -> Arrival:
        """A gather that is asked for now."""
        ...

    def follow(self, number: int) -> None:
        """It is there."""
        ...


@dataclass
class Context:
    """Bound while a local program runs. Random ops are a function of (seed, step, microbatch, op, global index).

    repeating: entered by a backward around what it runs once more; unscale: what gradients are multiplied with where
    they become those of fp32 weights, one over the scale of the loss; ahead: who starts gathers of weights, if not
    those who ask for them; code: in which weights in blocks are gathered and their gradients scattered."""

    comm: Comm
    seed: int = 0
    step: int = 0
    microbatch: int = 0
    unscale: float = 1.0
    repeating: Callable[[], AbstractContextManager[None]] = nullcontext
    ahead: GatherPrefetch | None = None
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
