"""One training step, ours against the same by hand, on the same ranks, model, weights, batch and optimizer.

    python benchmarks/runtime.py [--quick] [--cells NAME ...] [--links] [--repeat N] [--json out/runtime.json]

The contenders of a cell take turns in interleaved rounds. Up to two ranks of one thread each compute for real; four
sleep in proportion to their local FLOPs, over real collectives (see README.md). Exit status 1 if ours and a peer
disagree on the loss, or a cell fails.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from baselines.interleaved import Rounds, interval
from meshwright.runtime.transport.launch import spawn_local
from network.ranks import LINKS, run_over_links
from reporting.results import Record, Spread, save_records, write_results
from rich.console import Console
from rich.table import Table

LOSS_RTOL = 1e-4
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Cell:
    """One comparison: what it runs on each of ``ranks`` ranks, at its full and at its quick size; over shaped ``links``
    of that name, if any. target: of our time over the fastest peer's; meter: whether bytes are counted."""

    name: str
    about: str
    ranks: int
    path: str
    arguments: tuple[Any, ...]
    quick: tuple[Any, ...]
    target: float = 1.0
    links: str = ""
    meter: bool = True


_GPT, _SMALL_GPT = {"batch": 8}, {"batch": 4, "layers": 2, "hidden": 128, "sequence": 64}
_TINY = {"batch": 8, "layers": 2, "hidden": 128, "sequence": 16, "vocab": 256}
_SLEEP, _SHORT_SLEEP = {"batch": 256, "hidden": 64, "layers": 8}, {"batch": 64, "hidden": 64, "layers": 8}
_WIDE, _SHORT_WIDE = {"batch": 128, "hidden": 256, "layers": 8}, {"batch": 16, "hidden": 256, "layers": 8}
_LATE = ["interleaved", "interleaved zero-bubble"]


def _gpt(name: str, about: str, kind: str, *more: Any, batch: int = 8) -> Cell:
    sizes = {**_GPT, "batch": batch}, {**_SMALL_GPT, "batch": batch}
    return Cell(name, about, 2, f"baselines.real:{kind}", *[("gpt", size, *more) for size in sizes])


def _sleep(name: str, about: str, kind: str, *more: Any, links: str = "") -> Cell:
    sizes = (_WIDE, _SHORT_WIDE) if links else (_SLEEP, _SHORT_SLEEP)
    return Cell(
        name, about, 4, f"baselines.sleeping:{kind}", *[(size, *more) for size in sizes], links=links, meter=not links
    )


