"""``meshwright profile`` and ``cluster diff``: bad input is one line and status 2."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from meshwright.cli import main
from meshwright.costmodel.cluster import Cluster


# ---- the command line
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "a positive number of seconds, but got '0'"),
        (["--budget", "nan"], "a positive number of seconds, but got 'nan'"),
        (["--ranks", "0"], "a whole number of 1 or more, but got '0'"),
        (["-o", "nowhere/c.json"], "an output is a file in a folder that can be written to"),
        (["--ranks", "1", "--model", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
    assert not os.listdir(tmp_path)


def test_ranks_beside_torchrun_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["profile", "--ranks", "4"]) == 2
    assert "torchrun started 2 ranks, but got --ranks 4" in capsys.readouterr().err


def test_diff_compares_two_files_and_names_a_bad_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Cluster.preset("p3.16xlarge", 1).save("a.json")
    Cluster.preset("p3.16xlarge", 2).save("b.json")
    assert main(["diff", "a.json", "b.json"]) == 0
    assert "8 devices against 16" in capsys.readouterr().out
    Path("b.json").write_text(json.dumps({"format": "meshwright-table"}))
    assert main(["diff", "a.json", "b.json"]) == 2
    assert "b.json" in capsys.readouterr().err
