"""Some of the damaged files of ``make fuzz``: a fault makes its script fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

CASES, KINDS = 480, 12


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    found = tmp_path / "fuzz.json"
    script = [sys.executable, str(ROOT / "benchmarks/fuzz.py"), "--cases", str(CASES), "--json", str(found)]
    done = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    cases = json.loads(found.read_text())["cases"]
    assert len(cases) == KINDS
    assert all(counts["refused"] >= 5 and counts["read"] >= 1 for counts in cases.values()), cases


def test_a_fault_of_a_reader_is_found(tmp_path: Path) -> None:
    planted = "import json, runpy, sys\n" + (
        "from meshwright.costmodel.profiler import ProfileState\n"
        "ProfileState.from_json = staticmethod(lambda text: json.loads(text)['records']['matmul 64'])\n"
        f"sys.argv = ['fuzz', '--cases', '40', '--only', 'interrupted profile', '--json', {str(tmp_path / 'f')!r}]\n"
        f"runpy.run_path({str(ROOT / 'benchmarks/fuzz.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", planted],
        capture_output=True,
        text=True,
        cwd=ROOT / "benchmarks",
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "TypeError" in done.stdout
