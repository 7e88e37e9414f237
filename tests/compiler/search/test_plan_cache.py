"""Plans that were found before: the same question is answered from disk, any other is searched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.search import plan_cache
from meshwright.models import GPT

CLUSTER = mw.Cluster.parse("p3.16xlarge:1")


def asked(**changed: Any) -> mw.Plan:
    with torch.device("meta"):
        model = GPT(vocab=64, layers=changed.pop("layers", 1), hidden=32, heads=2, sequence=16)
        tokens = torch.zeros(8, 16, dtype=torch.int64)
    if changed.pop("frozen", False):
        next(model.parameters()).requires_grad_(False)
    arguments = {"strategy": "dp2", "global_batch": 8, "schedule": "1f1b", **changed}
    return mw.plan(model, arguments.pop("cluster", CLUSTER), example_inputs=(tokens, tokens), **arguments)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plans_of_other_tests: None) -> Path:
    monkeypatch.setattr(plan_cache, "cache_directory", lambda: tmp_path)
    return tmp_path / "plans"


def found_before(plan: mw.Plan) -> bool:
    return "found before" in plan.provenance["passes"]


def alike(a: mw.Plan, b: mw.Plan) -> bool:
    return replace(a, provenance={}) == replace(b, provenance={})


def test_the_same_question_is_answered_from_disk(folder: Path) -> None:
    first, second = asked(), asked()
    assert not found_before(first)
    assert found_before(second)
    assert alike(first, second)
    assert len(list(folder.iterdir())) == 1
    assert second.why("blocks.0.feed_forward.up").rows  # it knows its graph


@pytest.mark.parametrize(
    "changed",
    [
        {"global_batch": 16}, {"layers": 2}, {"strategy": "tp2"}, {"optimizer": "SGD"}, {"zero": 0},
        {"constraints": "no recompute"}, {"frozen": True}, {"cluster": mw.Cluster.parse("p3.16xlarge:2")}, {"top_k": 2},
        {"precision": "bf16"},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_another_question_is_searched(changed: dict[str, Any]) -> None:
    asked()
    other = asked(**changed)
    assert not found_before(other[0] if isinstance(other, list) else other)
    again = asked(**changed)
    assert found_before(again[0] if isinstance(again, list) else again)


def test_other_code_asks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked()
    monkeypatch.setattr(plan_cache, "_code", lambda: "another")
    assert not found_before(asked())


@pytest.mark.parametrize("text", ["", "[]", "[1]", '[{"version": 2}]', "null", "{"])
def test_a_file_that_cannot_be_read_is_replaced(folder: Path, text: str) -> None:
    plan = asked()
    (file,) = folder.iterdir()
    file.write_text(text)
    again = asked()
    assert not found_before(again)
    assert alike(plan, again)
    assert json.loads(file.read_text())


def test_it_can_be_left_out(folder: Path) -> None:
    asked(cache=False)
    assert not folder.exists()
    asked()
    assert not found_before(asked(cache=False))


def test_a_place_that_cannot_be_written_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(plan_cache, "cache_directory", lambda: tmp_path / "file")
    assert not found_before(asked())


def test_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MAX_CACHED_PLANS", 2)
    for batch in (8, 16, 24):
        asked(global_batch=batch)
    assert len(list(folder.iterdir())) == 2
    assert found_before(asked(global_batch=24))
    assert not found_before(asked(global_batch=8))


def test_rules_of_the_user_are_not_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "is_built_in", lambda node: False)
    asked()
    assert not folder.exists()
