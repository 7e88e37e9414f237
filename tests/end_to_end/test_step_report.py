"""Reports and recalibrations of real runs: ranks agree, and what was slow is blamed."""

from __future__ import annotations

from time import sleep
from typing import Any

import pytest
import torch
from meshwright.compiler.report.step_report import Report
from meshwright.costmodel.cluster import Cluster


# ---- real ranks
class Pair(torch.nn.Module):
    """Two equal halves, of work that is worth measuring."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.second(torch.relu(self.first(x))), y)


def parallelized(
    strategy: str, microbatches: int, schedule: str = "auto"
) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    import meshwright as mw

    torch.manual_seed(0)
    batch = torch.randn(64, 128), torch.randn(64, 128)
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)  # noqa: E731
    parallel = mw.parallelize(
        Pair(), mw.Cluster.local(2), example_inputs=batch, optimizer=optimizer, strategy=strategy,
        microbatches=microbatches, schedule=schedule,
    )  # fmt: skip
    return parallel, batch


def reported(strategy: str, microbatches: int) -> tuple[dict[str, Any], str]:
    parallel, batch = parallelized(strategy, microbatches)
    before = parallel.report()
    assert before.measured_step_s is None
    for _ in range(5):
        parallel.train_step(*batch)
    parallel.metered_step(*batch)
    report: Report = parallel.report()
    return report.to_json(), report.text()


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "m"), [("dp2", 1), ("tp2", 2), ("pp2", 2)])
def test_ranks_report_alike(ranks: Any, strategy: str, m: int) -> None:
    first, second = ranks.run(2, reported, strategy, m)
    assert first == second
    found, text = first
    assert found["steps"] == 2  # the middle of four: neither the first nor the metered one
    for rank in found["ranks"]:
        parts = (
            "forward_s",
            "backward_s",
            "weights_s",
            "forward_exchange_s",
            "backward_exchange_s",
            "sends_s",
            "waiting_s",
        )
        whole = sum(rank[part] for part in (*parts, "gradient_s", "optimizer_s", "host_s", "skew_s"))
        assert whole == pytest.approx(rank["step_s"], rel=1e-6)  # means of the same steps add up
        assert min(rank["forward_s"], rank["backward_s"], rank["optimizer_s"]) > 0
        assert (rank["forward_exchange_s"] > 0) == (strategy == "tp2")  # the loss is summed at the end of the step
        assert rank["waiting_s"] > 0 or strategy != "pp2"
        assert 2**16 < rank["live_bytes"] < 2**24 < rank["resident_bytes"]
    assert f"stage {len(found['predicted_peak_bytes']) - 1}" in text


def recalibrated(strategy: str, microbatches: int, folder: str) -> tuple[float, float, float, str, float, str]:
    parallel, batch = parallelized(strategy, microbatches)
    for _ in range(12):
        parallel.train_step(*batch)
    kept = parallel.plan
    found = parallel.recalibrate(f"{folder}/refitted.json")
    assert parallel.plan is kept  # it does not switch by itself
    loss = float(parallel.train_step(*batch))
    again = reprice_alone(found.cluster, strategy, microbatches)
    return (
        found.measured_step_s, found.current.prediction.step_s, again, found.cluster.to_json(), loss, found.text(),
    )  # fmt: skip


def reprice_alone(cluster: Cluster, strategy: str, microbatches: int) -> float:
    """The step that planning predicts for that strategy on the cluster."""
    import meshwright as mw

    batch = torch.randn(64, 128), torch.randn(64, 128)
    plan = mw.plan(Pair(), cluster, example_inputs=batch, strategy=strategy, microbatches=microbatches, executable=True)
    return plan.prediction.step_s


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "m"), [("dp2", 1), ("tp2", 2), ("pp2", 2)])
def test_recalibration_makes_the_prediction_come_true(ranks: Any, tmp_path: Any, strategy: str, m: int) -> None:
    first, second = ranks.run(2, recalibrated, strategy, m, str(tmp_path))
    assert first == second
    measured_s, now_s, planned_s, document, _, text = first
    assert now_s == pytest.approx(measured_s, rel=0.1)
    # planned afresh, the strategy is at least as fast, and no other arrangement of it is much faster
    assert planned_s == pytest.approx(measured_s, rel=0.5)
    assert (tmp_path / "refitted.json").read_text() == document
    cluster = Cluster.from_json(document)
    assert cluster.fingerprint() == Cluster.local(2).fingerprint()
    assert dict(cluster.provenance)["recalibrated by"].startswith("forward ")
    assert "Recalibrated from 5 steps" in text


def slow_backward(schedule: str) -> list[tuple[int, str, float]]:
    parallel, batch = parallelized("pp2", 2, schedule)
    if parallel.session.stage == 1:
        for name, parameter in parallel.session.state.parameters.items():
            if name.endswith("weight"):
                parameter.register_hook(lambda grad: sleep(0.03))
    for _ in range(4):
        parallel.train_step(*batch)
    return [(term.stage, term.name, share) for term, share in parallel.report().blamed()]


@pytest.mark.ranks
@pytest.mark.parametrize(("schedule", "term"), [("1f1b", "backward"), ("zb-h1", "weights")])
def test_a_sleeping_backward_is_blamed(ranks: Any, schedule: str, term: str) -> None:
    for blamed in ranks.run(2, slow_backward, schedule):
        stage, name, share = blamed[0]
        assert (stage, name) == (1, term)
        assert share > 0.5
