"""``meshwright show --html`` and ``--trace``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshwright.cli import BAD_INPUT, main

from tests.support.large_plan import small_plan


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    small_plan(schedule="1f1b").save(path)
    return path


def test_show_writes_a_page_and_a_trace(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main(["show", str(saved), "--html", str(page), "--trace", str(trace), "--with", str(saved)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert f"wrote {page}" in said.err
    assert page.read_text().startswith("<!doctype html>")
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"M", "X"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--measured", "step.json"], "only a picture takes --measured"),
        (["--with", "a.json", "--target", "gpt-demo"], "only a picture takes --with and --target"),
        (["--html", "no/such/folder/page.html"], "an output is a file in a folder"),
        (["--html", "page.html", "--measured", "{plan}"], "a trace is a JSON object of version 1"),
        (["--html", "page.html", "--with", "missing.json"], "missing.json: cannot be read"),
        (["--html", "page.html", "--target", "gpt-demo"], "an outline is of the model"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_in_a_line(
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["show", str(saved), *(option.format(plan=saved) for option in options)]) == BAD_INPUT
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in error
    assert not (tmp_path / "page.html").exists()
