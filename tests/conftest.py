"""Fixtures that all tests share. ``tests`` is imported from the root of the checkout (``pythonpath`` in
pyproject.toml), here as on ranks: a test's functions have one name in all processes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.oracles", "tests.support")

from tests.support.ranks import RankPool  # noqa: E402 - its asserts are rewritten


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """A pool of local ranks: ``ranks.run(4, function, *arguments)``."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def no_objects_of_other_modules() -> None:
    """What imports and earlier modules left alive no collection of garbage, and no count of live tensors, has to
    visit."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_plans_of_other_tests(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests change prices and passes under the search: no plan of theirs may answer another one's question."""
    monkeypatch.setattr(
        "meshwright.compiler.search.plan_cache.cache_directory", lambda: tmp_path_factory.mktemp("plans")
    )
