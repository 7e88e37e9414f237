"""Seconds and bytes that planning takes, each run in a fresh interpreter with an empty cache: what ``meshwright plan
TARGET --json`` takes.

python benchmarks/search.py [--quick] [--only large,depth,irregular] [--repeat N] [--timeout SECONDS]
                            [--json out/search.json]

    large      the targets of the README's table
    depth      a GPT of 48 and of 96 layers of width 4,096
    irregular  models without equal layers, or with few: U-Net, T5, ResNet-152, ViT with experts, blocks of unlike width
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from reporting.results import Record, Spread, computed, save_records, write_results
from rich.console import Console
from rich.table import Table

# What others report for the same task, by their own reports and on their own machines.
PUBLISHED = (
    ("GPT-39B, 64 V100", "Alpa, OSDI'22, table 5", "2393 s: compilation 1583, profiling 804, stage DP 1.65"),
    ("Llama-3 8B, 64 GPUs, one 2-D mesh", "Meta autoparallel, trace to solution", "47 s; 111 s on 2 cores"),
    ("32 layers, 4 GPUs, pipeline only", "nnScaler, measured on 2 cores", "157 CPU s"),
)

#: name of a task → who reports what for it
PEERS = {
    "gpt-39b on p3.16xlarge:8": "Alpa, as published: 2393 s",
    "llama3-8b on dgx-h100:8": "Meta autoparallel, one mesh, as published: 47 s",
}


@dataclass(frozen=True)
class Task:
    """One planning run; layers, hidden: of ``search_baselines.models:gpt``."""

    group: str
    target: str
    cluster: str
    batch: int
    layers: int = 0
    hidden: int = 0
    options: tuple[str, ...] = ()  # more of the command line

    @property
    def name(self) -> str:
        """Unique among the tasks."""
        shape = f" {self.layers}×{self.hidden}" if self.layers else ""
        return f"{self.target.split(':')[-1]}{shape} on {self.cluster}"


LARGE = (
    Task("large", "gpt-2.6b", "p3.16xlarge:1", 1024),
    Task("large", "gpt-39b", "p3.16xlarge:8", 1024),
    Task("large", "llama3-8b", "dgx-h100:8", 512),
    Task("large", "gpt-175b", "dgx-h100:128", 1536),
    Task("large", "llama3-405b", "dgx-h100:2048", 2048),
)
DEPTH = tuple(Task("depth", "search_baselines.models:gpt", "p3.16xlarge:8", 1024, layers, 4096) for layers in (48, 96))
IRREGULAR = (
    Task("irregular", "unet", "p3.16xlarge:1", 256),
    Task("irregular", "t5-3b", "dgx-a100-80:2", 1024),
    Task("irregular", "resnet-152", "p3.16xlarge:2", 1024),
    Task("irregular", "vit-moe", "dgx-a100-80:2", 1024),
    Task("irregular", "search_baselines.models:uneven", "dgx-a100-80:2", 1024),
)
TASKS = LARGE + DEPTH + IRREGULAR
QUICK = (Task("large", "gpt-350m", "p3.16xlarge:1", 1024), Task("irregular", "unet", "p3.16xlarge:1", 256))


def run_one(task: Task, timeout_s: float, kept: Path | None = None) -> dict[str, Any]:
    """One planning run, with an empty cache or that of this folder: wall and processor seconds, peak bytes of the
    process, the plan's own figures; or "error"."""
    command = [sys.executable, "-m", "meshwright", "plan", task.target, "--cluster", task.cluster]
    command += ["--global-batch", str(task.batch), "--json", *task.options]
    result: dict[str, Any] = {"name": task.name, "group": task.group, "target": task.target, "cluster": task.cluster}
    result |= {"global_batch": task.batch, "layers": task.layers, "hidden": task.hidden, "load": [os.getloadavg()[0]]}
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryDirectory() as cache,
    ):
        environment = os.environ | {"MESHWRIGHT_CACHE_DIR": str(kept or cache)}
        environment |= {"MESHWRIGHT_LAYERS": str(task.layers), "MESHWRIGHT_HIDDEN": str(task.hidden)}
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment, cwd=Path(__file__).parent)
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
        return {**json.loads(out.read()), **result}


