"""Our plans against plans of other kinds, all under the same prices: which step is shorter?

python benchmarks/quality.py [--quick] [--only NAME,…] [--longer 10] [--json out/quality.json]

``search_baselines`` says what the families are. Everything is a prediction; no GPU is used. Exit status 1 if
a baseline's step is shorter than ours.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # a baseline composes as the oracle of the tests does

from meshwright import models
from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search.space import Space
from meshwright.costmodel.cluster import Cluster
from published import ROWS, Row, captured, cluster_of
from reporting.results import Record, computed, save_records, write_results
from rich.console import Console
from rich.status import Status
from rich.table import Table
from search_baselines.annealing import anneal
from search_baselines.families import Task, best_grid, megatron, published, zero_everywhere

SAME = 1.0005  # steps within this factor are equal: schedules are simulated, labels tie


@dataclass(frozen=True)
class Match:
    """A model on a cluster; row: a published run of it."""

    target: str
    cluster: str
    batch: int
    row: Row | None = None

    @property
    def name(self) -> str:
        """Unique among the matches."""
        return f"{self.target} on {self.cluster}"

    def task(self, space: Space) -> Task:
        """The captured model and its cluster."""
        if self.row is not None:
            return Task(captured(self.row), cluster_of(self.row.gpus), self.batch, space)
        built = models.build(self.target)
        return Task(capture(built.model, built.args, built.kwargs), Cluster.parse(self.cluster), self.batch, space)


ALPA = tuple(Match(row.target, f"{row.gpus} V100", row.batch, row) for row in ROWS)
MATCHES = (
    *ALPA,
    Match("gpt-39b", "p3.16xlarge:8", 1024),
    Match("llama3-8b", "dgx-h100:8", 512),
    Match("moe-10b", "p3.16xlarge:2", 1024),
    Match("wrn-4b", "p3.16xlarge:2", 1536),
)
QUICK = ALPA[1:3]


def compare(match: Match, space: Space, longer: float, report: Callable[[str], None]) -> dict[str, Any]:
    """Our plan and every baseline's for one model."""
    task = match.task(space)
    report("ours")
    begin = time.perf_counter()
    ours = task.plan(None)
    planned_s = time.perf_counter() - begin
    found: dict[str, Any] = {"name": match.name, "batch": match.batch, "ours": _figures(ours, planned_s)}
    baselines: dict[str, Callable[[], Plan | None]] = {
        "grid": lambda: best_grid(task, lambda text: report(f"grid {text}")),
        "megatron": lambda: megatron(task, lambda text: report(f"megatron {text}")),
        "zero": lambda: zero_everywhere(task),
        "annealing": lambda: anneal(task, longer * planned_s),
    }
    row = match.row
    if row is not None:
        baselines["published"] = lambda: published(task, row.division, row.microbatches)
    for name, make in baselines.items():
        report(name)
        begin = time.perf_counter()
        try:
            plan = make()
        except InfeasibleError:
            plan = None
        found[name] = _figures(plan, time.perf_counter() - begin)
    return found


def _figures(plan: Plan | None, seconds: float) -> dict[str, Any]:
    if plan is None:
        return {"step_s": None, "took_s": seconds}
    patterns = {
        "zero" if residency.optimizer != residency.compute.value else "replicated"
        for stage in plan.stages for chunk in stage.chunks for residency in chunk.parameters.values()
    }  # fmt: skip
    return {
        "step_s": plan.prediction.step_s,
        "bound_gap": plan.prediction.bound_gap,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "recompute": plan.recompute,
        "patterns": sorted(patterns),
        "stages": [{"layers": len(range(*s.chunks[0].layers)), "mesh": list(s.mesh_shape)} for s in plan.stages],
        "took_s": seconds,
    }


def lost(results: list[dict[str, Any]]) -> list[str]:
    """What a baseline does better, a line each."""
    lines = []
    for found in results:
        for name, baseline in found.items():
            if name in ("name", "batch", "ours") or baseline["step_s"] is None:
                continue
            if found["ours"]["step_s"] is None:
                lines.append(f"{found['name']}: {name} fits, ours does not")
            elif baseline["step_s"] * SAME < found["ours"]["step_s"]:
                lines.append(
                    f"{found['name']}: {name} takes {baseline['step_s'] / found['ours']['step_s']:.4f} of our step"
                )
    return lines


def records(results: list[dict[str, Any]]) -> list[Record]:
    """Per model and baseline: its predicted step in units of ours."""
    found = []
    for result in results:
        ours = result["ours"]["step_s"]
        for name, other in result.items():
            if name in ("name", "batch", "ours") or (ours is None and other["step_s"] is None):
                continue
            fits = ours is not None and other["step_s"] is not None
            value = other["step_s"] / ours if fits else None
            note = "" if fits else f"{name if ours is not None else 'ours'} does not fit"
            spread = None if value is None or name == "annealing" else computed(value)
            even = 1 / SAME if ours is None or fits else None  # a baseline that does not fit is no loss of ours
            found.append(Record(f"{result['name']}: {name}", value, "× our step", 3, spread, name, even, "more", note))
    return found


def show(results: list[dict[str, Any]], console: Console) -> None:
    """A line per model: seconds of our step, and the baselines' in units of ours."""
    names = ("grid", "megatron", "zero", "published", "annealing")
    table = Table(title="predicted step, baselines in units of ours (– : nothing fits)")
    for heading in ("model", "our plan"):
        table.add_column(heading)
    for heading in ("step, s", "gap", "planned in, s", *names):
        table.add_column(heading, justify="right")
    for found in results:
        ours = found["ours"]
        cells = []
        for name in names:
            baseline = found.get(name)
            if baseline is None:
                cells.append("")
            elif baseline["step_s"] is None or ours["step_s"] is None:
                cells.append("–")
            else:
                cells.append(f"{baseline['step_s'] / ours['step_s']:.3f}")
        if ours["step_s"] is None:
            table.add_row(found["name"], "nothing fits", "", "", f"{ours['took_s']:.1f}", *cells)
            continue
        shapes = [f"{s['layers']}@{'×'.join(map(str, s['mesh'])) or '1'}" for s in ours["stages"]]
        shape = " + ".join(shapes) if len(shapes) <= 3 else f"{len(shapes)} stages, {shapes[0]} … {shapes[-1]}"
        plan = f"{shape}; {ours['microbatches']} micro, {ours['schedule']}, {ours['recompute']}"
        step = f"{ours['step_s']:.4g}", f"{ours['bound_gap']:.1%}", f"{ours['took_s']:.1f}"
        table.add_row(found["name"], plan, *step, *cells)
    console.print(table)
    for line in lost(results):
        console.print(f"[bold]{line}[/bold]")


def _said(status: Status, name: str, text: str) -> None:
    status.update(f"{name}: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two of Alpa's models")
    parser.add_argument("--only", default="", help="names that a match must contain one of")
    parser.add_argument("--longer", type=float, default=10.0, help="what the annealing gets, in our planning times")
    parser.add_argument("--json", type=Path, default=Path("out/quality.json"), help="where the results go")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    wanted = [word for word in options.only.split(",") if word]
    matches = [m for m in (QUICK if options.quick else MATCHES) if not wanted or any(w in m.name for w in wanted)]
    results: list[dict[str, Any]] = []
    for match in matches:
        with console.status(match.name) as status:
            report = partial(_said, status, match.name)
            results.append(compare(match, Space.whole(), options.longer, report))
        write_results(options.json, {"matches": results})
    show(results, console)
    save_records("quality", records(results), options.quick)
    return 1 if lost(results) else 0


if __name__ == "__main__":
    sys.exit(main())
