"""Our own local ops against PyTorch's, forward and backward, one thread, interleaved: medians and ratios.

python benchmarks/local_ops.py [--rounds 60] [--json out/local_ops.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from meshwright.compiler.ir.comm import Context, use_context
from meshwright.compiler.ir.ops import local_ops
from reporting.results import Record, save_records


class OneDevice:
    """A world of one for ops that ask where they are."""

    def size(self, axis: int) -> int:
        return 1

    def index(self, axis: int) -> int:
        return 0


def cases() -> dict[str, tuple[torch.Tensor, Callable[[], torch.Tensor], Callable[[], torch.Tensor]]]:
    logits = torch.randn(512, 8192, requires_grad=True)
    target = torch.randint(0, 8192, (512,))
    wide = torch.randn(2048, 1024, requires_grad=True)
    image, scale = torch.randn(16, 64, 32, 32, requires_grad=True), torch.ones(64)

    def mean() -> torch.Tensor:
        both = local_ops.cross_entropy(logits, target, -100, 0.0)
        return both[0] / both[1].detach()

    return {
        "cross entropy [512, 8192]": (logits, mean, lambda: F.cross_entropy(logits, target)),
        "dropout [2048, 1024]": (
            wide,
            lambda: local_ops.dropout(wide, 0.1, 3).sum(),
            lambda: F.dropout(wide, 0.1).sum(),
        ),
        "batch norm [16, 64, 32, 32]": (
            image,
            lambda: local_ops.batch_norm(image, scale, scale, 1e-5)[0].sum(),
            lambda: F.batch_norm(image, None, None, scale, scale, training=True).sum(),
        ),
    }


def seconds(function: Callable[[], torch.Tensor], leaf: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.autograd.grad(function(), leaf)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, default=Path("out/local_ops.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'op':32}{'ours':>10}{'torch':>10}{'of minima':>12}{'of medians':>12}")
    with use_context(Context(OneDevice())):  # type: ignore[arg-type]
        for name, (leaf, ours, theirs) in cases().items():
            pairs = [(seconds(ours, leaf), seconds(theirs, leaf)) for _ in range(options.rounds)]
            mine, other = ([pair[k] for pair in pairs] for k in (0, 1))
            medians = statistics.median(mine), statistics.median(other)
            row = {
                "op": name,
                "ours_ms": medians[0] * 1e3,
                "torch_ms": medians[1] * 1e3,
                "ratio_of_minima": min(mine) / min(other),
                "ratio_of_medians": medians[0] / medians[1],
            }
            rows.append(row)
            print(
                f"{name:32}{row['ours_ms']:10.2f}{row['torch_ms']:10.2f}"
                f"{row['ratio_of_minima']:12.2f}{row['ratio_of_medians']:12.2f}"
            )
    made = [Record(row["op"], row["ratio_of_minima"], "× PyTorch's", 2, None, "PyTorch", 1.0) for row in rows]
    save_records("local_ops", made)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
