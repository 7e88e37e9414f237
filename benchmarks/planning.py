"""Seconds by pass to plan large GPTs, each in a fresh interpreter: what ``meshwright plan TARGET --json`` takes.

python benchmarks/planning.py [--quick] [--repeat N] [--timeout SECONDS] [--json out/planning.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from contest.results import write_results
from rich.console import Console
from rich.table import Table

# (target, cluster, global batch)
FULL = (("gpt-2.6b", "p3.16xlarge:1", 1024), ("gpt-39b", "p3.16xlarge:8", 1024))
QUICK = (("gpt-350m", "p3.16xlarge:1", 1024),)

# What others report for the same task, by their own reports and on their own machines.
PUBLISHED = (
    ("GPT-39B, 64 V100", "Alpa, OSDI'22, table 5", "2393 s: compilation 1583, profiling 804, stage DP 1.65"),
    ("Llama-3 8B, 64 GPUs, one 2-D mesh", "Meta autoparallel, trace to solution", "47 s; 111 s on 2 cores"),
    ("32 layers, 4 GPUs, pipeline only", "nnScaler, measured on 2 cores", "157 CPU s"),
)


def run_one(target: str, cluster: str, batch: int, timeout_s: float) -> dict[str, Any]:
    """One planning run: wall and processor seconds, peak bytes of the process, the plan's own figures; or "error"."""
    command = [sys.executable, "-m", "meshwright", "plan", target, "--cluster", cluster]
    command += ["--global-batch", str(batch), "--json"]
    result: dict[str, Any] = {"target": target, "cluster": cluster, "global_batch": batch, "command": command[1:]}
    result["load"] = [os.getloadavg()[0]]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        result["wall_s"] = time.perf_counter() - started
        result["cpu_s"] = usage.ru_utime + usage.ru_stime
        result["peak_bytes"] = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        result["load"].append(os.getloadavg()[0])
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            said = errors.read().decode(errors="replace").strip().splitlines() or [""]
            late = process.returncode < 0 and result["wall_s"] >= timeout_s
            why = f"not done after {timeout_s:.0f} s" if late else said[-1]
            return {**result, "error": f"exit status {process.returncode}: {why}"}
        return {**result, **json.loads(out.read())}


def show(results: list[dict[str, Any]], console: Console) -> None:
    """A column per target with the medians over its runs, then what others report."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["target"], result["cluster"]), []).append(result)
    table = Table(title="planning, seconds (medians over the runs)")
    table.add_column("")
    for target, cluster in groups:
        table.add_column(f"{target}\n{cluster}", justify="right")
    good = [[run for run in runs if "error" not in run] for runs in groups.values()]
    passes = list(dict.fromkeys(name for runs in good for run in runs for name in run["passes"] if name != "total"))

    def row(label: str, values: list[float | None], form: str = ".2f") -> None:
        table.add_row(label, *("" if value is None else format(value, form) for value in values))

    for name in passes:
        row(name, [median(run["passes"].get(name, 0.0) for run in runs) if runs else None for runs in good])
    table.add_section()
    for label, key in (("search", "search_s"), ("process, wall", "wall_s"), ("process, cpu", "cpu_s")):
        row(label, [median(run[key] for run in runs) if runs else None for runs in good])
    row("peak memory, GB", [median(run["peak_bytes"] for run in runs) / 1e9 if runs else None for runs in good])
    table.add_section()
    row("planned step, s", [runs[0]["step_s"] if runs else None for runs in good])
    row("TFLOPS per device", [runs[0]["tflops_per_device"] if runs else None for runs in good], ".1f")
    row("bound gap", [runs[0]["bound_gap"] if runs else None for runs in good], ".2%")
    row("stages", [len(runs[0]["stages"]) if runs else None for runs in good], ".0f")
    row("microbatches", [runs[0]["microbatches"] if runs else None for runs in good], ".0f")
    row("load after", [median(run["load"][-1] for run in runs) if runs else None for runs in good], ".1f")
    console.print(table)
    for result in results:
        if "error" in result:
            console.print(f"{result['target']} on {result['cluster']}: {result['error']}")
    others = Table(title="published, on the authors' machines")
    for heading in ("task", "who", "time"):
        others.add_column(heading)
    for line in PUBLISHED:
        others.add_row(*line)
    console.print(others)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one small model")
    parser.add_argument("--repeat", type=int, default=1, help="runs per target, interleaved")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a run is given up")
    parser.add_argument("--json", type=Path, default=Path("out/planning.json"), help="where the results go")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: list[dict[str, Any]] = []
    for turn in range(options.repeat):
        for target, cluster, batch in QUICK if options.quick else FULL:
            with console.status(f"{target} on {cluster} ({turn + 1} of {options.repeat})"):
                results.append(run_one(target, cluster, batch, options.timeout))
            write_results(options.json, {"runs": results, "published": [list(line) for line in PUBLISHED]})
    show(results, console)
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
