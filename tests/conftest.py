"""Fixtures that all tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(
    0, str(Path(__file__).parent)
)  # the rank functions of test modules are imported by name in other processes

from ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """A pool of local ranks: ``ranks.run(4, "test_module:function", *arguments)``."""
    pool = RankPool()
    yield pool
    pool.close()
