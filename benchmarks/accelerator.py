"""Predicted against measured, and against eager PyTorch, on one GPU: GPT and Llama at several sizes, in bfloat16.

    python benchmarks/accelerator.py [--budget 300] [--rounds 20] [--table costmodel.json] [--json out/accelerator.json]

Profiles the card (op grid, then the exact ops of the models), predicts every model before it runs, then trains it on
the card alone, by its plan and as eager PyTorch does: CUDA events around five steps, the two interleaved, medians.
Writes the cost table beside the results, with its provenance. Without a GPU it says so and ends with status 0: there
is nothing to hold it against.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import meshwright as mw
import torch
import torch.distributed as dist
from meshwright.compiler.cost.signature import plan_probes
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.search.driver import make_plan
from meshwright.compiler.search.parallel_shape import Strategy
from meshwright.compiler.search.request import PlanRequest
from meshwright.models.architectures import GPT, Llama
from predictions.targets import fill
from reporting.results import Record, Spread, save_records, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

_NUMBERS = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))  # a prime: no two rows are equal
STEPS = 5  # one behind the other, as in training, are one sample
WARM_UP = 3  # steps; their losses are those that are compared


@dataclass(frozen=True)
class Model:
    """``make`` on the meta device; a batch is two integer tensors [batch, sequence] below ``vocabulary``."""

    name: str
    make: Callable[[], nn.Module]
    batch: int
    sequence: int
    vocabulary: int

    def inputs(self, device: str) -> tuple[Tensor, Tensor]:
        tokens, targets = torch.randint(0, self.vocabulary, (2, self.batch, self.sequence), device=device)
        return tokens, targets


MODELS = (
    Model("gpt-350m", lambda: GPT(51200, 24, 1024, 16, 1024), 8, 1024, 51200),
    Model("gpt-760m", lambda: GPT(51200, 24, 1536, 16, 1024), 8, 1024, 51200),
    Model("gpt-1.3b", lambda: GPT(51200, 24, 2048, 32, 1024), 8, 1024, 51200),
    Model("gpt-2.6b", lambda: GPT(51200, 32, 2560, 32, 1024), 4, 1024, 51200),
    Model("llama-1b", lambda: Llama(32000, 16, 2048, 5632, 16, 8), 4, 2048, 32000),
    Model("llama-3b", lambda: Llama(32000, 26, 3072, 8192, 24, 8), 4, 2048, 32000),
)


def alone() -> None:
    """A job of one rank, unless torchrun started this one."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")


def predicted(budget_s: float, table: Path) -> tuple[dict[str, dict[str, Any]], dict[str, mw.Plan]]:
    """Model → seconds and bytes by the grid alone and by exact ops; and the plans."""
    with torch.device("meta"):
        graphs = {
            model.name: capture(model.make().to(torch.bfloat16).train(), model.inputs("meta")) for model in MODELS
        }
    general = mw.profile(budget_s=budget_s / 2)
    plans, probes = {}, {}
    for model in MODELS:
        graph = graphs[model.name]
        asked = PlanRequest(
            model.batch, 1, Strategy(), "1f1b", recompute="none", zero=0, sequence=False, alternatives=False
        )
        plans[model.name] = make_plan(graph, general, asked)
        print(f"planned {model.name}", file=sys.stderr, flush=True)
        probes |= plan_probes(graph, plans[model.name])
    exact = mw.profile(budget_s=budget_s / 2, base=general, probes=list(probes.values()))
    exact.save(table)
    out: dict[str, dict[str, Any]] = {}
    for name, plan in plans.items():
        by_ops = reprice(plan, graphs[name], exact).prediction
        (stage,) = by_ops.stages
        out[name] = {
            "grid_s": plan.prediction.step_s,
            "ops_s": by_ops.step_s,
            "bytes": stage.peak_bytes - stage.memory_bytes.get("framework", 0.0),
        }
    return out, plans


