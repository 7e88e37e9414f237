"""What coding costs on one core, code by code, beside what a plain torch prototype of the same code costs.

    python benchmarks/codecs.py [--quick] [--only NAME ...] [--elements N] [--ranks P] [--json out/codecs.json]

Processor time of one thread, minima over interleaved rounds, in ns per element of the gradient. "encode": until every
chunk is ready to be sent; "rest": all after it (a rank's part of the sum, re-encoding, decoding of all that comes). No
network: what is sent comes back as the message of every rank. Exit status 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch
from meshwright.costmodel.codecs import CODECS, sent_bytes
from meshwright.runtime.compression import BucketSpec, CompressedSum, make_sum
from reporting.results import Record, save_records
from rich.console import Console
from rich.table import Table

TARGETS_NS = {"int8": 5.0, "1bit": 5.0, "topk1%": 10.0, "topk0.1%": 10.0, "dgc1%": 10.0, "dgc0.1%": 10.0}
SIDE = 1024  # of the matrices in the bucket


class Echo:
    """An exchange in which every rank sends what this one does."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.sent = 0, size, Counter[str]()

    def all_reduce(self, x: torch.Tensor) -> Echo:
        self.sent["all_reduce"] += x.nbytes
        return self

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> Echo:
        self.sent["all_to_all"] += x.nbytes
        out.copy_(x)
        return self

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Echo:
        self.sent["all_gather"] += out.nbytes
        out.copy_(x.expand_as(out))
        return self

    def wait(self) -> None:
        return None


# ---- prototypes: the obvious way to write each, whole tensors at once


def bf16(x: torch.Tensor) -> Any:
    return x.to(torch.bfloat16)


def fp16(x: torch.Tensor) -> Any:
    return x.to(torch.float16)


def integers(bits: int) -> Callable[[torch.Tensor], Any]:
    def encode(x: torch.Tensor) -> Any:
        top = 2 ** (bits - 1) - 1
        blocks = x.view(-1, 512)
        scale = blocks.abs().amax(1, keepdim=True) / max(top, 1)
        return torch.floor(blocks / scale + torch.rand_like(blocks)).to(torch.int8), scale

    return encode


def terngrad(x: torch.Tensor) -> Any:
    scale = x.abs().max()
    return (x.sign() * torch.bernoulli(x.abs() / scale)).to(torch.int8), scale


def one_bit(x: torch.Tensor) -> Any:
    up = x >= 0
    means = x[up].mean(), x[~up].mean()
    return up.view(-1, 8).to(torch.uint8).mul(2 ** torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8), means


def sign(x: torch.Tensor) -> Any:
    up = x >= 0
    return up.view(-1, 8).to(torch.uint8).mul(2 ** torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def top(fraction: float) -> Callable[[torch.Tensor], Any]:
    def encode(x: torch.Tensor) -> Any:
        positions = x.abs().topk(int(len(x) * fraction), sorted=False).indices
        return positions, x[positions]

    return encode


def power(rank: int) -> Callable[[torch.Tensor], Any]:
    def encode(x: torch.Tensor) -> Any:
        matrix = x.view(-1, SIDE)
        left = torch.linalg.qr(matrix @ torch.ones(SIDE, rank))[0]
        return left, matrix.T @ left

    return encode


PROTOTYPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "bf16": bf16, "fp16": fp16, "int8": integers(8), "int4": integers(4), "int2": integers(2), "terngrad": terngrad,
    "1bit": one_bit, "ef-signsgd": one_bit, "signsgd": sign, "topk1%": top(0.01), "topk0.1%": top(0.001),
    "dgc1%": top(0.01), "dgc0.1%": top(0.001), **{f"powersgd{rank}": power(rank) for rank in (1, 2, 4, 8)},
}  # fmt: skip


# ---- measuring


def times(made: CompressedSum, x: torch.Tensor, gradient: torch.Tensor) -> tuple[float, float]:
    """(seconds to encode, seconds of all the rest) of one sum."""
    x.copy_(gradient)
    begin = process_time()
    steps = made.run(x)
    next(steps)
    middle = process_time()
    for _ in steps:
        pass
    return middle - begin, process_time() - middle


def timed(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> float:
    begin = process_time()
    call(x)
    return process_time() - begin


def measure(names: list[str], n: int, ranks: int, rounds: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(n, generator=generator) * torch.rand(n, generator=generator).pow(2)
    bucket = BucketSpec(n, shapes=((SIDE, SIDE),) * (n // SIDE**2))
    sums = {name: make_sum(name, bucket, Echo(ranks), submit=run_now) for name in names}
    best: dict[str, list[float]] = {name: [float("inf")] * 3 for name in names}
    x = torch.empty(n)
    for _ in range(rounds):
        for name, made in sums.items():
            found = [*times(made, x, gradient)]
            found.append(timed(PROTOTYPES[name], gradient) if name in PROTOTYPES else float("inf"))
            best[name] = [min(a, b) for a, b in zip(best[name], found)]
    rows = []
    for name in names:
        encode, rest, prototype = (1e9 * seconds / n if seconds < float("inf") else None for seconds in best[name])
        payload = sent_bytes(CODECS[name], n, ranks, 4, bucket.shapes)
        rows.append({
            "codec": name, "encode_ns": encode, "rest_ns": rest, "prototype_encode_ns": prototype,
            "wire_ratio": 2 * 4 * n / sum(b * (2 if kind == "all_reduce" else 1) for kind, b in payload.items()),
            "target_ns": TARGETS_NS.get(name),
        })  # fmt: skip
    return rows


def records(rows: list[dict[str, Any]]) -> list[Record]:
    """Per code: seconds to encode and for all the rest, per element."""
    found = []
    for row in rows:
        aim = row["target_ns"]
        peer, name = "" if aim is None else "the aim", row["codec"]
        found.append(Record(f"{name}: encode", row["encode_ns"], "ns per element", 2, None, peer, aim))
        found.append(Record(f"{name}: the rest", row["rest_ns"], "ns per element", 2))
    return found


def run_now(call: Callable[[], None]) -> Echo:
    call()
    return Echo(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds of a smaller bucket: does it run")
    parser.add_argument("--only", nargs="+", choices=list(CODECS), default=[n for n in CODECS if n != "none"])
    parser.add_argument("--elements", type=int, default=4 * 2**20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, default=Path("out/codecs.json"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    n, rounds = (2**20, 3) if asked.quick else (asked.elements, asked.rounds)
    spectral = [name for name in asked.only if name.startswith("atomo-svd")]
    rows = measure([name for name in asked.only if name not in spectral], n, asked.ranks, rounds)
    rows += measure(spectral, SIDE**2, asked.ranks, 1)  # a second for each matrix
    table = Table(title=f"{n:,} elements, {asked.ranks} ranks, ns per element on one core")
    for column in ("codec", "encode", "target", "rest", "torch prototype", "wire ratio"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for row in rows:
        target = "" if row["target_ns"] is None else f"{row['target_ns']:.0f}"
        prototype = row["prototype_encode_ns"]
        table.add_row(
            row["codec"], f"{row['encode_ns']:.2f}", target, f"{row['rest_ns']:.2f}",
            "" if prototype is None else f"{prototype:.2f}", f"{row['wire_ratio']:.1f}",
        )  # fmt: skip
    Console().print(table)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps({"elements": n, "ranks": asked.ranks, "rows": rows}, indent=1))
    save_records("codecs", records(rows), asked.quick)
    return int(any(row["target_ns"] is not None and row["encode_ns"] > row["target_ns"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