def medians(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By task: the medians of its runs that ended, and the first one's plan."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if "error" not in result:
            groups.setdefault(result["name"], []).append(result)
    out = {}
    for name, runs in groups.items():
        keys = ("wall_s", "cpu_s", "peak_bytes", "search_s")
        passes = {key: median(run["passes"].get(key, 0.0) for run in runs) for key in runs[0]["passes"]}
        out[name] = {**runs[0], **{key: median(run[key] for run in runs) for key in keys}, "passes": passes}
        out[name]["runs"] = len(runs)
    return out


def records(results: Sequence[dict[str, Any]]) -> list[Record]:
    """Per task: seconds of the whole process, its peak memory, the plan's step and its gap to the bound."""
    found = []
    for name, run in medians(results).items():
        walls = [one["wall_s"] for one in results if one["name"] == name and "error" not in one]
        gap = 100 * run["bound_gap"]
        spread = Spread(min(walls), max(walls), f"{len(walls)} runs") if len(walls) > 1 else None
        found += [
            Record(f"{name}: seconds", run["wall_s"], "s", 1, spread, PEERS.get(name, "")),
            Record(f"{name}: peak memory", run["peak_bytes"] / 1e9, "GB", 2),
            Record(f"{name}: predicted step", run["step_s"], "s", 2, computed(run["step_s"])),
            Record(f"{name}: gap to the bound", gap, "%", 1, computed(gap)),
        ]
    return found


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """A line per task, where its seconds go, then what others report."""
    found = medians(results)
    table = Table(title="planning: medians over the runs, whole process")
    table.add_column("target on cluster")
    for heading in ("wall s", "cpu s", "GB", "passes > 0.1 s", "step s", "gap", "stages", "micro", "load"):
        table.add_column(heading, justify="left" if "passes" in heading else "right")
    group = None
    for name, run in found.items():
        if group not in (None, run["group"]):
            table.add_section()
        group = run["group"]
        long = sorted(((s, key) for key, s in run["passes"].items() if key != "total" and s > 0.1), reverse=True)
        table.add_row(
            name, f"{run['wall_s']:.2f}", f"{run['cpu_s']:.2f}", f"{run['peak_bytes'] / 1e9:.2f}",
            ", ".join(f"{key} {seconds:.1f}" for seconds, key in long), f"{run['step_s']:.4g}",
            f"{run['bound_gap']:.1%}", str(len(run["stages"])), str(run["microbatches"]), f"{run['load'][-1]:.1f}",
        )  # fmt: skip
    console.print(table)
    for result in results:
        if "error" in result:
            console.print(f"{result['name']}: {result['error']}")
    others = Table(title="published, on the authors' machines")
    for heading in ("task", "who", "time"):
        others.add_column(heading)
    for line in PUBLISHED:
        others.add_row(*line)
    console.print(others)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two small models")
    parser.add_argument("--only", default="large,depth,irregular", help="groups of targets")
    parser.add_argument("--repeat", type=int, default=1, help="runs per target, interleaved")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a run is given up")
    parser.add_argument("--json", type=Path, default=Path("out/search.json"), help="where the results go")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    tasks = QUICK if options.quick else [task for task in TASKS if task.group in options.only.split(",")]
    results: list[dict[str, Any]] = []
    for turn in range(options.repeat):
        for task in tasks:
            with console.status(f"{task.name} ({turn + 1} of {options.repeat})"):
                results.append(run_one(task, options.timeout))
            write_results(options.json, {"runs": results, "published": [list(line) for line in PUBLISHED]})
    show(results, console)
    save_records("search", records(results), options.quick)
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
