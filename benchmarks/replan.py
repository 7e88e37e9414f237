"""What planning again takes after something changed: processor seconds with what an earlier plan left in the cache,
against an empty one.

python benchmarks/replan.py [--quick] [--only gpt-39b,llama3-8b] [--repeat N] [--timeout SECONDS]
                            [--json out/replan.json]

Of every target: the same question again, without its answer ("rows") and with it ("answer"), a constraint added (fewer
stages, one weight replicated), another schedule, the batch doubled, twice the hosts. Each question is asked twice in
this run, in fresh interpreters: with an empty cache, and with a copy of what the first question left. Both plans must
take the same step, or the script fails. Seconds are those of the process but for its start, which imports torch.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from reporting.results import Record, save_records, write_results
from rich.console import Console
from rich.table import Table
from search import Task, run_one

TARGETS = (
    (Task("replan", "gpt-39b", "p3.16xlarge:8", 1024), "p3.16xlarge:16", "replicate norm.weight"),
    (Task("replan", "llama3-8b", "dgx-h100:8", 512), "dgx-h100:16", "replicate head.weight"),
)
QUICK = ((Task("replan", "gpt-350m", "p3.16xlarge:1", 64), "p3.16xlarge:2", "replicate norm.weight"),)


def changes(task: Task, larger: str, weight: str) -> dict[str, Task]:
    """The questions about a target, the first one first."""
    return {
        "the same: answer": task,
        "the same: rows": task,
        "at most 4 stages": replace(task, options=("--constraint", "stages <= 4")),
        weight: replace(task, options=("--constraint", weight)),
        "1F1B only": replace(task, options=("--schedule", "1f1b")),
        "batch doubled": replace(task, batch=2 * task.batch),
        "hosts doubled": replace(task, cluster=larger),
    }


def measured(question: Task, first: Path, answers: bool, timeout_s: float) -> dict[str, Any]:
    """Both runs of a question: with an empty cache, and with what ``first`` has (answers: of whole questions, too)."""
    empty = run_one(question, timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        shutil.copytree(first, cache, ignore=None if answers else shutil.ignore_patterns("plans"))
        again = run_one(question, timeout_s, cache)
    result = {"target": question.target, "cluster": question.cluster, "empty": empty, "again": again}
    errors = [run["error"] for run in (empty, again) if "error" in run]
    if not errors and empty["step_s"] != again["step_s"]:
        errors = [f"a step takes {again['step_s']} s by what was kept, but {empty['step_s']} s anew"]
    return result | ({"error": errors[0]} if errors else {})


Groups = dict[tuple[str, str], list[Mapping[str, Any]]]  # (target, change) → its runs that ended


def grouped(results: Sequence[Mapping[str, Any]]) -> Groups:
    groups: Groups = {}
    for result in results:
        if "error" not in result:
            groups.setdefault((result["target"], result["change"]), []).append(result)
    return groups


def records(results: Sequence[Mapping[str, Any]], start_s: float) -> list[Record]:
    """Per question: processor seconds with what an earlier plan left, held against those with an empty cache."""
    found = []
    for (target, change), runs in grouped(results).items():
        empty, again = (median(run[side]["cpu_s"] for run in runs) - start_s for side in ("empty", "again"))
        peer = f"an empty cache: {empty:.1f} s"
        found.append(Record(f"{target}, {change}", again, "s of processor", 1, None, peer, empty))
    return found


def show(results: Sequence[Mapping[str, Any]], start_s: float, console: Console) -> None:
    """A line per question: medians over the runs."""
    for result in results:
        if "error" in result:
            console.print(f"{result['target']}, {result['change']}: {result['error']}")
    groups = grouped(results)
    table = Table(title=f"planning again, processor s of the process less {start_s:.1f} s for its start: medians")
    table.add_column("target")
    table.add_column("what changed")
    for heading in ("empty cache", "kept", "ratio", "of the search: empty", "kept", "step s", "load"):
        table.add_column(heading, justify="right")
    last = None
    for (target, change), runs in groups.items():
        if last not in (None, target):
            table.add_section()
        last = target
        cpu, search = (
            [median(run[side][key] for run in runs) for side in ("empty", "again")] for key in ("cpu_s", "search_s")
        )
        empty, again = (seconds - start_s for seconds in cpu)
        table.add_row(
            target, change, f"{empty:.2f}", f"{again:.2f}", f"{again / empty:.2f}", f"{search[0]:.2f}",
            f"{search[1]:.2f}", f"{runs[0]['empty']['step_s']:.4g}", f"{runs[0]['again']['load'][-1]:.1f}",
        )  # fmt: skip
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one small model")
    parser.add_argument("--only", default="gpt-39b,llama3-8b", help="targets")
    parser.add_argument("--repeat", type=int, default=1, help="runs per question")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a run is given up")
    parser.add_argument("--json", type=Path, default=Path("out/replan.json"), help="where the results go")
    options = parser.parse_args()
    asked = [one for one in TARGETS if one[0].target in options.only.split(",")]
    console = Console(width=None if sys.stdout.isatty() else 150)
    tiny = Task("replan", "gpt-demo", "p3.16xlarge:1", 8, options=("--strategy", "dp2", "--schedule", "1f1b"))
    with tempfile.TemporaryDirectory() as folder:
        run_one(tiny, options.timeout, Path(folder))
        start_s = run_one(tiny, options.timeout, Path(folder)).get("cpu_s", 0.0)  # all but nothing is left to do
    results: list[dict[str, Any]] = []
    for turn in range(options.repeat):
        for task, larger, weight in QUICK if options.quick else asked:
            with tempfile.TemporaryDirectory() as folder:
                run_one(task, options.timeout, Path(folder))
                for change, question in changes(task, larger, weight).items():
                    with console.status(f"{task.target}: {change} ({turn + 1} of {options.repeat})"):
                        found = measured(question, Path(folder), change.endswith("answer"), options.timeout)
                    results.append({"change": change, **found})
                    write_results(options.json, {"start_s": start_s, "runs": results})
    show(results, start_s, console)
    save_records("replan", records(results, start_s), options.quick)
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
