"""Compressed sums of a gradient over links: bytes on the wire, seconds beside Gloo's dense sum and torch's own hooks,
and whether the planner's prices pick the best way.

    sudo -E python benchmarks/wire.py [--quick] [--links loopback gigabit hundred slow] [--only NAME ...]
    sudo -E python benchmarks/wire.py --pick [--quick] [--ranks 2 4] [--sizes N ...]

Links join network namespaces of this machine: 1 Gbit/s, 100 Mbit/s ("hundred"), 100 Mbit/s with 10 ms one way
("slow"); "loopback" is one namespace for all ranks. All contenders sum one bucket in interleaved rounds; times are
those of the slowest rank, "times faster" the median over rounds of Gloo's time by theirs. Bytes are the kernel's
counters of the cards without headers, summed over ranks, beside what ``sent_bytes`` says. Targets are the speed-ups of
plain torch prototypes. With ``--pick`` the ranks first profile themselves over that very link.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from communication.codes import DENSE, HOOKS
from communication.picks import NEAR
from network.links import missing
from network.ranks import EVERY_LINK, run_over_links
from reporting.results import Record, Spread, save_records, write_results
from rich.console import Console
from rich.table import Table

BY_DOUBLING = "powersgd4 by recursive_doubling"  # as plans have it where messages are small
NAMES = ("bf16", "int8", "int4", "1bit", "topk1%", "dgc1%", "dgc0.1%", "powersgd4", BY_DOUBLING, *HOOKS)
#: how many times faster prototypes were: 16 MB, 4 ranks
TARGETS = {
    "loopback": {"bf16": 0.97, "int8": 0.42, "1bit": 0.58, "dgc1%": 0.75, "dgc0.1%": 1.1, "powersgd4": 1.4},
    "gigabit": {"bf16": 1.79, "int8": 2.5, "1bit": 2.19, "dgc1%": 3.0, "dgc0.1%": 3.9, "powersgd4": 7.3},
    "hundred": {"bf16": 1.96, "int8": 2.44, "1bit": 10.4, "dgc1%": 12.2, "dgc0.1%": 33.0, "powersgd4": 63.0},
    "slow": {"bf16": 1.84, "int8": 2.57, "1bit": 7.3, "dgc1%": 8.6, "dgc0.1%": 17.0, "powersgd4": 8.6},
}
SIZES = tuple(2**k for k in (16, 18, 20, 22, 24, 26))
BYTES_WITHIN, HIT_SHARE = 0.01, 0.95
TIMEOUT_S = 1800.0


def targets_of(links: str, faster: dict[str, float]) -> dict[str, float]:
    """Code → how many times faster it should be than Gloo's sum: PowerSGD as fast as torch's own hook, too."""
    targets = dict(TARGETS[links])
    targets["powersgd4"] = targets[BY_DOUBLING] = max(targets["powersgd4"], faster.get("hook powersgd4", 0.0))
    return targets


def show(console: Console, links: str, rows: list[dict[str, Any]]) -> list[str]:
    """The table of one link; what misses its target."""
    table = Table(title=f"over {links}")
    for column in ("code", "ms", "quartiles", "times faster", "target", "MB sent", "by formula", "wire ratio"):
        table.add_column(column, justify="left" if column == "code" else "right")
    missed = []
    faster = {row["code"]: row["times_faster"] for row in rows}
    targets = targets_of(links, faster)
    for row in rows:
        code, off = row["code"], row["sent_bytes"] / row["formula_bytes"] - 1
        target = targets.get(code)
        if target is not None and faster[code] < target:
            missed.append(f"{links}: {code} {faster[code]:.2f} x, target {target:.2f}")
        if abs(off) > BYTES_WITHIN and code not in HOOKS:
            missed.append(f"{links}: {code} sends {off:+.1%} of what the formula says")
        table.add_row(
            code, f"{1e3 * row['median_s']:.1f}", f"{1e3 * row['low_s']:.1f} … {1e3 * row['high_s']:.1f}",
            f"{faster[code]:.2f}", "" if target is None else f"{target:.2f}", f"{row['sent_bytes'] / 1e6:.3f}",
            f"{off:+.2%}", f"{row['wire_ratio']:.1f}",
        )  # fmt: skip
    console.print(table)
    return missed


def records(links: str, rows: list[dict[str, Any]], ranks: int, nbytes: int) -> list[Record]:
    """Per code: how many times faster than Gloo's exact sum, held against a prototype where there was one."""
    found, targets = [], targets_of(links, {row["code"]: row["times_faster"] for row in rows})
    for row in rows:
        if row["code"] == DENSE:
            continue
        even, name = max(1.0, targets.get(row["code"], 0.0)), row["code"]
        spread = Spread(row["faster_low"], row["faster_high"], "quartiles of the rounds")
        label = f"{name} over {links}, {nbytes / 2**20:g} MiB, {ranks} ranks"
        if name in HOOKS:
            found.append(Record(label, row["times_faster"], "× as fast", 2, spread, "Gloo", note="torch's own"))
            continue
        peer = "Gloo" if even == 1.0 else f"Gloo; the aim is {even:.3g}, as a prototype or torch's hook"
        found.append(Record(label, row["times_faster"], "× as fast", 2, spread, peer, even, "more"))
    return found


