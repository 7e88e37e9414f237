"""Models that people train at scale, captured at their published size on the meta device and planned for H100s, each in
a process of its own with an empty cache.

python benchmarks/frontier.py [--only NAME,NAME] [--layers N] [--devices N] [--timeout SECONDS]
                              [--json out/frontier.json] [--explain FOLDER]

Every model is planned in bf16 for a batch of 1,024 on hosts of eight H100, with a worker per core as the command line
does. --layers: fewer layers, for a quick try, of which no record is kept. --explain: where each plan's text goes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import meshwright as mw
from huggingface.models import MODELS, FrontierModel, find
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.report.explain import explain, summary_json
from meshwright.compiler.workers import most_workers
from reporting.results import Record, computed, save_records, write_results
from rich.console import Console
from rich.table import Table

HOST_DEVICES = 8
AIM_S = 60.0  # of planning
AIM_REPLICATED = 2.0  # per cent of all FLOPs


def plan_one(model: FrontierModel, layers: int | None, devices: int, text: Path | None) -> None:
    """Capture and plan in this process; print the figures so far as a JSON line after each step."""
    found: dict[str, Any] = {}

    def report(**figures: Any) -> None:
        found.update(figures)
        print(json.dumps(found), flush=True)

    built = model.build(layers)
    began = time.perf_counter()
    graph = capture(built.model, (), built.kwargs)
    report(parameters=built.num_parameters, capture_s=time.perf_counter() - began, ops=len(graph.ops()))
    began, busy = time.perf_counter(), time.process_time()
    plan = mw.plan(
        built.model,
        f"dgx-h100:{devices // HOST_DEVICES}",
        example_kwargs=built.kwargs,
        precision="bf16",
        global_batch=model.batch,
        cache=False,
        workers=most_workers(),
    )
    seconds = {"plan_s": time.perf_counter() - began, "plan_cpu_s": time.process_time() - busy}
    if text is not None:
        text.mkdir(parents=True, exist_ok=True)
        (text / f"{model.name}.txt").write_text(explain(plan, graph))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report(**summary_json(plan) | seconds | {"layers": len(plan.layers), "peak_bytes": peak})


def run_one(model: FrontierModel, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model from a process of its own; "error" where it did not come to a plan."""
    devices = options.devices or model.devices
    command = [sys.executable, __file__, "--worker", model.name, "--devices", str(devices)]
    command += ["--layers", str(options.layers)] if options.layers else []
    command += ["--explain", str(options.explain.resolve())] if options.explain else []
    result: dict[str, Any] = {"name": model.name, "devices": devices, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        environment = os.environ | {"MESHWRIGHT_CACHE_DIR": cache}
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)
        timer = threading.Timer(options.timeout, process.kill)
        timer.start()
        status = process.wait()
        late = not timer.is_alive()
        timer.cancel()
        out.seek(0)
        errors.seek(0)
        figures = out.read().decode().splitlines()
        said = errors.read().decode(errors="replace").strip().splitlines() or [""]
    result |= json.loads(figures[-1]) if figures else {}
    if status:
        result["error"] = f"not done after {options.timeout:.0f} s" if late else said[-1]
    return result


def records(results: Sequence[dict[str, Any]]) -> list[Record]:
    """Per model: the seconds of capture and of planning, the plan's step, its gap and what it repeats."""
    found = []
    for run in results:
        name = f"{run['name']} on {run['devices']} H100"
        note = run.get("error", "")
        capture_s, plan_s = run.get("capture_s"), run.get("plan_s")
        found += [
            Record(f"{name}: capture", capture_s, "s", 1, note="" if capture_s else note),
            Record(f"{name}: planning", plan_s, "s", 1, None, "the aim of 60 s", AIM_S, note=note),
            Record(f"{name}: planning, processor", run.get("plan_cpu_s"), "s", 1, note=note),
        ]
        if not note:
            step, gap, repeated = run["step_s"], 100 * run["bound_gap"], 100 * run["replicated_flops_fraction"]
            found += [
                Record(f"{name}: predicted step", step, "s", 2, computed(step)),
                Record(f"{name}: gap to the bound", gap, "%", 1, computed(gap)),
                Record(f"{name}: repeated FLOPs", repeated, "%", 2, computed(repeated), "2 %", AIM_REPLICATED),
            ]
    return found


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """A line per model."""
    table = Table(title="frontier models: bf16, batch 1,024, each in a fresh process")
    table.add_column("model")
    for heading in ("parameters", "capture s", "ops", "layers", "GPUs", "plan s", "cpu s", "step s", "gap", "TFLOPS"):
        table.add_column(heading, justify="right")
    table.add_column("stages × mesh")
    for heading in ("repeated", "idle"):
        table.add_column(heading, justify="right")
    for run in results:
        seen = [run["name"], *(_captured(run) if "ops" in run else ["", "", ""])]
        if "error" in run:
            table.add_row(*seen, "", str(run["devices"]), "", "", "", "", "", run["error"][:60])
            continue
        meshes = dict.fromkeys("×".join(map(str, stage["mesh_shape"])) or "1" for stage in run["stages"])
        table.add_row(
            *seen, str(run["layers"]), str(run["devices"]), f"{run['plan_s']:.1f}",
            f"{run['plan_cpu_s']:.1f}", f"{run['step_s']:.3g}",
            f"{run['bound_gap']:.1%}", f"{run['tflops_per_device']:.0f}",
            f"{len(run['stages'])} × {' '.join(meshes)}", f"{run['replicated_flops_fraction']:.2%}",
            str(run["idle_devices"]),
        )  # fmt: skip
    console.print(table)


def _captured(run: dict[str, Any]) -> list[str]:
    return [f"{run['parameters'] / 1e9:.1f} B", f"{run['capture_s']:.1f}", f"{run['ops']:,}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="names of models")
    parser.add_argument("--layers", type=int, help="so many layers instead of the published number")
    parser.add_argument("--devices", type=int, help="so many devices instead of the model's own number")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a model is given up")
    parser.add_argument("--json", type=Path, default=Path("out/frontier.json"), help="where the results go")
    parser.add_argument("--explain", type=Path, help="a folder for the plans' texts")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        plan_one(find(options.worker), options.layers, options.devices, options.explain)
        return 0
    console = Console(width=None if sys.stdout.isatty() else 170)
    models = [find(name) for name in options.only.split(",")] if options.only else MODELS
    results: list[dict[str, Any]] = []
    for model in models:
        with console.status(model.name):
            results.append(run_one(model, options))
        write_results(options.json, {"runs": results})
    show(results, console)
    save_records("frontier", records(results), quick=bool(options.layers or options.devices))
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
