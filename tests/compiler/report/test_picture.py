"""The picture of a plan as data, and the page as text: its content, its size, and that names are only names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.pipeline.families import generate
from meshwright.compiler.pipeline.schedule import chain
from meshwright.compiler.pipeline.simulate import message_times, simulate
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.report.page import notebook_html
from meshwright.compiler.report.picture import picture
from meshwright.compiler.search.predict import simulate_plan
from torch import nn

from tests.support.large_plan import large_plan, small_plan


@cache
def planned(**asked: Any) -> Plan:
    return small_plan(**asked)


def expanded(row: dict[str, Any]) -> list[tuple[list[Any], int, int, int]]:
    """(code, microbatch, start, end) of a compact row, as the page reads it."""
    gaps = [g for entry in row["gaps"] for g in ([entry[0]] * entry[1] if isinstance(entry, list) else [entry])]
    unlike, seen, at, out = dict(row["unlike"]), [0] * len(row["codes"]), 0, []
    for k, (letter, gap) in enumerate(zip(row["text"], gaps, strict=True)):
        code = ord(letter) - ord("A")
        start = at + gap
        at = start + unlike.get(k, row["ticks"][code])
        microbatch = row["microbatches"][k] if row["microbatches"] else seen[code]
        seen[code] += 1
        out.append((row["codes"][code], microbatch, start, at))
    return out


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream"])
def test_a_compact_row_expands_to_the_simulated_actions(schedule: str) -> None:
    plan = planned(schedule=schedule, strategy="pp2,dp2")
    drawn, simulation = picture(plan)["timeline"], simulate_plan(plan)
    for row, actions in zip(drawn["stages"], simulation.timeline, strict=True):
        found = expanded(row["actions"])
        assert [(code, k) for code, k, _, _ in found] == [([a.kind, a.chunk], a.microbatch) for _, _, a in actions]
        for (_, _, start, end), (start_s, end_s, _) in zip(found, actions):
            assert start * drawn["tick_s"] == pytest.approx(start_s, abs=2 * drawn["tick_s"])
            assert end * drawn["tick_s"] == pytest.approx(end_s, abs=2 * drawn["tick_s"])
        last = actions[-1][1]
        ends = [end for end in row["ends"] if end[3] == "end"]
        if schedule != "pipedream":
            step_end = (ends[-1][1] + ends[-1][2]) * drawn["tick_s"] if ends else last
            assert step_end == pytest.approx(max(step_end, last), abs=3 * drawn["tick_s"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_messages_arrive_when_the_clock_says(schedule: str) -> None:
    """An action starts when its stage is free and the last of its messages is there."""
    made = generate(schedule, 3, 6, 2 if schedule == "interleaved" else None)
    num = made.num_virtual
    ahead, back = dict.fromkeys(chain(num), 0.7), dict.fromkeys(chain(num), 0.4)
    simulation = simulate(made, [1.0 + 0.2 * q for q in range(num)], [2.0] * num, ahead, None, back)
    arrived: dict[tuple[int, bool, int], float] = {}
    virtual = {place: q for q, place in enumerate(made.places())}
    for stage in message_times(made, simulation, ahead, back):
        for one in stage:
            assert one.end_s - one.start_s == pytest.approx(0.7 if one.is_forward else 0.4)
            arrived[one.target, one.is_forward, one.microbatch] = one.end_s
    for s, row in enumerate(simulation.timeline):
        free_at = 0.0
        for start, end, action in row:
            key = virtual[s, action.chunk], action.kind == "F", action.microbatch
            there = arrived.get(key, 0.0) if action.kind != "W" else 0.0
            assert start == pytest.approx(max(free_at, there))
            free_at = end


def test_seconds_of_a_stage_add_up_to_the_step() -> None:
    plan = planned(schedule="1f1b")
    for stage in picture(plan)["stages"]:
        assert sum(stage["seconds"].values()) == pytest.approx(stage["busy_s"], rel=1e-3)
        assert stage["busy_s"] + stage["idle_s"] == pytest.approx(plan.prediction.step_s)
    for parts in (stage["parts"] for stage in picture(plan)["timeline"]["stages"]):
        assert all(sum(share for _, share in kind) == pytest.approx(1, abs=0.01) for kind in parts.values())


def test_a_saved_plan_has_the_modules_shapes_and_messages(tmp_path: Any) -> None:
    plan = planned(strategy="pp2,tp2")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.graph is None
    drawn = picture(loaded)
    assert drawn["outline"]["missing"] == ""
    assert drawn["outline"]["why"] == {}
    assert drawn["outline"]["kinds"] == picture(loaded, graph=plan.graph)["outline"]["kinds"]
    for kind in drawn["outline"]["kinds"]:
        ops = {op for chunk in plan.stages[kind["stage"]].chunks for op in chunk.ops}
        assert {op["name"] for op in kind["ops"]} <= ops
    (whole,) = [kind for kind in drawn["outline"]["kinds"] if kind["layer"] == 0]
    linear = [op for op in whole["ops"] if op["op"] == "linear"]
    assert [op["module"] for op in linear] == ["blocks.0.0", "blocks.0.2"]
    assert [op["type"] for op in linear] == ["float32[8,256]", "float32[8,64]"]
    weight = next(row for row in whole["weights"] if row["name"] == "blocks.0.0.weight")
    assert weight["type"] == "float32[256,64]"
    assert weight["sharding"] == plan.stages[0].homes["blocks.0.0.weight"].to_json()


def test_messages_of_the_outline_are_those_that_the_plan_counts_and_prices() -> None:
    plan = planned(strategy="tp2", devices=2)
    assert plan.graph is not None
    drawn = picture(plan, plan.graph)
    kinds = drawn["outline"]["kinds"]
    layers = [layer for group in drawn["tree"] for layer in group["layers"] for _ in range(group["count"])]
    found: dict[str, int] = {}
    seconds = 0.0
    for layer in layers:
        for op in kinds[layer["kind"]]["ops"]:
            for phase, kind, _, _, s, _ in op["messages"]:
                found[f"{phase} {kind}"] = found.get(f"{phase} {kind}", 0) + 1
                seconds += s
    (predicted,) = plan.prediction.stages
    assert found == {name: n for name, n in predicted.collectives.items() if not name.startswith("step ")}
    # the rest are slices, which send nothing
    assert seconds == pytest.approx(predicted.seconds["reshard"] + predicted.seconds["internal"], rel=1e-3)


def test_layers_say_why_where_the_model_is_at_hand() -> None:
    plan = planned(schedule="1f1b")
    drawn = picture(plan, plan.graph)
    assert set(drawn["outline"]["why"]) == {str(k) for k in range(len(drawn["outline"]["kinds"]))}
    rows = drawn["outline"]["why"]["0"]
    assert {row["subject"] for row in rows} == {"recompute of blocks.0", "weights of blocks.0"}
    assert sum(row["chosen"] for row in rows) == 2
    with pytest.raises(ValueError, match="outline is of the model"):
        picture(plan, other_graph())


def other_graph() -> Any:
    with torch.device("meta"):
        network, x = nn.Sequential(nn.Linear(8, 8)), torch.zeros(4, 8)
    loss = lambda y: y.square().mean()  # noqa: E731
    return mw.plan(network, "cpu:1", example_inputs=(x,), loss_fn=loss, cache=False).graph


def test_what_is_not_known_is_said() -> None:
    document = planned(schedule="1f1b").to_json()
    old = Plan.from_json({**document, "provenance": {}, "prediction": {**document["prediction"], "sources": {}}})
    drawn = picture(old)
    assert "saved without modules" in drawn["outline"]["missing"]
    assert drawn["outline"]["kinds"] == []
    assert drawn["tree"]
    assert all("words" in group for group in drawn["tree"])
    assert "does not say how many cases" in drawn["search"]["sentences"][0]
    assert drawn["prices"]["shares"] == {}


def test_an_outline_of_other_decisions_is_left_out(tmp_path: Any) -> None:
    plan = planned(strategy="pp2,tp2")
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    ops = document["stages"][0]["chunks"][0]["ops"]
    name = next(op for op in ops if op.startswith("linear"))
    ops[name] = "whole"
    assert "was edited" in picture(Plan.from_json(document))["outline"]["missing"]
    document["outline"] = {"kinds": [{"ops": 3}], "layers": "x"}
    assert "was edited" in picture(Plan.from_json(document))["outline"]["missing"]


def test_cases_of_the_search_are_counted() -> None:
    cases = planned(schedule="1f1b").provenance["cases"]
    assert cases["solved"] >= 1
    assert cases["bounded"] >= cases["solved"]
    assert cases["meshes"] >= 1
    assert cases["left"] >= 0


HOSTILE = "</script><b onclick=alert(1)>&amp;<!--\u2028"


def hostile() -> Plan:
    plan = planned(schedule="1f1b")
    names = tuple(f"{HOSTILE}{k}" for k in range(len(plan.layers)))
    noted = replace(plan.prediction, notes=(HOSTILE,), alternatives=({"name": HOSTILE, "step_s": 1.0, "why": HOSTILE},))
    cluster = {**plan.cluster, "name": HOSTILE}
    return replace(plan, layers=names, prediction=noted, cluster=cluster, graph=None)


def test_no_text_of_a_plan_is_markup() -> None:
    page = hostile().to_html()
    assert "<b onclick" not in page
    assert "<!--" not in page.split("<script>", 1)[0]
    (block,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert not set("<>&\u2028") & set(block)
    assert json.loads(block)["notes"][-1] == HOSTILE
    assert page.count("</script>") == 3  # the data, the charts, the page


def test_a_page_needs_no_network(tmp_path: Any) -> None:
    page = planned(schedule="1f1b").to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == page
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "default-src 'none'" in page
    assert "Apache License" in page


def test_a_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    frame = hostile()._repr_html_()
    assert frame.startswith("<iframe ")
    assert frame.endswith("></iframe>")
    assert 'sandbox="allow-scripts"' in frame
    inside = re.fullmatch(r'<iframe srcdoc="([^"]*)" [^<]*></iframe>', frame, re.S)
    assert inside
    assert "<" not in inside[1]
    assert notebook_html(hostile()) == frame


def test_the_largest_plan_is_small() -> None:
    """96 layers × 1,024 devices × 1,024 microbatches: 200,000 actions."""
    plan = large_plan()
    page = plan.to_html()
    assert len(page.encode()) < 5 * 2**20
    (block,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    drawn = json.loads(block)
    assert sum(len(stage["actions"]["text"]) for stage in drawn["timeline"]["stages"]) == 64 * 1024 * 3
    assert sum(len(host["stages"]) for host in drawn["cluster"]["hosts"]) <= 64 * 8  # two hosts of a stage are alike
