"""The log of a run: what records hold, where they go, and who writes them."""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path
from time import sleep
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.models import GPT
from meshwright.runtime.execution.chunk import BoundChunk
from meshwright.runtime.metrics import log_line

BATCH, SEQUENCE, LR = 8, 16, 0.1


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(64, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab=64, layers=1, hidden=16, heads=2, sequence=SEQUENCE)


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def on_step(self, record: Any) -> None:
        self.heard.append(("step", record["step"]))

    def on_evaluate(self, record: Any) -> None:
        self.heard.append(("evaluation", record["held_out"]))

    def on_checkpoint(self, record: Any) -> None:
        self.heard.append(("checkpoint", record["path"]))


def logged(folder: str) -> tuple[list[float], list[Any], list[Any], str]:
    """One rank: five steps, logged every second one by rank 1, then one more by a logger that goes on."""
    parallel = mw.parallelize(
        model(), mw.Cluster.local(2), example_inputs=tokens(0), strategy="dp2", microbatches=2,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=LR),
    )  # fmt: skip
    listener, losses, records = Listener(), [], []
    with mw.MetricsLogger(
        parallel, folder, every=2, rank=1, to=("terminal", "jsonl", "csv"), callbacks=[listener]
    ) as metrics:
        for step in range(5):
            loss = parallel.train_step(*tokens(step))
            losses.append(loss.item())
            records.append(metrics.on_step(loss, temperature=step))
        metrics.on_evaluate(held_out=1.5)
        metrics.on_checkpoint("at/5")
    with mw.MetricsLogger(parallel, folder, every=1, rank=1, to=("jsonl", "csv")) as metrics:
        for step in (5, 6):
            metrics.on_step(parallel.train_step(*tokens(step)), temperature=step)
    return losses, records, listener.heard, parallel.plan.schedule


@pytest.mark.ranks
def test_records_of_a_run(ranks: Any, tmp_path: Path) -> None:
    (losses, records, heard, _), (_, others, told, schedule) = ranks.run(2, logged, str(tmp_path / "run"))
    assert not heard  # rank 1 was chosen
    assert told == [("step", 1), ("step", 2), ("step", 4), ("evaluation", 1.5), ("checkpoint", "at/5")]
    assert [record is not None for record in records] == [True, True, False, True, False]
    one = model()
    gradient = torch.autograd.grad(one(*tokens(0)), list(one.parameters()))
    first, second = others[0], others[1]
    assert first["loss"] == pytest.approx(losses[0])
    assert first["grad_norm"] == pytest.approx(float(torch.cat([g.flatten() for g in gradient]).norm()), rel=1e-4)
    assert records[0]["grad_norm"] == pytest.approx(first["grad_norm"])  # told by all, written by one
    assert first["learning_rate"] == LR
    assert "tokens_per_s" not in first  # the first step captures and compiles
    assert second["tokens_per_s"] == pytest.approx(BATCH * SEQUENCE / second["step_s"])
    assert second["tokens_per_s_per_device"] == pytest.approx(second["tokens_per_s"] / 2)
    assert second["measured_over_predicted"] == pytest.approx(second["step_s"] / second["predicted_step_s"])
    assert 0 < second["share_of_peak"] < 1
    assert second["peak_bytes"] == records[1]["peak_bytes"] > 0
    assert second["temperature"] == 1

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == ["run", "step", "step", "step", "evaluation", "checkpoint", "run", "step", "step"]
    assert lines[0]["schedule"] == schedule
    assert lines[0]["devices"] == 2
    assert lines[2] == second
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "4", "6", "7"]
    assert rows[0]["tokens_per_s"] == ""
    assert float(rows[3]["loss"]) == pytest.approx(lines[7]["loss"])


def with_a_slow_rank(slow: int) -> tuple[list[Any], list[str]]:
    """One rank of three of which one sleeps from the second step on, the others in the first: the slow rank of each
    record, the warnings."""
    parallel = mw.parallelize(
        model(), mw.Cluster.local(3), example_inputs=tuple(x[:6] for x in tokens(0)), strategy="dp3", microbatches=2,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=LR),
    )  # fmt: skip
    run, asleep = BoundChunk.run, False

    def sleeping(*arguments: Any) -> Any:
        if asleep:
            sleep(0.05)
        return run(*arguments)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(BoundChunk, "run", sleeping)
        metrics = mw.MetricsLogger(parallel, every=1, to=())
        records = []
        for step in range(7):
            asleep = (dist.get_rank() == slow) == (step > 0)
            records.append(metrics.on_step(parallel.train_step(*(x[:6] for x in tokens(step)))))
    return [record.get("slow_rank") for record in records if record], [str(one.message) for one in told]


@pytest.mark.ranks
def test_a_slow_rank_is_named_while_the_run_goes_on(ranks: Any) -> None:
    (found, told), (others, _), _ = ranks.run(3, with_a_slow_rank, 1)
    assert found == others == [None] * 3 + [1] * 4
    assert [one for one in told if "rank" in one] == [next(one for one in told if one.startswith("rank 1 computes"))]


def test_a_line_reads_well() -> None:
    record = {
        "kind": "step", "step": 1200, "loss": 2.25, "grad_norm": 0.5, "learning_rate": 1e-3, "step_s": 0.5,
        "predicted_step_s": 0.4, "measured_over_predicted": 1.25, "tokens_per_s": 2048.0,
        "tokens_per_s_per_device": 1024.0, "tflops_per_device": 0.25, "share_of_peak": 0.4, "peak_bytes": 2**30,
        "accuracy": 0.75,
    }  # fmt: skip
    assert log_line(record) == (
        "step 1,200 | loss 2.2500 | grad norm 0.5 | lr 1.00e-03 | 2,048 tokens/s (1,024 a device) | "
        "0.25 TFLOPS (40% of peak) | 1 GiB | 500 ms a step, predicted 400 ms | accuracy 0.75"
    )
    assert log_line({"kind": "evaluation", "step": 3, "loss": 1.0}) == "step 3 | evaluation | loss 1.0000"
    assert log_line({"kind": "checkpoint", "step": 3, "path": "a/b"}) == "step 3 | checkpoint a/b"


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"to": ("paper",)}, "metrics go to terminal, jsonl, csv, tensorboard, wandb, mlflow, but got 'paper'"),
        ({"to": ("jsonl",)}, "metrics to jsonl need a folder, but got none"),
        ({"to": ("mlflow",), "folder": "x"}, "pip install mlflow"),
        ({"every": 0}, "every is a number of steps, 1 or more, but got 0"),
    ],
)
def test_what_is_refused(wishes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        mw.MetricsLogger(None, **wishes)
