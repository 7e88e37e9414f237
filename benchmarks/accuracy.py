"""Predicted against measured: step time and peak memory of forced plans, over several models, shapes and rank counts.

    python benchmarks/accuracy.py [--quick] [--parts real sleep crowd] [--shaped] [--rounds N] [--json PATH]

Every prediction is made before its plan runs. Parts are reported apart (see README.md). Exit status 1 if a part fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from meshwright.runtime.transport.launch import spawn_local
from network.ranks import LINKS
from predictions.over_links import run_shaped
from predictions.ranks import Settings
from predictions.report import records, show, summaries
from predictions.trials import PARTS, Trial, select
from reporting.results import save_records, write_results
from rich.console import Console

LOCAL = ("real", "sleep", "crowd")
TIMEOUT_S = 900.0
#: seconds that a profile may take for each number of ranks; on slow links every collective takes its time
BUDGETS_S = {"real": 90.0, "sleep": 60.0, "crowd": 60.0, "gigabit": 90.0, "slow": 300.0}


def run_world(trials: list[Trial], settings: Settings) -> list[dict[str, Any]]:
    """The results of trials of one part and one number of ranks."""
    if trials[0].part in LINKS:
        return run_shaped(trials, settings, TIMEOUT_S)
    return spawn_local("predictions.ranks:run", trials[0].ranks, (trials, settings), TIMEOUT_S)[0]


def write(path: Path, results: list[dict[str, Any]], settings: Settings) -> None:
    """The document so far: an interrupted run keeps the parts that it has finished."""
    write_results(path, {"rounds": settings.rounds, "summaries": summaries(results), "trials": results})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few plans and rounds: does it run, not how well")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these (default: real sleep crowd)")
    parser.add_argument("--shaped", action="store_true", help="the parts over shaped links: gigabit slow (needs root)")
    parser.add_argument("--only", nargs="+", default=(), metavar="WORD", help="only trials whose name contains a WORD")
    parser.add_argument("--rounds", type=int, help="rounds of one step per plan (10; 3 with --quick)")
    parser.add_argument("--budget", type=float, help="seconds for each profile (by part; half with --quick)")
    parser.add_argument("--json", type=Path, default=Path("out/accuracy.json"), help="where the results go")
    options = parser.parse_args()
    settings = Settings(options.rounds or (3 if options.quick else 10), 1 if options.quick else 2)
    os.environ |= {"KINETO_LOG_LEVEL": "9", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the meter starts a profiler per plan
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that links are taken away
    console = Console(width=None if sys.stdout.isatty() else 170)
    results: list[dict[str, Any]] = []
    failed = False
    trials = select(options.parts or (LINKS if options.shaped else LOCAL), options.quick, options.only)
    for (part, ranks), world in groupby(trials, key=lambda trial: (trial.part, trial.ranks)):
        budget_s = options.budget or BUDGETS_S[part] / (2 if options.quick else 1)
        with console.status(f"{PARTS[part]}: {ranks} ranks"):
            try:
                results += run_world(list(world), replace(settings, budget_s=budget_s))
            except (OSError, RuntimeError) as error:  # the others may still say something
                failed = True
                console.print(f"{part} with {ranks} ranks failed: {error}", markup=False)
        write(options.json, results, settings)
    show(results, console)
    save_records("accuracy", records(results), options.quick)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
