"""The search against every plan document of hundreds of tiny random instances (``tests/oracles/exhaustive.py``).

python benchmarks/bruteforce.py [--cases 500] [--from 0] [--quick] [--chunked] [--json out/bruteforce.json]

With --chunked models have more layers, and stages may hold two chunks of them (interleaved, zb-v).

Exit status 1 if a bound lies above a document, a plan is worse than its gap says, or "nothing fits" is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # ``tests``

from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search.driver import make_plan
from meshwright.compiler.search.request import PlanRequest
from meshwright.compiler.search.space import Space
from meshwright.costmodel.cluster import Cluster
from reporting.results import Record, computed, save_records, write_results
from rich.console import Console
from rich.table import Table

from tests.oracles.frontier import TooLarge
from tests.oracles.verdict import judge
from tests.support.random_instances import chunked_case, random_case

PROCESSES = 2


def plan_of(graph: Graph, cluster: Cluster, global_batch: int, space: Space) -> Plan:
    """Our plan."""
    return make_plan(graph, cluster, PlanRequest(global_batch, alternatives=False, space=space))


def one(task: tuple[int, bool, bool]) -> dict[str, Any]:
    """The verdict on one seed as plain values; "error" where the checker itself gave up."""
    seed, wide, chunked = task
    case = chunked_case(seed) if chunked else random_case(seed, wide=wide)
    facts = {
        "seed": seed, "kind": case.kind, "case": str(case), "devices": case.cluster.num_devices,
        "hosts": len(case.cluster.hosts), "memory": case.memory, "zero": len(case.space.residencies) > 1,
        "recompute": len(case.space.recompute) > 1, "schedules": " ".join(case.space.schedules),
    }  # fmt: skip
    try:
        verdict = judge(case, plan_of)
    except TooLarge as error:
        return {**facts, "skipped": str(error)}
    except Exception as error:  # the checker's own fault: shown, counted as a failure
        return {**facts, "problems": [f"checker: {type(error).__name__}: {error}"], "notes": [], "equal": False}
    return {**facts, **asdict(verdict), "equal": verdict.equal}


def labels(found: dict[str, Any]) -> Iterator[str]:
    """The rows of the table in which a case counts."""
    yield found["kind"]
    yield "1 host" if found["hosts"] == 1 else "2 hosts"
    yield f"{found['devices']} devices"
    yield "memory binds" if found["memory"] else "no memory limit"
    for name in ("zero", "recompute"):
        if found[name]:
            yield name
    yield found["schedules"]
    yield "all"


def show(results: list[dict[str, Any]], console: Console) -> None:
    """A line per kind of case, then what failed."""
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for found in results:
        for label in labels(found):
            groups[label].append(found)
    table = Table(title="plans against the best of all documents")
    table.add_column("cases")
    for heading in ("number", "skipped", "failed", "equal", "infeasible", "worst", "median gap"):
        table.add_column(heading, justify="right")
    for label in sorted(groups, key=lambda label: (label == "all", label)):
        group = groups[label]
        done = [found for found in group if "skipped" not in found]
        both = [found for found in done if found.get("ours_s") and found.get("best_s")]
        table.add_row(
            label, str(len(group)), str(len(group) - len(done)), str(sum(bool(f["problems"]) for f in done)),
            f"{sum(f['equal'] for f in done) / max(1, len(done)):.1%}",
            str(sum(f.get("best_s") is None for f in done)),
            f"{max((f['ours_s'] / f['best_s'] for f in both), default=1.0):.4f}",
            f"{median(1 - f['bound_s'] / f['ours_s'] for f in both):.2%}" if both else "",
        )  # fmt: skip
    console.print(table)
    for found in results:
        for problem in found.get("problems", ()):
            console.print(f"[bold]{found['case']}[/bold]\n{problem}\n", markup=True, highlight=False)


def records(results: list[dict[str, Any]]) -> list[Record]:
    """Over all cases: plans that no document undercuts, the worst plan, and what was wrong."""
    done = [found for found in results if "skipped" not in found]
    both = [found for found in done if found.get("ours_s") and found.get("best_s")]
    note = f"{len(done)} cases; {len(results) - len(done)} more have too many documents"
    equal = 100 * sum(found["equal"] for found in done) / max(1, len(done))
    worst = max((found["ours_s"] / found["best_s"] for found in both), default=1.0)
    wrong = float(sum(bool(found["problems"]) for found in done))
    figures = (
        ("plans that no document undercuts", equal, "%", 1, 100.0, "more"),
        ("the worst plan", worst, "× the best document", 2, 1.0, "less"),
        ("bounds or verdicts that are wrong", wrong, "cases", 0, 0.0, "less"),
    )
    return [
        Record(row, value, unit, decimals, computed(value), "all documents", even, better, note)
        for row, value, unit, decimals, even, better in figures
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=500, help="how many seeds")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--quick", action="store_true", help="20 cases")
    parser.add_argument("--plain", action="store_true", help="no ZeRO patterns, no recompute, one schedule")
    parser.add_argument("--chunked", action="store_true", help="models of 4 to 6 layers, stages of two chunks")
    parser.add_argument("--json", type=Path, default=Path("out/bruteforce.json"), help="where the results go")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(width=None if sys.stdout.isatty() else 120)
    seeds = range(options.first, options.first + (20 if options.quick else options.cases))
    results: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool, console.status("") as status:
        for found in pool.imap_unordered(one, [(seed, not options.plain, options.chunked) for seed in seeds]):
            results.append(found)
            failed = sum(bool(one.get("problems")) for one in results)
            status.update(f"{len(results)} of {len(seeds)} cases, {failed} failed")
            write_results(options.json, {"cases": sorted(results, key=lambda found: found["seed"])})
    show(sorted(results, key=lambda found: found["seed"]), console)
    if not (options.plain or options.chunked):
        save_records("bruteforce", records(results), options.quick)
    return 1 if any(found.get("problems") for found in results) else 0


if __name__ == "__main__":
    sys.exit(main())
