"""Ranks that start again agree on a name, whatever an attempt before has left in their store."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from meshwright.runtime.transport.restarts import attempt_name, store_of_attempt

RANKS = 4


def attempt(store: Any) -> set[str]:
    """The names that ranks find that begin in no order."""
    with ThreadPoolExecutor(RANKS) as pool:
        return set(pool.map(lambda rank: attempt_name(store, rank, RANKS, 20.0), (2, 0, 3, 1)))


def test_all_ranks_have_the_name_of_now() -> None:
    store = dist.HashStore()
    first, second = attempt(store), attempt(store)
    assert len(first) == len(second) == 1
    assert first != second


def test_what_an_attempt_that_failed_has_left_is_passed_over() -> None:
    store = dist.HashStore()
    (old,) = attempt(store)
    with pytest.raises(TimeoutError, match="rank 0 of 4: not all ranks came within 0 s to begin the attempt"):
        attempt_name(store, 0, RANKS, 0.1)  # rank 0 came, the others did not: its announcement has their old hellos
    announced = json.loads(store.get("meshwright/attempt"))[0]
    assert announced != old
    with pytest.raises(TimeoutError, match="rank 2 of 4"):
        attempt_name(store, 2, RANKS, 0.1)
    assert len(attempt(store) - {old, announced}) == 1


def test_nothing_is_agreed_on_where_nothing_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert store_of_attempt(timedelta(seconds=1)) is None