def show_picks(console: Console, links: str, cells: list[dict[str, Any]]) -> None:
    """A row per cell: what prices pick, what is best, and both by price and by the clock."""
    table = Table(title=f"picks over {links}, {cells[0]['ranks']} ranks")
    for column in ("KiB", "pick", "priced ms", "ms", "best", "priced ms", "ms", "ratio", ""):
        table.add_column(column, justify="left" if column in ("pick", "best") else "right")
    for cell in cells:
        pick, best = cell["pick"], cell["best"]
        figures = [(name, 1e3 * cell["price_s"][name], 1e3 * cell["seconds"][name][1]) for name in (pick, best)]
        words = [text for name, price, ms in figures for text in (name, f"{price:.3g}", f"{ms:.3g}")]
        table.add_row(f"{cell['nbytes'] / 1024:g}", *words, f"{cell['ratio']:.2f}", "" if cell["hit"] else "missed")
    console.print(table)


def compare_all(options: argparse.Namespace, console: Console) -> list[str]:
    """Every code over every link."""
    rounds, budget_s = (3, 5.0) if options.quick else (25, 90.0)
    found, missed = {}, []
    for links in options.links:
        card = "lo" if links == "loopback" else "eth0"
        arguments = (options.elements, options.only, rounds, budget_s, card)
        found[links] = run_over_links("communication.codes:compare", arguments, options.ranks[-1], links, TIMEOUT_S)
        missed += show(console, links, found[links])
        measured = records(links, found[links], options.ranks[-1], 4 * options.elements)
        save_records("wire", measured, options.quick)
        write_results(options.json, {"ranks": options.ranks[-1], "load": os.getloadavg()[0], "links": found})
    return missed


def pick_all(options: argparse.Namespace, console: Console) -> list[str]:
    """Every cell of links, ranks and sizes."""
    rounds, budget_s = (5, 3.0) if options.quick else (15, 20.0)
    cells: list[dict[str, Any]] = []
    for links in options.links:
        for ranks in options.ranks:
            arguments = (options.sizes, rounds, budget_s, options.profile, EVERY_LINK[links][0])
            here = run_over_links("communication.picks:picks", arguments, ranks, links, TIMEOUT_S)
            show_picks(console, links, here)
            cells += [{"links": links, **cell} for cell in here]
            write_results(options.json, {"load": os.getloadavg()[0], "cells": cells})
    hits = sum(cell["hit"] for cell in cells)
    plain = sum(cell["pick"] == DENSE or cell["pick"].startswith("by ") for cell in cells)
    console.print(f"{hits} of {len(cells)} picks within {NEAR - 1:.0%} or the quartile of the best; {plain} exact")
    aim = 100 * HIT_SHARE
    row, note = "picks within 10 % or the upper quartile of the best", f"{hits} of {len(cells)}"
    picked = Record(row, 100 * hits / len(cells), "%", 1, None, "the aim", aim, "more", note)
    save_records("wire", [picked], options.quick)
    return [] if hits >= HIT_SHARE * len(cells) else [f"{hits} of {len(cells)} picks, target {HIT_SHARE:.0%}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, not how fast")
    parser.add_argument("--pick", action="store_true", help="the planner's picks instead")
    parser.add_argument("--links", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--ranks", type=int, nargs="+", help="4; of the picks 2 and 4")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="only these codes")
    parser.add_argument("--elements", type=int, default=2**22, help="of the bucket that is summed")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of the picks' buckets")
    parser.add_argument("--profile", type=float, default=60.0, help="seconds of the profile before picks")
    parser.add_argument("--json", type=Path, help="out/wire.json, or out/wire-picks.json")
    options = parser.parse_args()
    options.ranks = options.ranks or ([2, 4] if options.pick else [4])
    options.json = options.json or Path("out/wire-picks.json" if options.pick else "out/wire.json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that links are taken away
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 150)
    missed = (pick_all if options.pick else compare_all)(options, console)
    for line in missed:
        console.print(f"missed: {line}", markup=False)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
