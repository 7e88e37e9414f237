"""check --write, simulate and diff in this process: what they print, and how they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshwright.cli import main
from meshwright.cli.terminal import progress_bar
from meshwright.compiler.plan.plan import Plan

from tests.support.browser import chromium, opened

PLAN = ("plan", "gpt-demo", "--cluster", "p3.16xlarge:1", "--strategy", "dp2,tp2", "--microbatches", "4")
ON_CPU = ("--cluster", "cpu")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert main([*PLAN, "-o", str(path)]) == 0
    return path.read_text()


@pytest.fixture
def folder(planned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a plan and the same one with half as many microbatches, by hand."""
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(planned)
    Path("edited.json").write_text(planned.replace('"microbatches": 4', '"microbatches": 2'))
    return tmp_path


def test_an_edit_is_said_priced_and_stored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Plan.load("plan.json").prediction.step_s
    assert main(["show", "edited.json"]) == 0
    out, err = capsys.readouterr()
    assert "edited: prices are of another plan" in out
    assert "predicted" not in out
    assert "check --write" in err
    assert main(["check", "edited.json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "edited.json edited: prices are of another plan"
    assert out[1].startswith("priced now: ")
    assert out[1].endswith("no bound holds")
    assert Plan.load("edited.json").price_state == "edited"
    assert main(["check", "edited.json", "--write"]) == 0
    stored = Plan.load("edited.json")
    assert stored.price_state == "current"
    assert stored.prediction.step_s != before
    capsys.readouterr()
    assert main(["show", "edited.json"]) == 0
    assert "predicted" in capsys.readouterr().out


def test_every_broken_rule_is_a_line_and_nothing_is_stored(
    folder: Path, planned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {**json.loads(planned), "microbatches": 3}
    document["stages"][0]["devices"][0] = 7
    Path("broken.json").write_text(text := json.dumps(document))
    assert main(["check", "broken.json", "--write"]) == 2
    out, err = capsys.readouterr()
    assert "global_batch 32 is not divisible by microbatches 3" in out.splitlines()
    assert "stage 0: devices are consecutive and rise, but got [7, 1, 2, 3]" in out.splitlines()
    assert "no longer holds: 2 faults" in err
    assert Path("broken.json").read_text() == text
    assert main(["show", "broken.json"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_that_a_file_names_is_not_imported(
    folder: Path, planned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {**json.loads(planned), "microbatches": 2}
    document["provenance"]["target"] = "antigravity:fly"
    Path("foreign.json").write_text(json.dumps(document))
    for command in (
        ["check", "foreign.json"],
        ["simulate", "foreign.json"],
        ["diff", "foreign.json", "--cluster", "cpu"],
    ):
        assert main(command) == 2
        assert "got no --target" in capsys.readouterr().err
    assert main(["check", "foreign.json", "--target", "gpt-demo"]) == 0


def test_simulate_prints_both_prices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "plan.json", "--set", "microbatches=2", "--set", "compute=2x", "-o", "new.json"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("A  plan.json\nB  plan.json: microbatches=2, compute=2x\n")
    assert "What they promise" in out
    assert "wrote new.json" in err
    assert Plan.load("new.json").price_state == "current"
    assert main(["simulate", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "plans"
    for change, words in (
        ("microbatches=5", "not divisible by microbatches 5"),
        ("x=1", "a change is of"),
        ("x", "name=value"),
    ):
        assert main(["simulate", "plan.json", "--set", change]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1


def test_diff_of_files_and_clusters(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    assert main(["diff", "plan.json", "--cluster", "dgx-h100:1"]) == 0
    out = capsys.readouterr().out
    assert "dgx-h100:1, 8 devices" in out
    assert max(map(len, out.splitlines())) <= 44
    assert main(["diff", "plan.json", "plan.json"]) == 0
    assert capsys.readouterr().out.endswith("no difference\n")
    assert main(["diff", "plan.json", "edited.json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sections"][0]["note"] == "B: edited: prices are of another plan"
    assert main(["diff", "dgx-h100", "dgx-h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "clusters"
    assert main(["diff", "dgx-h100", "dgx-h200"]) == 0
    assert capsys.readouterr().out.startswith("hardware: ")
    for arguments in (
        ["plan.json"],
        ["plan.json", "nowhere"],
        ["dgx-h100", "--cluster", "cpu"],
        ["nowhere", "plan.json"],
    ):
        assert main(["diff", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_progress_without_a_terminal_is_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 9.0, 14.0])
    monkeypatch.setattr("meshwright.cli.terminal.perf_counter", lambda: next(now))
    with progress_bar() as progress:
        for name, fraction in (("capture", 0.0), ("floors", 0.0), ("floors", 0.3), ("floors", 0.4), ("floors", 0.5)):
            progress(name, fraction)
    assert capsys.readouterr().err == "[3 s] floors\n[14 s] floors 50 %\n"


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium: apt-get install chromium")
def test_two_plans_side_by_side_on_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "plan.json", "--set", "microbatches=8", "-o", "<b>.json", "--html", "s.html"]) == 0
    assert main(["diff", "plan.json", "<b>.json", "--html", "d.html"]) == 0
    assert "wrote d.html" in capsys.readouterr().err
    assert main(["diff", "plan.json", "plan.json", "--html", "same.html"]) == 0
    for name, after in (("d.html", "<b>.json"), ("s.html", "plan.json: microbatches=8")):
        with opened(folder / name) as (page, said):
            assert page.locator("dd").all_inner_texts() == ["plan.json", after]
            assert "microbatches\t4\t8\t2×" in page.locator("#sections").inner_text()
            assert page.locator("canvas").count() == 2
            page.click("#theme")
            assert page.locator("html.dark").count() == 1
            assert not said
    with opened(folder / "same.html") as (page, said):
        assert "no difference" in page.locator("#sections").inner_text()
        assert not said
    assert main(["diff", "plan.json", "<b>.json", "--html", "nowhere/d.html"]) == 2
