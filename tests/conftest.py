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


@pytest.fixture(autouse=True)
def no_plans_of_other_tests(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests change prices and passes under the search: no plan of theirs may answer another one's question."""
    monkeypatch.setattr("meshwright.compiler.known.cache_directory", lambda: tmp_path_factory.mktemp("plans"))
