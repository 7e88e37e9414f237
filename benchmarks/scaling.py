"""How a step of ours and of the peers grows: over ranks at a fixed model (strong scaling), over layers, over
microbatches.

    python benchmarks/scaling.py [--quick] [--rounds N] [--json out/scaling.json] [--plot out/scaling.svg]

Layers sleep in proportion to their local FLOPs (``baselines.sleeping``), so up to eight ranks on few cores show bubbles
and what a step adds to its compute; messages and our own Python are real and share the cores. The contenders of a cell
take turns. Speed-up is over one rank of the same contender; "ideal" is compute alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baselines.interleaved import Rounds, interval
from baselines.sleeping import RATE_FLOPS_PER_S
from meshwright.runtime.transport.launch import spawn_local
from reporting.results import Record, Spread, save_records, write_results
from reporting.svg import Panel, chart
from rich.console import Console
from rich.table import Table

TIMEOUT_S = 600.0
RANKS, LAYERS, MICROBATCHES = (1, 2, 4, 8), (8, 16, 32, 64), (4, 8, 16, 32)
HIDDEN, BATCH = 64, 256


@dataclass(frozen=True)
class Cell:
    """One comparison: ``way`` of ``baselines.sleeping`` with its further arguments, on ``ranks`` ranks."""

    panel: str
    at: int
    way: str
    ranks: int
    layers: int
    more: tuple[Any, ...] = ()

    @property
    def ideal_s(self) -> float:
        """Seconds of a step that sleeps on every rank alike and does nothing else (``sleeping.make_sleeper``)."""
        return 48 * BATCH * HIDDEN**2 * self.layers / RATE_FLOPS_PER_S / self.ranks


def cells(quick: bool) -> list[Cell]:
    """What is measured; pipelines have two layers per chunk at least."""
    ranks, layers, microbatches = (v[:2] if quick else v for v in (RANKS, LAYERS, MICROBATCHES))
    found = [Cell("ranks", count, way, count, 16) for way in ("data_parallel", "tensor_parallel") for count in ranks]
    pipelines = (("1f1b", ("1f1b",)), ("zb-v", ("zb-v",)))
    for kind, peers in pipelines:
        found += [Cell("ranks", count, "pipeline", count, 16, (16, kind, peers)) for count in ranks if count > 1]
    for kind, peers in pipelines:
        found += [Cell("layers", depth, "pipeline", 4, depth, (8, kind, peers)) for depth in layers]
        found += [Cell("microbatches", count, "pipeline", 4, 8, (count, kind, peers)) for count in microbatches]
    return found


def run_cell(cell: Cell, rounds: Rounds) -> dict[str, Any]:
    """The medians of the contenders: ours and the fastest peer."""
    size = {"batch": BATCH, "hidden": HIDDEN, "layers": cell.layers}
    task = (f"baselines.sleeping:{cell.way}", (size, *cell.more), asdict(rounds), False)
    mine, *peers = spawn_local("baselines.rank:run", cell.ranks, task, timeout_s=TIMEOUT_S)[0]
    peer = min(peers, key=lambda one: float(one["median_s"]))
    schedule = f" {cell.more[1]}" if cell.more else ""
    return {
        **asdict(cell), "name": cell.way.replace("_", " ") + schedule, "peer": peer["name"], "ideal_s": cell.ideal_s,
        "ours_s": mine["median_s"], "peer_s": peer["median_s"],
        "interval": interval(mine["step_s"], peer["step_s"]), "load": os.getloadavg()[0],
    }  # fmt: skip


def show(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A line per cell."""
    table = Table(title="milliseconds of a step, medians; ideal: compute alone")
    for heading in ("over", "at", "way", "peer"):
        table.add_column(heading)
    for heading in ("ideal", "ours", "peer", "ours / peer", "ideal / ours", "load"):
        table.add_column(heading, justify="right")
    for one in results:
        table.add_row(
            one["panel"], str(one["at"]), one["name"], one["peer"],
            *(f"{1e3 * one[key]:.1f}" for key in ("ideal_s", "ours_s", "peer_s")),
            f"{one['ours_s'] / one['peer_s']:.3f}", f"{one['ideal_s'] / one['ours_s']:.0%}", f"{one['load']:.1f}",
        )  # fmt: skip
    console.print(table)


def records(results: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Per cell: our median step over the fastest peer's."""
    return [
        Record(
            f"{one['name']}, {one['at']} {one['panel']}", one["ours_s"] / one["peer_s"], "× the peer's step", 3,
            Spread(*one["interval"], "95 % interval"), one["peer"], 1.0,
        )
        for one in results
    ]  # fmt: skip


def plot(results: Sequence[Mapping[str, Any]]) -> str:
    """Speed-up over ranks, then seconds over layers and over microbatches; ours and the peer's side by side, as SVG."""
    panels = []
    for panel, unit in (("ranks", "× one rank's compute"), ("layers", "seconds"), ("microbatches", "seconds")):
        lines: dict[str, list[tuple[float, float]]] = {}
        for one in (one for one in results if one["panel"] == panel):
            for who in ("ours", "peer", "ideal"):
                seconds = one[f"{who}_s"]
                value = one["ideal_s"] * one["ranks"] / seconds if panel == "ranks" else seconds
                name = "ideal" if who == "ideal" else f"{one['name']}, {who}"
                points = lines.setdefault(name, [])
                if (one["at"], value) not in points:
                    points.append((one["at"], value))
        panels.append(Panel(f"sleeping layers over {panel}", panel, unit, lines))
    return chart(panels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two points of each line, three rounds")
    parser.add_argument("--rounds", type=int, help="rounds of one step per contender (7; 3 with --quick)")
    parser.add_argument("--json", type=Path, default=Path("out/scaling.json"), help="where the results go")
    parser.add_argument("--plot", type=Path, default=Path("out/scaling.svg"), help="where the chart goes")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    rounds = Rounds(2, options.rounds or (3 if options.quick else 7), 1)
    results: list[dict[str, Any]] = []
    failed = False
    for cell in cells(options.quick):
        with console.status(f"{cell.way} at {cell.at} {cell.panel}"):
            try:
                results.append(run_cell(cell, rounds))
            except (RuntimeError, TimeoutError) as error:  # the other cells may still say something
                failed = True
                console.print(f"{cell} failed: {error}", markup=False)
        write_results(options.json, {"cells": results})
    show(results, console)
    save_records("scaling", records(results), options.quick)
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    options.plot.write_text(plot(results))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