CELLS = (
    Cell("one-gpt", "GPT, eager, one rank", 1, "baselines.real:single", ("gpt", _GPT), ("gpt", _SMALL_GPT), 1.02),
    _gpt("dp2-gpt", "GPT, data parallel", "data_parallel"),
    Cell(
        "dp2-mlp", "MLP, data parallel", 2, "baselines.real:data_parallel", ("mlp", {"batch": 1024}),
        ("mlp", {"batch": 64}),
    ),
    Cell(
        "dp2-convnet", "convnet, data parallel", 2, "baselines.real:data_parallel", ("convnet", {"batch": 64}),
        ("convnet", {"batch": 8}),
    ),
    _gpt("fsdp2-gpt", "GPT, fully sharded", "sharded"),
    Cell(
        "fsdp2-mlp", "MLP, fully sharded", 2, "baselines.real:sharded", ("mlp", {"batch": 1024}), ("mlp", {"batch": 64})
    ),
    _gpt("tp2-gpt", "GPT, tensor parallel", "tensor_parallel"),
    _gpt("pp2-gpt", "GPT, 1F1B, 8 microbatches", "pipeline", 8, "1f1b", ["1f1b"], batch=16),
    _gpt("pp2-gpt-interleaved", "GPT, interleaved", "pipeline", 8, "interleaved", _LATE, batch=16),
    _gpt("pp2-gpt-zbv", "GPT, ZB-V", "pipeline", 8, "zb-v", ["zb-v"], batch=16),
    Cell("one-gpt-compiled", "GPT, torch.compile, one rank", 1, "baselines.real:compiled", ("gpt", _GPT),
         ("gpt", _SMALL_GPT)),
    _gpt("dp2-gpt-compiled", "GPT, torch.compile, data parallel", "compiled"),
    Cell("dp2-tiny", "tiny GPT, data parallel", 2, "baselines.real:data_parallel", ("gpt", _TINY), ("gpt", _TINY)),
    Cell("tp2-tiny", "tiny GPT, tensor parallel", 2, "baselines.real:tensor_parallel", ("gpt", _TINY), ("gpt", _TINY)),
    Cell(
        "pp2-tiny", "tiny GPT, 1F1B", 2, "baselines.real:pipeline", ("gpt", _TINY, 8, "1f1b", ["1f1b"]),
        ("gpt", _TINY, 8, "1f1b", ["1f1b"]),
    ),
    Cell("action", "the executor's own Python", 1, "baselines.overhead:actions", (), (), math.inf, meter=False),
    _sleep("dp4-sleep", "sleeping, data parallel", "data_parallel"),
    _sleep("fsdp4-sleep", "sleeping, fully sharded", "sharded"),
    _sleep("tp4-sleep", "sleeping, tensor parallel", "tensor_parallel"),
    _sleep("pp4-sleep", "sleeping, 1F1B, 8 microbatches", "pipeline", 8, "1f1b", ["1f1b"]),
    _sleep("pp4-sleep-interleaved", "sleeping, interleaved", "pipeline", 8, "interleaved", _LATE),
    _sleep("pp4-sleep-zbv", "sleeping, ZB-V", "pipeline", 8, "zb-v", ["zb-v"]),
    _gpt("auto2-gpt", "GPT, our choice against all", "automatic", 8, 30.0, batch=16),
    Cell(
        "auto2-mlp", "MLP, our choice against all", 2, "baselines.real:automatic", ("mlp", {"batch": 1024}, 8, 30.0),
        ("mlp", {"batch": 64}, 8, 5.0),
    ),
    Cell(
        "auto2-convnet", "convnet, our choice against all", 2, "baselines.real:automatic",
        ("convnet", {"batch": 64}, 8, 30.0), ("convnet", {"batch": 8}, 8, 5.0),
    ),
    _sleep("auto4-sleep", "sleeping, our choice against all", "automatic", 8, 30.0),
    *(
        _sleep(f"auto4-{links}", f"sleeping, {links} links, our choice against all", "automatic", 8, 60.0, links=links)
        for links in LINKS
    ),
)  # fmt: skip


def run_cell(cell: Cell, rounds: Rounds, quick: bool) -> dict[str, Any]:
    """The results of the comparison, the peer (the fastest of its variants by median) and the ratios of ours to it."""
    before = os.getloadavg()[0]
    arguments = cell.quick if quick else cell.arguments
    task = (cell.path, arguments, asdict(rounds), cell.meter)
    if cell.links:
        results = run_over_links("baselines.rank:run", task, cell.ranks, cell.links, TIMEOUT_S)
    else:
        results = spawn_local("baselines.rank:run", cell.ranks, task, timeout_s=TIMEOUT_S)[0]
    mine, *peers = results
    peer = min(peers, key=lambda result: result["median_s"])
    low, high = interval(mine["step_s"], peer["step_s"])
    found = {
        "cell": cell.name,
        "about": cell.about,
        "ranks": cell.ranks,
        "arguments": arguments,
        "target": cell.target,
        "contenders": results,
        "peer": peer["name"],
        "ratio_of_medians": mine["median_s"] / peer["median_s"],
        "median_of_ratios": median(a / b for a, b in zip(mine["step_s"], peer["step_s"], strict=True)),
        "ratio_interval": [low, high],
        "ratio_of_minima": mine["min_s"] / peer["min_s"],
        "equal_loss": all(math.isclose(mine["loss"], other["loss"], rel_tol=LOSS_RTOL) for other in peers),
        "load": [before, os.getloadavg()[0]],
    }
    if cell.meter:
        measured = [peer] if cell.path.endswith(":automatic") else peers  # other kinds of plans hold other things
        found["ratio_of_bytes"] = mine["peak_bytes"] / min(one["peak_bytes"] for one in measured)
    if cell.path == "baselines.overhead:actions":
        from baselines.overhead import ACTIONS

        found["us_per_action"] = 1e6 * (mine["median_s"] - peer["median_s"]) / ACTIONS
    return found