def measured(model: Model, plan: mw.Plan, rounds: int) -> dict[str, Any]:
    """Seconds of steps by the plan and of eager PyTorch, interleaved, by CUDA events; the losses of both from the same
    weights; and the most bytes that the allocator held during a step by the plan."""
    with torch.device("meta"):
        module, eager = (model.make().to(torch.bfloat16).train() for _ in range(2))
    batch = model.inputs("cuda")
    before = torch.cuda.memory_allocated()
    parallel = mw.parallelize(module, example_inputs=batch, plan=plan, init=_fill, optimizer=_adamw)
    eager.to_empty(device="cuda").load_state_dict(parallel.full_state_dict())
    before += sum(p.nbytes for p in eager.parameters())
    optimizer = _adamw(eager.parameters())

    def by_plan() -> Tensor:
        return parallel.train_step(*batch)

    def by_hand() -> Tensor:
        loss = eager(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.cuda.reset_peak_memory_stats()
    losses = [[by_plan().item() for _ in range(WARM_UP)]]
    held = torch.cuda.max_memory_allocated() - before
    losses.append([by_hand().item() for _ in range(WARM_UP)])
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for step, taken in zip((by_plan, by_hand), samples, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(STEPS):
                step()
            end.record()
            torch.cuda.synchronize()
            taken.append(start.elapsed_time(end) / 1e3 / STEPS)
    return {
        "step_s": median(samples[0]), "eager_s": median(samples[1]), "samples": samples, "losses": losses,
        "bytes": held,
    }  # fmt: skip


def _fill(name: str, whole: Tensor) -> None:
    """First weights as those of ``fill``, but a million numbers again and again: billions take minutes to draw."""
    if whole.dim() > 1:
        numbers = _NUMBERS.to(whole.dtype) * whole[0].numel() ** -0.5
        for part in whole.view(-1).split(len(numbers)):
            part.copy_(numbers[: len(part)])
    else:
        fill(name, whole)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5)


def show(rows: dict[str, dict[str, Any]]) -> None:
    table = Table(title=f"one step on {torch.cuda.get_device_name()}: predicted, measured, and eager PyTorch")
    for title in (
        "model", "measured", "eager", "ours/eager", "by exact ops", "error", "by the grid", "error", "memory",
        "predicted", "error", "losses differ",
    ):  # fmt: skip
        table.add_column(title, justify="left" if title == "model" else "right")
    for name, row in rows.items():
        took, eager, held = (row["measured"][key] for key in ("step_s", "eager_s", "bytes"))
        ops, grid, size = (row["predicted"][key] for key in ("ops_s", "grid_s", "bytes"))
        table.add_row(
            name, f"{took * 1e3:.1f} ms", f"{eager * 1e3:.1f} ms", f"{took / eager:.3f}", f"{ops * 1e3:.1f} ms",
            f"{ops / took - 1:+.1%}", f"{grid * 1e3:.1f} ms", f"{grid / took - 1:+.1%}", f"{held / 2**30:.2f} GiB",
            f"{size / 2**30:.2f} GiB", f"{size / held - 1:+.1%}", f"{_differ(row):.1e}",
        )  # fmt: skip
    Console(width=160).print(table)


def _differ(row: dict[str, Any]) -> float:
    """The largest relative difference of a loss by the plan from eager PyTorch's."""
    return max(abs(ours / theirs - 1) for ours, theirs in zip(*row["measured"]["losses"], strict=True))


def records(rows: dict[str, dict[str, Any]]) -> list[Record]:
    """Per model and card: the errors of the predicted step and memory, the step over eager PyTorch's, how far losses
    differ."""
    found, card = [], torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0]
    for model, row in rows.items():
        name = f"{model} on {card}"
        took, eager, held = (row["measured"][key] for key in ("step_s", "eager_s", "bytes"))
        for title, error in (
            ("step, by exact ops", row["predicted"]["ops_s"] / took - 1),
            ("step, by the grid", row["predicted"]["grid_s"] / took - 1),
            ("memory", row["predicted"]["bytes"] / held - 1),
        ):
            found.append(Record(f"{name}: error of the {title}", 100 * error, "%", 1))
        ratios = [ours / theirs for ours, theirs in zip(*row["measured"]["samples"], strict=True)]
        spread = Spread(*quantiles(ratios, n=10)[::8], "middle 80 % of the pairs of steps")
        found.append(Record(f"{name}: step over eager", took / eager, "×", 3, spread, "eager PyTorch", 1.0))
        found.append(Record(f"{name}: largest difference of a loss", _differ(row), "relative", peer="eager PyTorch"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--budget", type=float, default=300.0, metavar="S", help="seconds of profiling")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="measured steps of each model")
    parser.add_argument("--table", type=Path, default=Path("out/accelerator-table.json"), metavar="FILE")
    parser.add_argument("--json", type=Path, default=Path("out/accelerator.json"), metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("accelerator.py holds predictions against a GPU, but there is none here: nothing was measured")
        return 0
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    alone()
    rows: dict[str, dict[str, Any]] = {}
    try:
        said, plans = predicted(arguments.budget, arguments.table)
        for model in MODELS:  # one at a time: they would not fit beside each other
            took = measured(model, plans[model.name], arguments.rounds)
            rows[model.name] = {"predicted": said[model.name], "measured": took}
            print(f"measured {model.name}", file=sys.stderr, flush=True)
            save_records("accelerator", records(rows))  # a run that is cut off keeps what it has
            write_results(arguments.json, {"device": torch.cuda.get_device_name(), "rows": rows})
            gc.collect()
            torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
