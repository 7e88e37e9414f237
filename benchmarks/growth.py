"""How planning grows: seconds and peak bytes over layers × devices, every cell in a fresh interpreter with an empty
cache.

python benchmarks/growth.py [--quick] [--layers 12 24 48 96 192] [--devices 8 64 512] [--hidden 1024] [--repeat N]
                            [--timeout SECONDS] [--json out/growth.json] [--plot out/growth.svg]

A GPT of fp16 on hosts of eight V100. Layers that are alike are priced once, so seconds are to grow less than layers do;
what grows with both is composition and the dynamic program. "exponent" is the slope of log seconds between a cell and
the one with the next fewer layers (or devices): 1 is linear.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

from reporting.results import Record, save_records, write_results
from reporting.svg import Panel, chart
from rich.console import Console
from rich.table import Table
from search import Task, medians, run_one

LAYERS, DEVICES = (12, 24, 48, 96, 192), (8, 64, 512)
QUICK_LAYERS, QUICK_DEVICES = (12, 24), (8, 16)
PER_HOST, BATCH = 8, 1024

Cells = Mapping[tuple[int, int], Mapping[str, Any]]  # (layers, devices) → medians of its runs


def task_of(layers: int, devices: int, hidden: int) -> Task:
    """The run of one cell."""
    return Task("growth", "search_baselines.models:gpt", f"p3.16xlarge:{devices // PER_HOST}", BATCH, layers, hidden)


def cells_of(results: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], Mapping[str, Any]]:
    """The cells whose runs ended."""
    found = medians([dict(result) for result in results]).values()
    return {(run["layers"], PER_HOST * int(run["cluster"].split(":")[1])): run for run in found}


def exponent(cells: Cells, cell: tuple[int, int], axis: int) -> str:
    """Slope of log seconds from the next smaller cell along layers (axis 0) or devices (axis 1); "" for the first."""
    smaller = [c for c in cells if c[axis] < cell[axis] and c[1 - axis] == cell[1 - axis]]
    if not smaller:
        return ""
    before = max(smaller, key=lambda c: c[axis])
    slope = log(cells[cell]["wall_s"] / cells[before]["wall_s"]) / log(cell[axis] / before[axis])
    return f"{slope:.2f}"


def show(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A line per cell, then what went wrong."""
    cells = cells_of(results)
    table = Table(title="planning a GPT on hosts of eight V100: medians over the runs, whole process")
    headings = ("layers", "devices", "wall s", "cpu s", "search s", "GB", "exponent over layers", "over devices",
                "step s", "gap", "stages", "load")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    last = None
    for layers, devices in sorted(cells, key=lambda cell: cell[::-1]):
        if last not in (None, devices):
            table.add_section()
        last, cell = devices, (layers, devices)
        run = cells[cell]
        table.add_row(
            str(layers), str(devices), f"{run['wall_s']:.2f}", f"{run['cpu_s']:.2f}", f"{run['search_s']:.2f}",
            f"{run['peak_bytes'] / 1e9:.2f}", exponent(cells, cell, 0), exponent(cells, cell, 1),
            f"{run['step_s']:.4g}", f"{run['bound_gap']:.1%}", str(len(run["stages"])), f"{run['load'][-1]:.1f}",
        )  # fmt: skip
    console.print(table)
    for result in results:
        if "error" in result:
            console.print(f"{result['name']}: {result['error']}")


def records(results: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Per cell: seconds and peak memory of the whole process."""
    found = []
    for (layers, devices), run in cells_of(results).items():
        row = f"{layers} layers on {devices} V100"
        found.append(Record(f"{row}: seconds", run["wall_s"], "s", 1))
        found.append(Record(f"{row}: peak memory", run["peak_bytes"] / 1e9, "GB", 2))
    return found


def plot(cells: Cells) -> str:
    """Seconds and bytes over layers, a line for each number of devices, and the other way round, as SVG."""
    panels = []
    for title, key, scale, unit in (("seconds", "wall_s", 1.0, "s, whole process"),
                                    ("memory", "peak_bytes", 1e9, "GB at the peak")):  # fmt: skip
        for axis, across, other in ((0, "layers", "devices"), (1, "devices", "layers")):
            lines: dict[str, list[tuple[float, float]]] = {}
            for cell in sorted(cells, key=lambda cell: (cell[1 - axis], cell[axis])):
                value = cells[cell][key] / scale
                lines.setdefault(f"{cell[1 - axis]} {other}", []).append((cell[axis], value))
            panels.append(Panel(f"{title} over {across}", across, unit, lines))
    return chart(panels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two numbers of layers, two of devices")
    parser.add_argument("--layers", type=int, nargs="+", help=f"default {' '.join(map(str, LAYERS))}")
    parser.add_argument("--devices", type=int, nargs="+", help=f"multiples of 8, default {' '.join(map(str, DEVICES))}")
    parser.add_argument("--hidden", type=int, default=1024, help="width, a multiple of 128 (1024: 192 layers fit on 8)")
    parser.add_argument("--repeat", type=int, default=1, help="runs per cell, interleaved")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a run is given up")
    parser.add_argument("--json", type=Path, default=Path("out/growth.json"), help="where the results go")
    parser.add_argument("--plot", type=Path, default=Path("out/growth.svg"), help="where the chart goes")
    options = parser.parse_args()
    layers = options.layers or (QUICK_LAYERS if options.quick else LAYERS)
    devices = options.devices or (QUICK_DEVICES if options.quick else DEVICES)
    if wrong := [number for number in devices if number < 1 or number % PER_HOST]:
        parser.error(f"devices come in hosts of {PER_HOST}, but got {wrong[0]}; use a multiple")
    console = Console(width=None if sys.stdout.isatty() else 150)
    tasks = [task_of(many, number, options.hidden) for number in devices for many in layers]
    results: list[dict[str, Any]] = []
    for turn in range(options.repeat):
        for task in tasks:
            with console.status(f"{task.name} ({turn + 1} of {options.repeat})"):
                results.append(run_one(task, options.timeout))
            write_results(options.json, {"runs": results})
    show(results, console)
    save_records("growth", records(results), options.quick)
    if cells := cells_of(results):
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        options.plot.write_text(plot(cells))
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