def records(results: list[dict[str, Any]]) -> list[Record]:
    """Per cell: our step over the fastest peer's, and our bytes over the least peer's."""
    found: dict[str, Record] = {}
    for result in results:
        low, high = result["ratio_interval"]
        count, peer = result["ranks"], result["peer"]
        name = result["about"] + (f", {count} ranks" if count > 1 else "")
        if "us_per_action" in result:
            found[name] = Record(f"{name}, per action", result["us_per_action"], "µs", 0, None, "the aim", 50.0)
            continue
        spread = Spread(low, high, "95 % interval") if math.isfinite(high) else None
        note = f"of medians {result['ratio_of_medians']:.3f}"
        figures = [
            Record(f"{name}: step", result["median_of_ratios"], "× the peer's", 3, spread, peer, 1.0, "less", note)
        ]
        if "ratio_of_bytes" in result:
            figures.append(Record(f"{name}: bytes", result["ratio_of_bytes"], "× the peer's", 3, None, peer, 1.0))
        found |= {record.row: record for record in figures}
    return list(found.values())


def show(results: list[dict[str, Any]], console: Console) -> None:
    """One row per contender; the ratios stand in the row of ours."""
    table = Table(title="milliseconds per step; ratios are ours / fastest peer, below 1 where ours is faster")
    for heading in ("cell", "contender"):
        table.add_column(heading)
    for heading in ("median", "min", "cpu", "MiB", "medians", "paired", "95 %", "minima", "bytes", "loss", "load"):
        table.add_column(heading, justify="right")
    for result in results:
        low, high = result["ratio_interval"]
        ratios = [f"{result[k]:.3f}" for k in ("ratio_of_medians", "median_of_ratios")]
        ratios += [f"{low:.2f}–{high:.2f}", f"{result['ratio_of_minima']:.3f}"]
        ratios.append(f"{result['ratio_of_bytes']:.3f}" if "ratio_of_bytes" in result else "")
        for index, one in enumerate(result["contenders"]):
            table.add_row(
                "" if index else f"{result['cell']} ({result['ranks']} ranks)",
                one["name"] + (" *" if one["name"] == result["peer"] else ""),
                f"{1e3 * one['median_s']:.1f}",
                f"{1e3 * one['min_s']:.1f}",
                f"{1e3 * one['cpu_s']:.1f}",
                f"{one['peak_bytes'] / 2**20:.1f}" if "peak_bytes" in one else "",
                *([""] * len(ratios) if index else ratios),
                f"{one['loss']:.5f}",
                "" if index else f"{result['load'][1]:.1f}",
                end_section=index == len(result["contenders"]) - 1,
            )
    console.print(table)
    for result in results:
        mine = result["contenders"][0]
        console.print(f"{result['cell']}: {mine['note']}", markup=False) if mine["note"] else None
        if "us_per_action" in result:
            console.print(f"{result['cell']}: {result['us_per_action']:.0f} µs of Python per action (target 50)")
        if not result["equal_loss"]:
            console.print(f"{result['cell']}: the losses differ by more than {LOSS_RTOL}")
        if result["median_of_ratios"] > result["target"]:
            console.print(f"{result['cell']}: slower than {result['target']} × {result['peer']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small models and few rounds: does it run, not how fast")
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], help="only these")
    parser.add_argument("--links", action="store_true", help="the cells over shaped links (needs root)")
    parser.add_argument("--rounds", type=int, help="rounds of one step per contender (20; 3 with --quick)")
    parser.add_argument("--repeat", type=int, default=1, help="run every cell this often, each time in new processes")
    parser.add_argument("--json", type=Path, default=Path("out/runtime.json"), help="where the results go")
    options = parser.parse_args()
    os.environ |= {"KINETO_LOG_LEVEL": "9", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the meter starts a profiler
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that links are taken away
    rounds = Rounds(1, options.rounds or 3, 1) if options.quick else Rounds(3, options.rounds or 20, 1)
    console = Console(width=None if sys.stdout.isatty() else 170)
    results: list[dict[str, Any]] = []
    failed: list[str] = []
    chosen = [cell for cell in CELLS if cell.name in options.cells] if options.cells else [
        cell for cell in CELLS if bool(cell.links) == options.links
    ]  # fmt: skip
    for turn in range(options.repeat):
        for cell in chosen:
            with console.status(f"{cell.name} ({turn + 1} of {options.repeat})"):
                try:
                    results.append(run_cell(cell, rounds, options.quick))
                except (OSError, RuntimeError, TimeoutError) as error:  # the other cells may still say something
                    failed.append(cell.name)
                    console.print(f"{cell.name} failed: {error}", markup=False)
            write_results(options.json, {"quick": options.quick, "cells": results})
    show(results, console)
    save_records("runtime", records(results), options.quick)
    return 0 if not failed and all(result["equal_loss"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
