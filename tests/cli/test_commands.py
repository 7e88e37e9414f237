"""The command line in this process: exit statuses, one line per error, pure JSON, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from meshwright.cli import main
from meshwright.cli.targets import build_target
from meshwright.compiler.plan.plan import Plan

TARGETS = """
import ctypes
import os
from collections import UserDict
import torch
from torch import nn

print("a target may print on import")

class Tiny(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)
    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(self.up(x).relu()), y)

class Branching(Tiny):
    def forward(self, x, y):
        if x.sum() > 0:
            x = -x
        return super().forward(x, y)

class Huge(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(2**18, 2**18, device="meta")
    def forward(self, x):
        return self.one(x).sum()

def tiny():
    print("and when called")
    return Tiny(), (torch.zeros(8, 16), torch.zeros(8, 16))
def noisy():
    os.write(1, b"past Python\\n")
    ctypes.CDLL(None).puts(b"held back by C")
    return tiny()
def wide():
    return Tiny(64), (torch.zeros(8, 16), torch.zeros(8, 16))
def keywords():
    return Tiny(), (), {"x": torch.zeros(8, 16), "y": torch.zeros(8, 16)}
def batch():
    return Tiny(), UserDict(keywords()[2])
def branching():
    return Branching(), (torch.zeros(8, 16), torch.zeros(8, 16))
def huge():
    return Huge(), (torch.zeros(8, 2**18, device="meta"),)
def not_a_model():
    return 42
def broken():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with the module ``cli_targets``."""
    (tmp_path / "cli_targets.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("cli_targets", None)
    return tmp_path


def files(folder: Path) -> set[str]:
    """What lies there, hidden files too, caches not."""
    return {name for name in os.listdir(folder) if name != "__pycache__"}


PLAN = ("plan", "cli_targets:tiny", "--cluster", "p3.16xlarge:1", "--global-batch", "16")


def test_plan_show_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "-o", "plan.json"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Plan\n")
    assert "a target may print" not in out
    assert "wrote plan.json" in err
    assert files(folder) == {"cli_targets.py", "plan.json"}
    plan = Plan.load("plan.json")
    assert plan.global_batch == 16

    assert main(["show", "plan.json"]) == 0
    shown = capsys.readouterr().out
    assert f"{plan.model}, {len(plan.layers)} layers" in shown
    assert main(["show", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == plan.model

    assert main(["check", "plan.json", "--target", "cli_targets:tiny", "--cluster", "p3.16xlarge:1"]) == 0
    assert capsys.readouterr().out == "plan.json holds by itself and for the model and for the cluster\n"
    assert main(["check", "plan.json", "--target", "cli_targets:wide", "--cluster", "p3.16xlarge:2"]) == 2
    out, err = capsys.readouterr()
    assert "the plan is of model" in out
    assert "the cluster differs: 8 devices against 16" in out
    assert err.splitlines()[-1].startswith("meshwright: plan.json no longer holds: ")


def test_json_is_one_object_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forced = ["--strategy", "pp2,dp2", "--microbatches", "2", "--schedule", "gpipe", "--optimizer", "SGD"]
    assert main([*PLAN, "--json", *forced]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["microbatches"], figures["schedule"], figures["optimizer"]) == (2, "gpipe", "SGD")
    assert [stage["mesh_shape"] for stage in figures["stages"]] == [[2], [2]]
    assert figures["idle_devices"] == 4
    assert figures["capture_s"] > 0
    assert figures["passes"]["total"] == figures["search_s"]
    assert files(folder) == {"cli_targets.py"}


def test_wishes_several_plans_and_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wishes = ["--executable", "--constraint", "stages = 2", "--time-limit", "60", "-o", "plan.json"]
    assert main([*PLAN, *wishes, "--top-k", "2", "--json"]) == 0
    several = json.loads(capsys.readouterr().out)
    assert len(several) == 2
    assert several[0]["step_s"] <= several[1]["step_s"]
    assert all(len(figures["stages"]) == 2 and not figures["not_executable"] for figures in several)
    assert main([*PLAN, *wishes[:-1], "row.json", "--top-k", "2", "--pick", "1"]) == 0
    assert "wrote row.json, row 1" in capsys.readouterr().err
    assert Plan.load("row.json").prediction.step_s == several[1]["step_s"]
    two = ("--cluster", "local:2", "--pareto", "--executable", "--microbatches", "2")
    assert main([*PLAN, *two, "--pick", "99", "-o", "no.json"]) == 2
    out, err = capsys.readouterr()
    assert "peak" in out
    assert "--pick is a row of the table, 0 to " in err
    assert not Path("no.json").exists()
    assert main(["why", "plan.json", "up", "--target", "cli_targets:tiny"]) == 0
    assert "chosen" in capsys.readouterr().out
    assert main(["why", "plan.json", "nowhere", "--target", "cli_targets:tiny"]) == 2
    assert "a layer, module, op or weight of the model, but got 'nowhere'" in capsys.readouterr().err


def test_keyword_targets_and_built_in_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cli_targets:keywords", "--cluster", "p3.16xlarge", "--strategy", "dp2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["global_batch"] == 8
    assert build_target("cli_targets:batch").kwargs.keys() == {"x", "y"}
    assert main(["plan", "gpt-demo", "--cluster", "p3.16xlarge", "--strategy", "dp2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["global_batch"] == 32


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, "arguments are required: COMMAND"),
        (("fly",), 2, "invalid choice: 'fly'"),
        (("plan", "gpt-9b", "--cluster", "p3.16xlarge"), 2, "did you mean"),
        (("plan", "cli_targets:tiny"), 2, "--cluster"),
        (("plan", "cli_targets:tiny", "--cluster", "p5"), 2, "unknown cluster 'p5': not a preset (p3.16xlarge, "),
        (("plan", "cli_targets:none", "--cluster", "p3.16xlarge"), 2, "AttributeError"),
        (("plan", "no_such_module:x", "--cluster", "p3.16xlarge"), 2, "ModuleNotFoundError"),
        (("plan", "cli_targets:broken", "--cluster", "p3.16xlarge"), 2, "RuntimeError: no weights here"),
        (("plan", "cli_targets:not_a_model", "--cluster", "p3.16xlarge"), 2, "returned int"),
        (("plan", "cli_targets:branching", "--cluster", "p3.16xlarge"), 2, "cli_targets.py"),
        ((*PLAN, "--microbatches", "3"), 2, "16 and 3 microbatches"),
        ((*PLAN, "--global-batch", "0"), 2, "a whole number of 1 or more, but got '0'"),
        ((*PLAN, "--strategy", "xx2"), 2, "a strategy gives"),
        ((*PLAN, "--strategy", "dp16"), 2, "needs 16 devices"),
        ((*PLAN, "--schedule", "zigzag"), 2, "zigzag"),
        (("plan", "cli_targets:huge", "--cluster", "p3.16xlarge"), 3, "the weight one.weight alone takes 1,024 GiB"),
        ((*PLAN, "--zero", "7"), 2, "zero is auto or one of 0, 1, 2, 3, but got '7'"),
        ((*PLAN, "--constraint", "no tensors"), 2, "a constraint reads like"),
        ((*PLAN, "--constraint", "stages = 2", "--constraint", "stages = 3"), 2, "'stages = 2' and 'stages = 3'"),
        ((*PLAN, "--top-k", "2", "--pareto"), 2, "not allowed with argument"),
        ((*PLAN, "--pick", "1"), 2, "--pick is of a row that --top-k or --pareto finds"),
        ((*PLAN, "--top-k", "2", "--pick", "2"), 2, "the number of a row, 0 to 1, but got 2"),
        ((*PLAN, "--pareto", "--pick", "-1"), 2, "0 or more, but got -1"),
        (("why", "absent.json", "up", "--target", "cli_targets:tiny"), 2, "absent.json: cannot be read"),
        (("show", "absent.json"), 2, "absent.json: cannot be read"),
        (("check", "absent.json"), 2, "absent.json: cannot be read"),
        (("show", "torn.json"), 2, "breaks off"),
        (("show", "old.json"), 2, "version 0"),
        (("demo", "--ranks", "0"), 2, "a whole number of 1 or more"),
        (("demo", "--json", "absent/out.json"), 2, "an output is a file in a folder"),
    ],
)
def test_errors_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, words: str
) -> None:
    (folder / "torn.json").write_text('{"version": 1, "mod')
    (folder / "old.json").write_text('{"version": 0}')
    before = files(folder)
    with_output = [*arguments, "-o", "out.json"] if arguments[:1] == ("plan",) else list(arguments)
    assert main(with_output) == status
    out, err = capsys.readouterr()
    assert out == ""
    said = [line for line in err.splitlines() if "target may print" not in line and line != "and when called"]
    said = [line for line in said if not re.match(r"\[\d+ s\] ", line)]  # progress on a slow machine
    assert len(said) == 1, err
    assert said[0].startswith("meshwright")
    assert words in said[0]
    assert files(folder) == before


def test_an_output_that_cannot_be_written_is_said_before_the_work(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, "-o", "absent/plan.json"]) == 2
    assert "an output is a file in a folder" in capsys.readouterr().err
    assert "cli_targets" not in sys.modules


def test_an_existing_plan_survives_a_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.json").write_text("mine")
    assert main([*PLAN, "--microbatches", "3", "-o", "plan.json"]) == 2
    assert Path("plan.json").read_text() == "mine"


def test_models_lists_built_in_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"gpt-39b", "moe-10b", "wrn-4b", "llama3-8b"} <= set(listed)


def test_an_unexpected_error_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.models.names", lambda: {}["x"])
    assert main(["models"]) == 1
    err = capsys.readouterr().err
    assert err == "meshwright: KeyError: 'x' (MESHWRIGHT_DEBUG=1 shows where)\n"
    monkeypatch.setenv("MESHWRIGHT_DEBUG", "1")
    with pytest.raises(KeyError):
        main(["models"])


def test_module_entry_and_version(tmp_path: Path) -> None:
    def meshwright(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "meshwright", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    version = meshwright("--version")
    assert (version.returncode, version.stdout.split()[0]) == (0, "meshwright")
    bad = meshwright("show", "absent.json")
    assert (bad.returncode, bad.stdout, len(bad.stderr.splitlines())) == (2, "", 1)


def test_what_libraries_write_is_no_answer(folder: Path) -> None:
    command = [sys.executable, "-m", "meshwright", "plan", "cli_targets:noisy", *PLAN[2:], "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step_s"] > 0
    assert {"past Python", "held back by C", "and when called"} <= set(done.stderr.splitlines())


def test_demo_trains_like_one_device(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "meshwright", "demo", "--ranks", "2", "--steps", "3", "--json", str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert (figures["ranks"], figures["steps"]) == (2, 3)
    assert figures["loss_last"] < figures["loss_first"]
    assert figures["loss_last"] == pytest.approx(figures["loss_single_device"], rel=1e-4)
    assert figures["measured_step_s"] > 0
    assert figures["predicted_step_s"] == Plan.from_json(figures["plan"]).prediction.step_s
    for part in ("Plan\n", "Predicted against measured", "The same run on one device", "What it writes now"):
        assert part in done.stdout
