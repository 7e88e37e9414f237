"""One world of ranks over shaped links, a rank per namespace; as a script, what each of these ranks runs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.runtime.launch import ensure_initialized, leave
from shaped.links import Links

from .ranks import Settings, run
from .trials import Trial

__all__ = ["LINKS", "run_over_links"]

#: part → bits per second up and down, seconds of delay one way
LINKS: dict[str, tuple[float, float]] = {"gigabit": (1e9, 0.0), "slow": (1e8, 0.010)}


def run_over_links(trials: Sequence[Trial], settings: Settings, timeout_s: float) -> list[dict[str, Any]]:
    """The results of trials of one part and one number of ranks. OSError where this machine cannot shape links,
    RuntimeError if a rank fails, TimeoutError."""
    ranks = trials[0].ranks
    rate, delay_s = LINKS[trials[0].part]
    with tempfile.TemporaryDirectory(prefix="meshwright-links-") as folder, Links(ranks, rate, delay_s) as links:
        task, answer = Path(folder) / "task.json", Path(folder) / "answer.json"
        task.write_text(json.dumps({"trials": [asdict(trial) for trial in trials], "settings": asdict(settings)}))
        words = [sys.executable, "-P", "-m", "truth.over_links", str(task), str(answer)]
        path = str(Path(__file__).parents[1])
        processes = [links.start(rank, words, {"PYTHONPATH": path}) for rank in range(ranks)]
        try:
            _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return json.loads(answer.read_text())


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            raise RuntimeError(f"rank {failed[0]} over shaped links failed; its message stands above")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks over shaped links did not finish in {timeout_s:g} s")
        time.sleep(0.1)
    if failed := [rank for rank, process in enumerate(processes) if process.poll()]:
        raise RuntimeError(f"rank {failed[0]} over shaped links failed; its message stands above")


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    rank, _ = ensure_initialized()
    results = run([Trial(**trial) for trial in task["trials"]], Settings(**task["settings"]))
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
