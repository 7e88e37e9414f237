"""Closer looks are for where leaner rows may help: nothing is lost by leaving them out elsewhere."""

from __future__ import annotations

import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search import explore
from meshwright.compiler.search.space import Space
from meshwright.compiler.search.state import SMALL_OPS
from meshwright.compiler.search.tables import SearchTables
from meshwright.models import GPT

from tests.support.clusters import limited
from tests.support.planning import make_plan

PLENTY = 16384  # MiB
TIGHT = (120, 150, 200)  # MiB, of 972 that the model takes with everything replicated


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model, tokens = GPT(vocab=512, layers=4, hidden=1024, heads=8, sequence=64), torch.zeros(16, 64).long()
    return capture(model, (tokens, tokens))


@pytest.fixture
def ladders(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The microbatch counts whose submeshes, all or some, got the ladder."""
    seen: list[int] = []
    whole, some = SearchTables.prepare_ladder, SearchTables.prepare_uniform_ladder

    def noted(self, counts):
        seen.extend(counts)
        return whole(self, counts)

    def noted_too(self, m, *rest):
        seen.append(m)
        return some(self, m, *rest)

    monkeypatch.setattr(SearchTables, "prepare_ladder", noted)
    monkeypatch.setattr(SearchTables, "prepare_uniform_ladder", noted_too)
    return seen


def planned(graph: Graph, mib: float) -> Plan:
    assert sum(1 for _ in graph.ops()) > SMALL_OPS
    return make_plan(graph, limited(mib), 64, alternatives=False, space=Space.whole())


def test_where_memory_is_plenty_nobody_climbs_the_ladder(graph, ladders, monkeypatch):
    plan = planned(graph, PLENTY)
    assert not ladders
    monkeypatch.setattr(SearchTables, "gains_from_memory", lambda self, m, first_s: True)
    monkeypatch.setattr(SearchTables, "faster_without_limit", lambda self, m, most: True)
    climbed = planned(graph, PLENTY)
    assert ladders
    assert plan.prediction.step_s <= climbed.prediction.step_s * (1 + 1e-3)


@pytest.mark.parametrize("mib", TIGHT)
def test_where_memory_is_tight_the_ladder_is_left_out_only_where_it_does_not_help(graph, ladders, monkeypatch, mib):
    plan = planned(graph, mib)
    before = list(ladders)
    monkeypatch.setattr(SearchTables, "faster_without_limit", lambda self, m, most: True)
    monkeypatch.setattr(explore, "faster_without_limit", lambda *asked: True)
    assert plan.prediction.step_s <= planned(graph, mib).prediction.step_s * (1 + 1e-3)
    assert before or mib > min(TIGHT)
