"""The log of a run, read again: figures, findings, text, page, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from meshwright.cli.commands import main
from meshwright.compiler.report.run_log import RunLog

from tests.support.browser import chromium, opened


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": 4.0 - number / 10, "step_s": 0.2, "predicted_step_s": 0.1, **more}


RANK = {"stage": 0, "backward_s": 0.0, "weights_s": 0.0, "recompute_s": 0.0, "skew_s": 0.0, "resident_bytes": 2**30}
REPORT = {
    "predicted_step_s": 0.1, "measured_step_s": 0.2, "findings": ["gradient of stage 0: explains 90 %"],
    "terms": [{"stage": 0, "name": "gradient", "predicted_s": 0.01, "measured_s": 0.1, "times": 1, "effect_s": 0.1}],
    "ranks": [{**RANK, "rank": rank, "forward_s": own} for rank, own in enumerate((1.0, 1.02, 1.5))], "error": 1.0,
}  # fmt: skip
RECORDS = [
    {"kind": "run", "step": 0, "schedule": "1f1b", "stages": 1, "devices": 3, "global_batch": 8, "microbatches": 2},
    step(1), step(2, tokens_per_s=100.0), step(3, loss=None), {"kind": "evaluation", "step": 3, "loss": 3.5},
    {"kind": "checkpoint", "step": 3, "path": "at/<b>3"}, step(2, tokens_per_s=300.0), step(3),
    step(4, tokens_per_s=200.0),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    return tmp_path


def test_a_run_that_went_on_has_every_step_once(folder: Path) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # a record that was being written when the run was killed
    log = RunLog.load(folder)
    assert [record["step"] for record in log.steps] == [1, 2, 3, 4]
    assert log.values("tokens_per_s") == [300.0, 200.0]
    facts = dict(log.facts())
    assert facts["loss"] == "3.9000 to 3.6000, least 3.6000"
    assert facts["predicted"] == "100 ms, 2.00× measured over it"
    assert facts["speed"] == "250 tokens/s (median)"
    assert facts["checkpoint"] == "at/<b>3, step 3"


def test_findings(folder: Path) -> None:
    found = RunLog.load(folder).findings()
    assert found == [*REPORT["findings"], "rank 2 is slow: 1.47× the median of the ranks of stage 0"]
    even = REPORT | {"findings": [], "ranks": REPORT["ranks"][:2]}
    (folder / "report.json").write_text(json.dumps(even))
    assert "no rank is slower" in RunLog.load(folder).findings()[0]
    (folder / "report.json").unlink()
    assert "MetricsLogger.report()" in RunLog.load(folder).findings()[0]


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--html", str(folder / "run.html")]) == 0
    text = capsys.readouterr().out
    assert "gradient of stage 0" in text
    assert "1 evaluation; the last one: loss 3.5" in text
    assert "<b>3" not in (folder / "run.html").read_text()
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0] == RECORDS[1]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", None, "cannot be read"),
        ("metrics.jsonl", '{"kind": "step"}\n', "a record has a kind and a step"),
        ("metrics.jsonl", "no JSON\n" + json.dumps(RECORDS[1]), "a record is a JSON object, but got 'no JSON'"),
        ("metrics.jsonl", json.dumps(RECORDS[0]) + "\n", "has records of steps, but got none"),
        ("report.json", "{", "breaks off or is corrupt"),
        ("report.json", "[]", "is no JSON object"),
        ("report.json", json.dumps(REPORT | {"terms": [{"stage": -1}]}), "a run is a report as Report.to_json"),
    ],
)  # fmt: skip
def test_what_is_refused(
    folder: Path, name: str, content: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    assert main(["report", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium: apt-get install chromium")
def test_the_page(folder: Path) -> None:
    RunLog.load(folder).to_html(folder / "run.html")
    with opened(folder / "run.html") as (page, said):
        assert "rank 2 is slow" in page.locator("#findings").inner_text()
        assert "gradient" in page.locator("#terms-table").inner_text()
        assert page.locator("#loss-chart canvas").count() == 1
        assert "no norm of the gradient" in page.locator("#progress").inner_text()
        page.click("#theme")
        assert page.locator("html.dark").count() == 1
        assert not said
