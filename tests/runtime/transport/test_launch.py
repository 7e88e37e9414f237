"""Local ranks: results in order, the first failure, hangs; and the pool that the tests run on."""

from __future__ import annotations

from typing import Any

import pytest
from meshwright.runtime.transport.launch import spawn_local

from tests.support.ranks import pool_check


def test_spawn_local_returns_results_and_the_first_failure() -> None:
    assert spawn_local("tests.support.ranks:pool_check", 2, ("rank",), timeout_s=60) == [0, 1]
    with pytest.raises(RuntimeError, match="rank 1 failed: ValueError: rank one says no"):
        spawn_local("tests.support.ranks:pool_check", 2, ("raise",), timeout_s=60)
    with pytest.raises(ValueError, match="cannot be found"):
        spawn_local("tests.support.ranks:absent", 2)


@pytest.mark.ranks
def test_pool_shows_failures_and_hangs_and_recovers(ranks: Any) -> None:
    with pytest.raises(AssertionError, match="rank one says no"):
        ranks.run(2, pool_check, "raise")
    with pytest.raises(AssertionError, match="did not finish") as caught:
        ranks.run(2, pool_check, "hang", timeout_s=8)
    assert "pool_check" in str(caught.value)  # the stack of the rank that hangs
    assert ranks.run(3, pool_check, "rank") == [0, 1, 2]
