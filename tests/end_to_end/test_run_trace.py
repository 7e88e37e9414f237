"""Traces of real runs: every action of every rank, on one clock, and under our names in a profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from meshwright.compiler.pipeline.measured import MeasuredStep
from meshwright.compiler.plan.plan import Plan


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.second(torch.relu(self.first(x))), y)


def traced(folder: str, schedule: str, strategy: str) -> tuple[Any, list[str], str]:
    """The trace after three steps, the names that a profiler saw in a fourth, and the error before the first."""
    import meshwright as mw

    torch.manual_seed(0)
    batch = torch.randn(16, 64), torch.randn(16, 64)
    parallel = mw.parallelize(
        Pair(), mw.Cluster.local(2), example_inputs=batch, strategy=strategy, microbatches=2, schedule=schedule,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )  # fmt: skip
    try:
        parallel.trace()
        error = ""
    except ValueError as raised:
        error = str(raised)
    for _ in range(3):
        parallel.train_step(*batch)
    path = Path(folder) / f"{schedule}-{strategy}.json"
    step = parallel.trace(path)
    torch.distributed.barrier()
    assert MeasuredStep.load(path) == step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        parallel.train_step(*batch)
    names = sorted({event.name for event in profiler.events() if event.name.startswith("meshwright ")})
    parallel.plan.save(Path(folder) / f"plan-{torch.distributed.get_rank()}.json")
    return step.to_json(), names, error


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("schedule", "strategy", "actions"),
    [("1f1b", "pp2", ["B0", "B1", "F0", "F1"]), ("zb-h1", "pp2", ["F0", "F1", "I0", "I1", "W0", "W1"])],
)
def test_ranks_agree_on_a_step(ranks: Any, tmp_path: Path, schedule: str, strategy: str, actions: list[str]) -> None:
    (first, names, error), (second, others, _) = ranks.run(2, traced, str(tmp_path), schedule, strategy)
    assert first == second
    assert "train a few steps first" in error
    step = MeasuredStep.from_json(first)
    for rank in step.ranks:
        assert sorted(span.name for span in rank.spans if span.name[0].isupper()) == actions
        assert [span.start_s for span in rank.spans] == sorted(span.start_s for span in rank.spans)
        assert all(0 <= span.start_s <= span.end_s <= step.step_s for span in rank.spans)
        assert rank.peak_bytes > 2**20
    by_name = [{span.name: span for span in rank.spans} for rank in step.ranks]
    # on one clock: stage 1 begins after stage 0 has made what it reads, and stage 0's backward after stage 1's
    back = "B" if schedule == "1f1b" else "I"
    assert by_name[1]["F0"].start_s >= by_name[0]["F0"].start_s + by_name[0]["F0"].exchange_s
    assert by_name[0][f"{back}0"].start_s >= by_name[1][f"{back}0"].start_s
    assert {f"meshwright 0{name}" for name in actions} <= set(names)
    assert {f"meshwright 1{name}" for name in actions} <= set(others)
    assert "meshwright optimizer" in names

    plan = Plan.load(tmp_path / "plan-0.json")
    document = plan.to_chrome_trace(tmp_path / "trace.json", trace=step)
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    processes = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"}
    assert len(processes) == 4
    assert any("measured: rank 1, stage 1" in name for name in processes)
    assert sum(
        event["cat"] in ("forward", "backward", "input gradients", "weight gradients") for event in events
    ) == 4 * len(actions)
    assert all(event["ts"] >= -1e-6 and event["dur"] >= 0 for event in events)
    assert '"rank":1' in plan.to_html(trace=step)
    foreign = MeasuredStep("of another model", step.step_s, step.ranks)
    with pytest.raises(ValueError, match="of another model"):
        plan.to_html(trace=foreign)
    with pytest.raises(ValueError, match="of another model"):
        plan.to_chrome_trace(trace=foreign)
