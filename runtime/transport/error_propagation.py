"""One error for all ranks: what goes wrong on one rank is raised on every rank, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from ...compiler.errors import InfeasibleError
from .first_error import FirstError, quote

T = TypeVar("T")

__all__ = ["broadcast_from_rank0", "fail_together", "raise_on_all_ranks", "share_from"]


def raise_on_all_ranks(fault: Exception | None, value: Any = None) -> list[Any]:
    """Raise on every rank if any rank has a fault: on that rank the fault itself, elsewhere its text as ValueError
    (RuntimeError for what is no user error). Else the values of all ranks. Collective over the world."""
    mine = None if fault is None else (isinstance(fault, ValueError), FirstError.of(fault, shared=True))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, value))
    for entry, _ in everyone:
        if entry is not None:
            users, first = entry
            found = fault or _relayed(users, first)
            quote(found, first)
            raise found
    return [other for _, other in everyone]


def _relayed(users: bool, first: FirstError) -> Exception:
    """The error of another rank."""
    if users:
        return ValueError(f"rank {first.rank}: {first.message}")
    return RuntimeError(f"rank {first.rank} failed: {first.kind}: {first.message}")


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


def share_from(rank: int, make: Callable[[], T]) -> T:
    """Return on every rank the value that one rank makes. All raise the error that it raises. Collective; unlike after
    a broadcast, no rank goes on before all are here."""
    fault, value = None, None
    try:
        value = make() if dist.get_rank() == rank else None
    except Exception as error:
        fault = error
    found: T = raise_on_all_ranks(fault, value)[rank]
    return found


def broadcast_from_rank0(make: Callable[[], T]) -> T:
    """Return on every rank the value that rank 0 makes, so that measured times cannot make ranks disagree. All raise
    the error that rank 0 raises. Collective."""
    fault: Exception | None = None
    shared: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            shared[0] = make()
        except Exception as error:
            fault, shared = error, [None, (isinstance(error, ValueError), FirstError.of(error, shared=True))]
    dist.broadcast_object_list(shared, src=0)
    if shared[1] is not None:
        users, first = shared[1]
        kind = InfeasibleError if first.kind == "InfeasibleError" else ValueError if users else RuntimeError
        found = fault or kind(first.message)
        quote(found, first)
        raise found
    value: T = shared[0]
    return value
