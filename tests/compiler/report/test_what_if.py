"""What if: decisions kept, prices of now; and two plans, clusters or runs side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.report.difference import diff, read_side
from meshwright.compiler.report.what_if import CHANGES, parse_changes
from meshwright.costmodel.measured import CollectiveMeasurement, OpTime, Piece
from meshwright.models import GPT

TWO_HOSTS = mw.Cluster.preset("p3.16xlarge", 2)


def gpt() -> tuple[Any, dict[str, Any]]:
    with torch.device("meta"):
        model = GPT(vocab=256, layers=2, hidden=64, heads=8, sequence=32)
        tokens = torch.zeros(64, 32, dtype=torch.int64)
    return model, {"example_inputs": (tokens, tokens), "global_batch": 64, "executable": True}


@pytest.fixture(scope="module")
def data() -> mw.Plan:
    model, asked = gpt()
    return mw.plan(model, TWO_HOSTS, strategy="dp8,tp2", microbatches=2, schedule="1f1b", zero=0, **asked)


@pytest.fixture(scope="module")
def pipeline() -> mw.Plan:
    model, asked = gpt()
    return mw.plan(model, TWO_HOSTS, strategy="pp2,dp8", microbatches=4, schedule="zb-v", **asked)


def decisions(plan: mw.Plan) -> Any:
    return plan.stages, plan.microbatches, plan.global_batch, plan.schedule


def test_nothing_changed_is_the_same_price_and_the_bound_holds(data: mw.Plan, pipeline: mw.Plan) -> None:
    for plan in (data, pipeline):
        again = mw.simulate(plan)
        assert again.prediction.step_s == pytest.approx(plan.prediction.step_s)
        assert again.prediction.bound_s == pytest.approx(plan.prediction.bound_s)
        assert again.prediction.flops == pytest.approx(plan.prediction.flops)
        assert decisions(again) == decisions(plan)
        assert [s.memory_bytes for s in again.prediction.stages] == [s.memory_bytes for s in plan.prediction.stages]


@pytest.mark.parametrize(
    "change", ["network=4x", "bandwidth.inside_hosts=2x", "latency.between_hosts=0.1x", "compute=4x"]
)
def test_a_faster_cluster_keeps_the_decisions(data: mw.Plan, change: str) -> None:
    now = data.simulate(changes=[change])
    assert now.prediction.step_s < data.prediction.step_s
    assert now.prediction.bound_s == 0
    assert decisions(now) == decisions(data)
    assert change.split("=")[1] in now.cluster["name"]


def test_another_batch_and_number_of_microbatches(data: mw.Plan) -> None:
    now = data.simulate(changes={"batch": "2x", "microbatches": 4})
    assert (now.global_batch, now.microbatches, now.microbatch_size) == (128, 4, 32)
    assert now.prediction.flops == pytest.approx(2 * data.prediction.flops)
    assert 1.5 < now.prediction.step_s / data.prediction.step_s < 2.5
    model, asked = gpt()
    alone = replace(mw.Plan.from_json(data.to_json()), graph=None)
    again = mw.simulate(alone, model, example_inputs=asked["example_inputs"], changes={"batch": 128, "microbatches": 4})
    assert again == now


def test_fewer_hosts_shrink_the_data_axis(data: mw.Plan, pipeline: mw.Plan) -> None:
    now = data.simulate(changes=["hosts=-1"])
    assert (now.stages[0].mesh_shape, now.num_devices, now.check()) == ((4, 2), 8, [])
    model, asked = gpt()
    forced = mw.plan(model, "p3.16xlarge:1", strategy="dp4,tp2", microbatches=2, schedule="1f1b", zero=0, **asked)
    assert now.stages == forced.stages
    assert now.prediction.step_s == pytest.approx(forced.prediction.step_s)
    whole = pipeline.simulate(changes=["hosts=1"])
    assert [stage.mesh_shape for stage in whole.stages] == [(4,), (4,)]
    assert [stage.devices for stage in whole.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    lone = pipeline.simulate(cluster=mw.Cluster.preset("p3.16xlarge", 1), changes=["batch=32"])
    assert lone.num_devices == 8


def test_an_axis_of_one_device_falls_away(data: mw.Plan) -> None:
    host = replace(TWO_HOSTS.hosts[0], num_devices=2)
    small = data.simulate(cluster=replace(TWO_HOSTS, hosts=(host,)), changes=["batch=8"])
    assert small.stages[0].mesh_shape == (2,)
    assert small.check() == []


def test_what_does_not_fit_is_a_note(data: mw.Plan) -> None:
    tight = data.simulate(changes=["memory=0.0496x"])
    assert any(note.startswith("does not fit: stage 0 needs ") for note in tight.prediction.notes)
    roomy = tight.simulate(changes=["memory=20x"])
    assert not any(note.startswith("does not fit") for note in (roomy.prediction.notes))


def test_measured_prices_follow(data: mw.Plan) -> None:
    wire = CollectiveMeasurement(
        "all_reduce", "backend", 8, 4, 2, (Piece(0, 1e-4, 1e-9), Piece(1e6, 0, 1.1e-9)), (), 0.1, 9
    )
    op = OpTime("aten.gelu.default(f32[8]*)", 4e-6, 2e-6, 0.0, 4)
    host = replace(TWO_HOSTS.hosts[0], device=replace(TWO_HOSTS.hosts[0].device, op_times=(op,)))
    measured = replace(TWO_HOSTS, hosts=(host, host), wires=(wire,))
    plan = replace(data, cluster=json.loads(measured.to_json()))
    faster = data.simulate(cluster=measured, changes=["network=4x", "compute=2x"])
    cluster = mw.Cluster.from_json(json.dumps(faster.cluster))
    assert cluster.wires[0].seconds(4e7) == pytest.approx(wire.seconds(1e7))
    assert cluster.device(0).op_times[0].forward_s == pytest.approx(2e-6)
    assert plan.price_state == "edited"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["netwrk=4x"], "a change is of microbatches, .* but got 'netwrk'"),
        (["microbatches"], "a change is written name=value"),
        (["microbatches=7"], "do not hold with microbatches=7: global_batch 64 is not divisible"),
        (["microbatches=32"], "do not hold with microbatches=32: stage 0: .* cannot be split"),
        (["microbatches=0.3x"], "a whole number of 1 or more, or a factor of 2"),
        (["network=fast"], "a factor such as 4x"),
        (["network=-1x"], "a factor such as 4x"),
        (["network=nanx"], "a factor such as 4x"),
        (["hosts=-2"], "hosts is a number of 1 or more"),
        (["hosts=3"], "takes the factor 3/2 in one axis|do not hold with hosts=3"),
        (["schedule=zigzag"], "a schedule is one of"),
        (["schedule=zb-v"], "has 2 chunks per stage"),
        (["recompute=all"], "recompute is one of"),
        (["batch=2x", "batch=3x"], "got batch twice"),
    ],
)
def test_bad_changes_are_refused_by_name(data: mw.Plan, changes: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        data.simulate(changes=changes)
    assert "\n" not in str(error.value)


def test_every_change_is_known() -> None:
    assert parse_changes(dict.fromkeys(CHANGES, "1x")).keys() == set(CHANGES)


# ---- side by side


def test_a_plan_is_like_itself(data: mw.Plan) -> None:
    found = mw.diff(data, mw.Plan.from_json(data.to_json()))
    assert found.same
    assert found.text().splitlines()[-1] == "no difference"


def test_two_plans_side_by_side(data: mw.Plan, pipeline: mw.Plan) -> None:
    found = mw.diff(data, pipeline, ("data", "pipeline"))
    by_title = {section.title: section for section in found.sections}
    decided = {row.name: (row.before, row.after) for row in by_title["Decisions that differ"].rows}
    assert decided["microbatches"] == (2, 4)
    assert decided["schedule"] == ("1f1b", "zb-v")
    assert decided["stages"] == (1, 2)
    assert "model" not in decided
    layers = by_title["Layers that differ"].rows
    assert all("stage 0, devices 0–15, mesh 8×2" in str(row.before) for row in layers)
    for side, plan in (("before", data), ("after", pipeline)):
        causes = by_title["Seconds of a step on the busiest stage, by cause"].rows
        total = sum(getattr(row, side) or 0.0 for row in causes if "beside" not in row.name)
        assert total == pytest.approx(plan.prediction.step_s, rel=0.02)
        sizes = [getattr(row, side) or 0.0 for row in by_title["Bytes on the fullest device, by cause"].rows]
        assert sum(sizes) == pytest.approx(max(stage.peak_bytes for stage in plan.prediction.stages))
    document = json.loads(json.dumps(found.to_json()))
    assert (document["kind"], document["same"], document["before"]) == ("plans", False, "data")
    for width in (40, 60, 100):
        assert max(map(len, found.text(width).splitlines())) <= width


def test_an_edited_side_has_no_prices(data: mw.Plan) -> None:
    edited = mw.Plan.from_json({**data.to_json(), "microbatches": 1})
    text = mw.diff(data, edited).text()
    assert "B: edited: prices are of another plan" in text
    assert "Seconds of a step" not in text


def run(step_s: float) -> dict[str, Any]:
    """A report as ``Report.to_json`` writes it, as far as it is read."""
    terms = [{"stage": 0, "name": "forward", "predicted_s": 1.0, "measured_s": step_s / 2, "times": 2, "effect_s": 0.0}]
    ranks = [{"rank": rank, "stage": 0, "resident_bytes": 2**30, "live_bytes": None} for rank in range(2)]
    return {"predicted_step_s": 1.0, "measured_step_s": step_s, "steps": 3, "terms": terms, "ranks": ranks}


def test_files_of_any_kind(data: mw.Plan, tmp_path: Path) -> None:
    data.save(tmp_path / "plan.json")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.json").write_text(json.dumps(run(2.0)))
    (tmp_path / "demo.json").write_text(json.dumps({"ranks": 2, "report": run(3.0)}))
    plan, first, second = (read_side(str(tmp_path / name)) for name in ("plan.json", "run", "demo.json"))
    assert plan == data
    runs = diff(first, second)
    (step,) = [row for row in runs.sections[0].rows if row.name == "step"]
    assert (runs.kind, step.before, step.after, step.ratio) == ("runs", 2.0, 3.0, 1.5)
    assert diff(plan, second).kind == "plan and run"
    assert diff(plan, read_side("dgx-h100:2")).kind == "clusters"
    with pytest.raises(ValueError, match="a run is compared with a run or a plan"):
        diff(first, TWO_HOSTS)
    (tmp_path / "demo.json").write_text(json.dumps({**run(3.0), "terms": [{"stage": -1}]}))
    with pytest.raises(ValueError, match=r"demo\.json: a run is a report .* terms\[0\] lacks 'name'"):
        read_side(str(tmp_path / "demo.json"))
    with pytest.raises(ValueError, match="the folder of a run has a report"):
        read_side(str(tmp_path))
    with pytest.raises(ValueError, match="no file of a plan, a cluster or a run"):
        read_side("nowhere")
