"""One error for all ranks: what goes wrong on one rank is raised on every rank, so that none waits for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

__all__ = ["agree", "alike"]


def agree(fault: Exception | None) -> None:
    """Raise on every rank if any rank has a fault: on that rank the fault itself, elsewhere its text as ValueError
    (RuntimeError for what is no user error). Collective over the world."""
    told = None if fault is None else (isinstance(fault, ValueError), type(fault).__name__, str(fault))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, told)
    if fault is not None:
        raise fault
    for rank, entry in enumerate(everyone):
        if entry is not None:
            users, kind, message = entry
            if users:
                raise ValueError(f"rank {rank}: {message}")
            raise RuntimeError(f"rank {rank} failed: {kind}: {message}")


@contextmanager
def alike() -> Iterator[None]:
    """A block without collectives that succeeds on all ranks or fails on all (``agree``). Collective at its end."""
    fault: Exception | None = None
    try:
        yield
    except Exception as error:
        fault = error
    agree(fault)
