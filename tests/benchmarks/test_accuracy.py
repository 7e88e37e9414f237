"""The pure parts of ``benchmarks/accuracy.py``: error statistics, the ranking's tau, and the list of trials."""

from __future__ import annotations

from importlib import import_module
from itertools import permutations
from types import ModuleType

import pytest

from tests.support.paths import BENCHMARKS


@pytest.fixture
def predictions(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """``benchmarks/predictions``: its modules that need no ranks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    return {name: import_module(f"predictions.{name}") for name in ("errors", "trials", "report")}


def test_kendall_tau_counts_inversions(predictions):
    tau = predictions["errors"].kendall_tau
    for order in permutations(range(5)):
        swaps, row = 0, list(order)  # bubble sort swaps once per inversion
        while row != sorted(row):
            for i in range(len(row) - 1):
                if row[i] > row[i + 1]:
                    row[i], row[i + 1] = row[i + 1], row[i]
                    swaps += 1
        assert tau(order, range(5)) == pytest.approx(1 - 2 * swaps / 10)


def test_kendall_tau_with_ties(predictions):
    tau = predictions["errors"].kendall_tau
    assert tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / (2 * 3) ** 0.5)  # the tied pair counts on one side only
    assert tau([1, 1], [1, 2]) is None
    assert tau([3], [4]) is None


def test_errors_are_relative_to_what_was_measured(predictions):
    errors = predictions["errors"]
    found = errors.summarize([1.1, 1.8, 3.0], [1.0, 2.0, 4.0])
    assert (found.count, found.tau) == (3, 1.0)
    assert found.median == pytest.approx(0.1)
    assert found.p90 == pytest.approx(0.1 + 0.8 * 0.15)
    assert found.bias == pytest.approx(-0.1)
    with pytest.raises(ValueError, match="at least one value"):
        errors.quantile([], 0.5)


def test_trials_are_many_different_and_possible(predictions):
    trials = predictions["trials"]
    real = trials.select(["real", "sleep"], quick=False)
    assert len(real) >= 24
    assert len({(t.part, t.name) for t in trials.TRIALS}) == len(trials.TRIALS)
    assert len({t.target for t in real}) >= 5
    assert {t.ranks for t in trials.select(["sleep"], quick=False)} == {4, 8}
    for trial in trials.TRIALS:
        assert trial.batch % trial.microbatches == 0, trial
        sizes = {word[:2]: int(word[2:]) for word in trial.strategy.split(",") if word}
        assert trial.batch // trial.microbatches % sizes.get("dp", 1) == 0, trial
        assert trial.ranks <= 2 or trial.part != "real", trial
    for part in trials.PARTS:
        assert trials.select([part], quick=True), part


def test_report_keeps_parts_and_tables_apart(predictions):
    def result(part: str, target: str, grid: float, ops: float, measured: float) -> dict:
        memory = {"predicted": {"grid": [5.0, 11.0], "ops": [5.0, 11.0]}, "live": [10.0, 5.0], "resident": [0, 0]}
        predicted = {"grid": grid, "ops": ops}
        return {"part": part, "target": target, "predicted_s": predicted, "median_s": measured, "memory": memory}

    found = predictions["report"].summaries(
        [result("real", "a", 2.0, 1.0, 1.0), result("real", "b", 3.0, 2.0, 2.0), result("sleep", "a", 4.0, 1.0, 4.0)]
    )
    assert found["real"]["grid"]["step"]["all"]["median"] == pytest.approx(0.75)
    assert found["real"]["ops"]["step"]["all"]["median"] == 0.0
    assert found["real"]["grid"]["step"]["b"]["count"] == 1
    assert found["sleep"]["grid"]["step"]["all"]["median"] == 0.0
    assert found["sleep"]["ops"]["step"]["all"]["bias"] == pytest.approx(-0.75)
    assert found["real"]["grid"]["memory"]["all"]["median"] == pytest.approx(0.1)  # of the fullest rank, whichever
