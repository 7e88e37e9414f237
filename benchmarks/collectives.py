"""All-reduce algorithms against Gloo's own, on the same ranks in interleaved rounds.

    python benchmarks/collectives.py [--quick] [--ranks 4] [--links slow] [--sizes N ...] [--json out/collectives.json]

Over loopback, and (as root, with ``--links``) between namespaces joined by links of 100 Mbit/s with 10 ms of delay one
way ("slow") or 1 Gbit/s ("gigabit"). Times are medians of the slowest rank; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from communication.all_reduce import GLOO
from meshwright.runtime.collectives.rounds import ALGORITHMS
from meshwright.runtime.transport.launch import spawn_local
from network.ranks import LINKS, run_over_links
from reporting.results import Record, save_records, write_results
from rich.console import Console
from rich.table import Table

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
LINK_SIZES = SIZES[:3]
TARGETS = {("loopback", 1 << 26): 1 / 1.1, ("slow", 1 << 10): 5.5}  # times faster than Gloo


def run(where: str, ranks: int, sizes: list[int], algorithms: list[str], rounds: int, budget_s: float) -> Any:
    """The results of every size."""
    arguments = (sizes, algorithms, rounds, budget_s)
    if where == "loopback":
        return spawn_local("communication.all_reduce:compare", ranks, arguments)[0]
    return run_over_links("communication.all_reduce:compare", arguments, ranks, where, 600.0)


def show(console: Console, where: str, results: list[dict[str, Any]]) -> None:
    """A row per contender, a column per size: milliseconds, and how many times faster than Gloo."""
    table = Table(title=f"all_reduce over {where}: ms (times faster than Gloo)")
    table.add_column("algorithm")
    for result in results:
        table.add_column(f"{result['nbytes'] / 1024:g} KiB", justify="right")
    for name in results[0]["ms"]:
        cells = [f"{result['ms'][name]:.3g} ({result['times_faster'][name]:.2f})" for result in results]
        table.add_row(name, *cells)
    console.print(table)
    for result in results:
        name = max((n for n in result["ms"] if n != GLOO), key=result["times_faster"].__getitem__)
        target = TARGETS.get((where, result["nbytes"]))
        aim = "" if target is None else f", target {target:.2f}"
        console.print(f"{result['nbytes']} bytes: best {name}, {result['times_faster'][name]:.2f} x{aim}")


def records(where: str, ranks: int, results: list[dict[str, Any]]) -> list[Record]:
    """Per size: how many times faster than Gloo's the fastest of our algorithms is."""
    found = []
    for result in results:
        faster = {name: times for name, times in result["times_faster"].items() if name != GLOO}
        name = max(faster, key=faster.__getitem__)
        row = f"{result['nbytes'] / 1024:g} KiB over {where}, {ranks} ranks"
        found.append(Record(row, faster[name], "× as fast", 2, None, "Gloo", 1.0, "more", f"by {name}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--links", choices=sorted(LINKS), help="over these instead of loopback")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS["all_reduce"]))
    parser.add_argument("--json", type=Path, default=Path("out/collectives.json"))
    args = parser.parse_args()
    where = args.links or "loopback"
    sizes = args.sizes or list(LINK_SIZES if args.links else SIZES)
    rounds, budget_s = (3, 2.0) if args.quick else (25, 15.0)
    load = os.getloadavg()[0]
    results = run(where, args.ranks, sizes, args.algorithms, rounds, budget_s)
    show(Console(width=160), where, results)
    write_results(args.json, {"where": where, "ranks": args.ranks, "load_before": load, "results": results})
    save_records("collectives", records(where, args.ranks, results), args.quick)


if __name__ == "__main__":
    main()
