"""A store of its own for every attempt of a job that torchrun restarts.

With ``--max-restarts`` torchrun keeps the store in which ranks meet, and with it everything that the attempt before has
written there: Gloo reads the addresses of processes that are gone ("connectFullMesh failed … connection refused"), and
a verdict on the last attempt would end the next. So the ranks agree on a name for this attempt, and use the store under
that prefix. Counting attempts does not do: torchrun's own count differs between the agents of several hosts.

    rank r     writes a random text as its hello, and waits until rank 0's announcement repeats it: it is of now
    rank 0     reads the hellos, and announces them with a random name, until every rank has confirmed that name
"""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["attempt_name", "store_of_attempt"]

_HELLO, _ANNOUNCED, _CONFIRMED = "meshwright/hello", "meshwright/attempt", "meshwright/confirmed"
_POLL_S = 0.02


def store_of_attempt(timeout: timedelta) -> tuple[Any, int, int] | None:
    """(store, rank, world size) of this attempt; None where torchrun restarts nothing, and the usual way does."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return None
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    name = attempt_name(store, rank, world_size, timeout.total_seconds())
    return dist.PrefixStore(f"attempt-{name}", store), rank, world_size  # type: ignore[attr-defined]


def attempt_name(store: Any, rank: int, world_size: int, timeout_s: float) -> str:
    """A name on which the ranks that call this now agree. TimeoutError if not all come."""
    until, hello = time.monotonic() + timeout_s, secrets.token_hex(8)
    store.set(f"{_HELLO}/{rank}", hello)
    name = hello if rank == 0 else ""
    while time.monotonic() < until:
        if rank == 0:
            hellos = [_read(store, f"{_HELLO}/{other}") for other in range(world_size)]
            store.set(_ANNOUNCED, json.dumps([name, hellos]))
            if all(store.check([f"{_CONFIRMED}/{name}/{other}"]) for other in range(1, world_size)):
                return name
        elif announced := _read(store, _ANNOUNCED):
            name, hellos = json.loads(announced)
            if len(hellos) == world_size and hellos[rank] == hello:
                store.set(f"{_CONFIRMED}/{name}/{rank}", "")
                return str(name)
        time.sleep(_POLL_S)
    raise TimeoutError(f"rank {rank} of {world_size}: not all ranks came within {timeout_s:.0f} s to begin the attempt")


def _read(store: Any, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""
