"""One error for all ranks: what goes wrong on one rank is raised on every rank, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from ...compiler.errors import InfeasibleError

T = TypeVar("T")

__all__ = ["broadcast_from_rank0", "fail_together", "raise_on_all_ranks"]


def raise_on_all_ranks(fault: Exception | None) -> None:
    """Raise on every rank if any rank has a fault: on that rank the fault itself, elsewhere its text as ValueError
    (RuntimeError for what is no user error). Collective over the world."""
    description = None if fault is None else (isinstance(fault, ValueError), type(fault).__name__, str(fault))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, description)
    if fault is not None:
        raise fault
    for rank, entry in enumerate(everyone):
        if entry is not None:
            users, kind, message = entry
            if users:
                raise ValueError(f"rank {rank}: {message}")
            raise RuntimeError(f"rank {rank} failed: {kind}: {message}")


@contextmanager
def fail_together() -> Iterator[None]:
    """A block without collectives that succeeds on all ranks or fails on all (``raise_on_all_ranks``). Collective at
    its end."""
    fault: Exception | None = None
    try:
        yield
    except Exception as error:
        fault = error
    raise_on_all_ranks(fault)


def broadcast_from_rank0(make: Callable[[], T]) -> T:
    """Return on every rank the value that rank 0 makes, so that measured times cannot make ranks disagree. All raise
    the error that rank 0 raises. Collective."""
    fault: Exception | None = None
    shared: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            shared[0] = make()
        except Exception as error:
            fault, shared = error, [None, f"{type(error).__name__}\n{error}"]
    dist.broadcast_object_list(shared, src=0)
    if fault is not None:
        raise fault
    if shared[1]:
        kind, _, message = shared[1].partition("\n")
        raise {"InfeasibleError": InfeasibleError, "ValueError": ValueError, "CaptureError": ValueError}.get(
            kind, RuntimeError
        )(message)
    value: T = shared[0]
    return value
