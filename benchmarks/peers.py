"""Step time against hand-written peers, on the same ranks, model, weights, batch and optimizer, in interleaved rounds.

    python benchmarks/peers.py [--quick] [--cells NAME ...] [--repeat N] [--json out/peers.json]

Two ranks of one thread each compute for real; four ranks sleep in proportion to their local FLOPs, over real
collectives (see README.md). Exit status 1 if ours and a peer disagree on the loss, or a cell
fails.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from contest.measure import Rounds
from contest.results import write_results
from meshwright.runtime.launch import spawn_local
from rich.console import Console
from rich.table import Table

LOSS_RTOL = 1e-4
TARGET = 1.05


@dataclass(frozen=True)
class Cell:
    """One contest: what it runs on each of ``ranks`` ranks, at its full and at its quick size."""

    name: str
    about: str
    ranks: int
    path: str
    arguments: tuple[Any, ...]
    quick: tuple[Any, ...]


_GPT, _SMALL_GPT = {"batch": 8}, {"batch": 4, "layers": 2, "hidden": 128, "sequence": 64}
_TINY = {"batch": 8, "layers": 2, "hidden": 128, "sequence": 16, "vocab": 256}
_SLEEP, _SHORT_SLEEP = {"batch": 256, "hidden": 64, "layers": 8}, {"batch": 64, "hidden": 64, "layers": 4}

CELLS = (
    Cell(
        "dp2-gpt", "GPT, data parallel", 2, "contest.real:data_parallel", ("gpt", _GPT), ("gpt", _SMALL_GPT)
    ),
    Cell(
        "dp2-mlp", "MLP, data parallel", 2, "contest.real:data_parallel", ("mlp", {"batch": 1024}),
        ("mlp", {"batch": 64}),
    ),
    Cell(
        "dp2-convnet", "convnet, data parallel", 2, "contest.real:data_parallel", ("convnet", {"batch": 64}),
        ("convnet", {"batch": 8}),
    ),
    Cell("tp2-gpt", "GPT, tensor parallel", 2, "contest.real:tensor_parallel", ("gpt", _GPT), ("gpt", _SMALL_GPT)),
    Cell(
        "pp2-gpt", "GPT, 1F1B, 8 microbatches", 2, "contest.real:pipeline", ("gpt", {"batch": 16}, 8),
        ("gpt", {**_SMALL_GPT, "batch": 8}, 8),
    ),
    Cell("dp2-tiny", "tiny GPT, data parallel", 2, "contest.real:data_parallel", ("gpt", _TINY), ("gpt", _TINY)),
    Cell("tp2-tiny", "tiny GPT, tensor parallel", 2, "contest.real:tensor_parallel", ("gpt", _TINY), ("gpt", _TINY)),
    Cell("pp2-tiny", "tiny GPT, 1F1B", 2, "contest.real:pipeline", ("gpt", _TINY, 8), ("gpt", _TINY, 8)),
    Cell("dp4-sleep", "sleeping, data parallel", 4, "contest.sleeping:data_parallel", (_SLEEP,), (_SHORT_SLEEP,)),
    Cell("tp4-sleep", "sleeping, tensor parallel", 4, "contest.sleeping:tensor_parallel", (_SLEEP,), (_SHORT_SLEEP,)),
    Cell(
        "pp4-sleep", "sleeping, 1F1B, 8 microbatches", 4, "contest.sleeping:pipeline", (_SLEEP, 8), (_SHORT_SLEEP, 8)
    ),
)  # fmt: skip


def run_cell(cell: Cell, rounds: Rounds, quick: bool) -> dict[str, Any]:
    """The contest's results, with the peer (the fastest of its variants by median) and the ratios of ours to it."""
    before = os.getloadavg()[0]
    arguments = (*(cell.quick if quick else cell.arguments), rounds)
    results = spawn_local(cell.path, cell.ranks, arguments, timeout_s=600)[0]
    mine, *peers = results
    peer = min(peers, key=lambda result: result["median_s"])
    paired = median(a / b for a, b in zip(mine["step_s"], peer["step_s"], strict=True))
    return {
        "cell": cell.name,
        "about": cell.about,
        "ranks": cell.ranks,
        "arguments": arguments[:-1],
        "contenders": results,
        "peer": peer["name"],
        "ratio_of_medians": mine["median_s"] / peer["median_s"],
        "median_of_ratios": paired,
        "ratio_of_minima": mine["min_s"] / peer["min_s"],
        "equal_loss": all(math.isclose(mine["loss"], other["loss"], rel_tol=LOSS_RTOL) for other in peers),
        "load": [before, os.getloadavg()[0]],
    }


def show(results: list[dict[str, Any]], console: Console) -> None:
    """One row per contender; the ratios stand in the row of ours."""
    table = Table(title="milliseconds per step; ratios are ours / fastest peer, below 1 where ours is faster")
    for heading in ("cell", "contender"):
        table.add_column(heading)
    for heading in ("median", "min", "cpu", "ideal", "medians", "paired", "minima", "loss", "load"):
        table.add_column(heading, justify="right")
    for result in results:
        for index, one in enumerate(result["contenders"]):
            ratios = [f"{result[k]:.3f}" for k in ("ratio_of_medians", "median_of_ratios", "ratio_of_minima")]
            star = " *" if one["name"] == result["peer"] else ""
            table.add_row(
                "" if index else f"{result['cell']} ({result['ranks']} ranks)",
                one["name"] + star,
                f"{1e3 * one['median_s']:.1f}",
                f"{1e3 * one['min_s']:.1f}",
                f"{1e3 * one['cpu_s']:.1f}",
                f"{1e3 * one['ideal_s']:.1f}" if "ideal_s" in one else "",
                *(["", "", ""] if index else ratios),
                f"{one['loss']:.5f}",
                "" if index else f"{result['load'][1]:.1f}",
                end_section=index == len(result["contenders"]) - 1,
            )
    console.print(table)
    for result in results:
        if not result["equal_loss"]:
            console.print(f"{result['cell']}: the losses differ by more than {LOSS_RTOL}")
        if result["median_of_ratios"] > TARGET:
            console.print(f"{result['cell']}: slower than {TARGET} × {result['peer']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small models and few rounds: does it run, not how fast")
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], help="only these")
    parser.add_argument("--rounds", type=int, help="rounds of one step per contender (20; 3 with --quick)")
    parser.add_argument("--repeat", type=int, default=1, help="run every cell this often, each time in new processes")
    parser.add_argument("--json", type=Path, default=Path("out/peers.json"), help="where the results go")
    options = parser.parse_args()
    rounds = Rounds(1, options.rounds or 3, 1) if options.quick else Rounds(3, options.rounds or 20, 1)
    console = Console(width=None if sys.stdout.isatty() else 150)
    results: list[dict[str, Any]] = []
    failed: list[str] = []
    for turn in range(options.repeat):
        for cell in CELLS:
            if options.cells is None or cell.name in options.cells:
                with console.status(f"{cell.name} ({turn + 1} of {options.repeat})"):
                    try:
                        results.append(run_cell(cell, rounds, options.quick))
                    except (RuntimeError, TimeoutError) as error:  # the other cells may still say something
                        failed.append(cell.name)
                        console.print(f"{cell.name} failed: {error}", markup=False)
                write_results(options.json, {"quick": options.quick, "cells": results})
    show(results, console)
    return 0 if not failed and all(result["equal_loss"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
