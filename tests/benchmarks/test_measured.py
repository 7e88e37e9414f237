"""Figures: records that benchmarks leave, and the documents that are made of them."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``benchmarks/reporting/results.py``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("reporting.results")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``benchmarks/measured.py``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("measured")


# ---- records


def test_a_figure_is_behind_even_or_ahead_of_its_peer(results):
    def verdict(value, low=None, high=None, even=1.0, better="less"):
        spread = None if low is None else results.Spread(low, high, "rounds")
        return results.Record("row", value, "×", None, spread, "peer", even, better).verdict

    assert verdict(1.1) == verdict(0.9, better="more") == verdict(None) == "behind"
    assert verdict(0.9) == verdict(1.1, better="more") == verdict(1.0) == "ahead"
    assert verdict(1.1, 0.95, 1.2) == verdict(0.9, 0.85, 1.0) == "even"
    assert verdict(1.1, 1.05, 1.2) == "behind"
    assert verdict(1.0, 1.0, 1.0) == "ahead"  # computed: there is no noise in which a tie could lie
    assert verdict(1.1, even=None) == ""
    with pytest.raises(ValueError, match="'less' or 'more'"):
        results.Record("row", 1.0, "×", better="larger")


def test_a_run_replaces_the_records_of_its_rows(results, tmp_path):
    def save(*rows, quick=False):
        records = [results.Record(row, value, "s", even=1.0, peer="peer") for row, value in rows]
        results.save_records("made_up", records, quick, tmp_path)

    save(("a", 1.0), ("b", 2.0))
    save(("b", 3.0))
    save(("b", 9.0), quick=True)  # no measurement
    runs = results.load_runs("made_up", tmp_path)
    assert [[(one.row, one.value) for one in run.records] for run in runs] == [[("a", 1.0)], [("b", 3.0)]]
    assert {run.torch for run in runs} == {import_module("torch").__version__}
    assert all(run.date and run.command and run.machine["cores"] for run in runs)
    save(("a", 4.0), ("b", 5.0))
    assert len(results.load_runs("made_up", tmp_path)) == 1  # nothing is left of the others
    with pytest.raises(ValueError, match=r"row of its own, but got \['a'\]"):
        save(("a", 1.0), ("a", 2.0))
    assert results.load_runs("another", tmp_path) == []


def test_records_read_as_they_were_written(results, tmp_path):
    record = results.Record("a | b", 1.5, "×", 2, results.Spread(1.4, 1.6, "3 runs"), "peer", 1.0, "more", "a note")
    plain = results.Record("c", None, "s", note="not reached")
    run = results.Run("2026-01-02", "abc1234", None, None, None, (record, plain), "README.md")
    results.dump_runs("made_up", [run], tmp_path)
    assert results.load_runs("made_up", tmp_path) == [run]
    assert json.loads((tmp_path / "made_up.json").read_text())["benchmark"] == "made_up"


# ---- documents


def test_the_documents_are_made_of_the_records(measured):
    assert measured.PAGE.read_text() == measured.page(), "run make measured"
    text = measured.README.read_text()
    assert text == measured.readme(text), "run make measured"


def test_every_record_says_how_it_came_about(results, measured):
    for section, runs in measured.runs_of(results.RESULTS):
        rows = [record.row for _, run in runs for record in run.records]
        assert len(rows) == len(set(rows)), section.benchmark
        for _, run in runs:
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", run.date), section.benchmark
            assert re.fullmatch(r"[0-9a-f]{7,}\+?", run.commit), section.benchmark
            assert run.machine["cores"], section.benchmark
            assert run.transcribed or (run.command and run.torch and run.machine["cpu"]), section.benchmark


def test_losses_come_first(measured):
    page = measured.page()
    first, _, rest = page.partition("\n## A training step")
    behind = [line for line in first.splitlines() if line.startswith("| ") and "| behind |" in line]
    assert behind
    assert len(behind) == rest.count("| behind |")
    assert "| ahead |" not in first


def test_results_without_a_section_or_marks_are_refused(results, measured, tmp_path):
    results.dump_runs("made_up", [], tmp_path)
    with pytest.raises(ValueError, match="made_up; add one"):
        measured.page(tmp_path)
    with pytest.raises(ValueError, match="put them back"):
        measured.readme("no marks", tmp_path)
    with pytest.raises(ValueError, match="measure it"):
        measured.readme(f"{measured.BEGIN}\n{measured.END}", tmp_path)


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 140
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert max(map(len, cells)) <= 160


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_prose_is_wrapped(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not long
