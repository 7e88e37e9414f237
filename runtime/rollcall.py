"""Who is there: a roll call over the store that ranks meet in, so that a missing rank is named and not waited for.

A collective with a rank missing blocks until its group's time-out and then names nobody. A store is asked instead:
every rank writes a key, rank 0 waits for all keys until a deadline and tells the others who is missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch.distributed as dist

__all__ = ["AbsentRankError", "call_roll", "missing_ranks", "world_store"]


class AbsentRankError(TimeoutError):
    """Ranks did not answer in time."""


def world_store() -> Any:
    """The store in which the world's ranks met."""
    group: Any = dist.group.WORLD
    return group.get_group_store()


def call_roll(purpose: str, timeout_s: float, store: Any = None, place: tuple[int, int] | None = None) -> None:
    """Return once every rank is here; raise AbsentRankError on all ranks that are, naming those that are not.

    purpose: what the ranks meet for, as the error says it. store and place = (rank, world size): by default the
    process group's.
    """
    rank, world = place or (dist.get_rank(), dist.get_world_size())
    missing = missing_ranks(purpose, timeout_s, store or world_store(), rank, world)
    if missing:
        names = ", ".join(map(str, missing))
        verb = "rank" if len(missing) == 1 else "ranks"
        raise AbsentRankError(
            f"every rank takes part in {purpose}, but got no answer from {verb} {names} of {world} within"
            f" {timeout_s:.3g} s; start them again and check the network between the hosts"
        )


def missing_ranks(purpose: str, timeout_s: float, store: Any, rank: int, world: int) -> Sequence[int]:
    """The ranks that did not come within ``timeout_s``; rank 0 alone if it is the one that cannot be reached."""
    deadline = monotonic() + timeout_s
    try:
        # every rank calls in the same order, so equal numbers are the same call
        prefix = f"meshwright/{store.add(f'meshwright/calls/{rank}', 1)}/{purpose}"
        store.set(f"{prefix}/{rank}", b"here")
        if rank != 0:
            # rank 0 answers at the latest when its own time is over, which may start later than ours
            store.wait([f"{prefix}/missing"], timedelta(seconds=2 * timeout_s + 5))
            return [int(r) for r in json.loads(store.get(f"{prefix}/missing"))]
    except (RuntimeError, OSError):
        return [0]
    missing = []
    for other in range(1, world):
        try:
            store.wait([f"{prefix}/{other}"], timedelta(seconds=max(deadline - monotonic(), 0.001)))
        except RuntimeError:
            missing.append(other)
    store.set(f"{prefix}/missing", json.dumps(missing))
    return missing
