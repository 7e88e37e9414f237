"""Saving and loading a checkpoint, against writing and reading the same bytes.

python benchmarks/checkpoints.py [--quick] [--rounds N] [--json out/checkpoints.json]

Two ranks train a GPT with Adam one step, and save. Then all take turns: a save (to where the files are synced), a load
under the plan that saved, and a load under another plan, each beside what a plain program needs for the bytes of this
rank: writing and syncing them, or reading them into fresh memory. Files are in the page cache, so that the disk hides
nothing of ours. Figures are medians over the rounds of the slower rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import meshwright as mw
import torch
import torch.distributed as dist
from meshwright.models.architectures import GPT
from meshwright.runtime.checkpoint.storage import latest_checkpoint
from meshwright.runtime.transport.launch import spawn_local
from reporting.results import Record, Spread, save_records, write_results
from rich.console import Console
from rich.table import Table

FULL, QUICK = (768, 8), (64, 2)  # width and layers of the GPT
SAVED, OTHER = "tp2", "dp2"
WAYS = ("save", f"load under {SAVED}", f"load under {OTHER}")


def _trained(strategy: str, size: tuple[int, int]) -> mw.Parallel:
    """A GPT after one step under a strategy."""
    hidden, layers = size
    torch.manual_seed(0)
    tokens = torch.randint(0, 1024, (4, 33))
    model = GPT(vocab=1024, layers=layers, hidden=hidden, heads=4, sequence=32)
    parallel = mw.parallelize(
        model, example_inputs=(tokens[:, :-1], tokens[:, 1:]), strategy=strategy, zero=0,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    )  # fmt: skip
    parallel.train_step(tokens[:, :-1], tokens[:, 1:])
    return parallel


def _timed(work: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _write(path: Path, nbytes: int) -> None:
    data = memoryview(bytearray(os.urandom(2**20)))
    with open(path, "wb") as file:
        for _ in range(nbytes // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, nbytes: int) -> None:
    target = memoryview(torch.empty(nbytes, dtype=torch.uint8).numpy())
    with open(path, "rb", buffering=0) as file:
        read = 0
        while read < nbytes and (got := file.readinto(target[read : read + 2**24])):
            read += got


def measure(folder: str, size: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Seconds of every way and of its plain peer, by round, with this rank's bytes. On each rank."""
    run, rank = Path(folder) / "run", dist.get_rank()
    same, other = _trained(SAVED, size), _trained(OTHER, size)
    same.save_checkpoint(run)
    stored = latest_checkpoint(run)
    assert stored is not None
    total = sum(path.stat().st_size for path in stored.glob("*.safetensors"))
    nbytes = {"save": total // 2, WAYS[1]: total // 2, WAYS[2]: total}  # a replica needs all of it
    plain = Path(folder) / f"plain-{rank}"
    _write(plain, total)
    seconds: dict[str, list[float]] = {f"{who} {way}": [] for way in WAYS for who in ("ours", "plain")}
    for _ in range(rounds):
        for way in WAYS:
            if way == "save":
                ours = _timed(lambda: same.save_checkpoint(Path(folder) / "again", keep=1))
                peer = _timed(lambda: _write(Path(folder) / f"written-{rank}", nbytes["save"]))
            else:
                parallel = same if way == WAYS[1] else other
                ours = _timed(lambda parallel=parallel: parallel.load_checkpoint(run))
                peer = _timed(lambda way=way: _read(plain, nbytes[way]))
            seconds[f"ours {way}"].append(ours)
            seconds[f"plain {way}"].append(peer)
    return {"seconds": seconds, "nbytes": nbytes}


def ratios(ranks: list[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per way: medians of ours and of the plain peer on the slower rank, the bytes, and the ratio of every round."""
    found = {}
    for way in WAYS:
        mine, peer = (
            [max(one) for one in zip(*(rank["seconds"][f"{who} {way}"] for rank in ranks), strict=True)]
            for who in ("ours", "plain")
        )
        found[way] = {
            "ours_s": median(mine), "plain_s": median(peer), "nbytes": ranks[0]["nbytes"][way],
            "ratios": [a / b for a, b in zip(mine, peer, strict=True)],
        }  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small model, three rounds")
    parser.add_argument("--rounds", type=int, help="saves and loads of each way (9; 3 with --quick)")
    parser.add_argument("--json", type=Path, default=Path("out/checkpoints.json"), help="where the results go")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 9)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, QUICK if options.quick else FULL, rounds)
        found = ratios(spawn_local("checkpoints:measure", 2, arguments, timeout_s=1800.0))
    write_results(options.json, found)
    table = Table(title="checkpoints of a GPT with Adam on two ranks, each rank's bytes: medians")
    table.add_column("way")
    for heading in ("MB", "ours s", "plain s", "ratio", "of rounds"):
        table.add_column(heading, justify="right")
    for way, one in found.items():
        table.add_row(
            way, f"{one['nbytes'] / 1e6:.0f}", f"{one['ours_s']:.3f}", f"{one['plain_s']:.3f}",
            f"{median(one['ratios']):.2f}", f"{min(one['ratios']):.2f} to {max(one['ratios']):.2f}",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    save_records(
        "checkpoints",
        [
            Record(
                way, median(one["ratios"]), "× the plain bytes", 2,
                Spread(min(one["ratios"]), max(one["ratios"]), f"{rounds} rounds"),
                "writing and syncing them" if way == "save" else "reading them, 1.5 aimed at", 1.5,
            )
            for way, one in found.items()
        ],
        options.quick,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
