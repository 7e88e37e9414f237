"""The bound of a search is the least of what can be proven of all families and counts, however lazily it is found."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.search import optimality
from meshwright.compiler.search.driver import start_search
from meshwright.compiler.search.explore import find_candidates
from meshwright.compiler.search.space import Space
from meshwright.models import GPT

from tests.support.clusters import limited
from tests.support.planning import make_plan, request_of

PLENTY = 16384  # MiB


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model, tokens = GPT(vocab=512, layers=4, hidden=1024, heads=8, sequence=64), torch.zeros(16, 64).long()
    return capture(model, (tokens, tokens))


def bound_s(graph: Graph, mib: float, space: Space, **asked: object) -> float:
    plan = make_plan(graph, limited(mib), 64, alternatives=False, space=space, **asked)
    return plan.prediction.bound_s


@pytest.mark.parametrize("mib", [150, 300, PLENTY])
@pytest.mark.parametrize("schedules", ["auto", "1f1b", "zb-h1"])
def test_nothing_is_lost_by_lifting_only_what_is_least(graph, monkeypatch, mib, schedules):
    space = Space.asked(schedules)
    lazily = bound_s(graph, mib, space)
    lifted = []

    def everything(search, most_s):
        others = optimality._others(search)
        for m in search.tables.counts:
            if others:
                optimality._lift(search, m, partial(optimality._quickly, search, m, others), True, most_s)
            for name in space.schedules:
                optimality._lift_closely(search, m, name, most_s)
                lifted.append((m, name))

    monkeypatch.setattr(optimality, "_lift_least", everything)
    whole = bound_s(graph, mib, space)
    assert len(lifted) >= len(space.schedules)
    assert lazily == pytest.approx(whole, rel=1e-4)


def test_a_fork_proves_as_much(graph):
    alone, beside = (bound_s(graph, PLENTY, Space.whole(), workers=workers) for workers in (1, 2))
    assert beside == pytest.approx(alone, rel=1e-4)


def test_what_is_proven_far_enough_is_not_proven_again(graph, monkeypatch):
    proofs, lift = [], optimality._lift_least
    monkeypatch.setattr(optimality, "_lift_least", lambda search, most_s: (proofs.append(most_s), lift(search, most_s)))
    monkeypatch.setattr(optimality.ForkedTask, "_fork", lambda self: False)  # all in this process
    plan = make_plan(graph, limited(PLENTY), 64, alternatives=False, space=Space.whole(), workers=2)
    assert len(proofs) == 1
    assert proofs[0] <= plan.prediction.step_s * 1.1


def test_what_was_proven_outlives_another_look(graph):
    """Where nothing that was found fits, the search looks again, and begins with its bounds anew."""
    search = start_search(graph, limited(PLENTY), request_of(64, space=Space.whole()), 0.0, lambda *_: None)
    _, found = find_candidates(search)
    optimality.start_proof(search, found[0].clock_s)
    proven = dict(search.bounds)
    assert search.bound_s > 0.5 * found[0].clock_s
    search.bounds.update(dict.fromkeys(search.bounds, 0.0))
    assert optimality.with_bounds(search, []) == []
    assert search.bounds == proven
