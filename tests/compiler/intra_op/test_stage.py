"""The stage's own solver: what it finds beside the choices of the cost tables."""

from __future__ import annotations

import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.intra_op import stage
from meshwright.compiler.search.driver import make_plan
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.request import PlanRequest
from meshwright.costmodel.cluster import Cluster
from meshwright.models import GPT


def test_a_large_stage_does_without_messages_that_are_dearer_than_its_problem_knows(monkeypatch):
    resharded, seen = stage._Stage._resharded, []

    def noted(self, chosen, free, kind):
        moved = resharded(self, chosen, free, kind)
        seen.append((self, chosen, free, kind, moved))
        return moved

    def seconds() -> float:
        request = PlanRequest(64, microbatches=1, strategy=parse_strategy("dp16"), alternatives=False)
        return make_plan(graph, Cluster.parse("8x4090:2"), request).prediction.step_s

    with torch.device("meta"):
        tokens = torch.zeros(64, 64, dtype=torch.int64)
        graph = capture(GPT(1024, layers=2, hidden=1024, heads=8, sequence=64, tied=False), (tokens, tokens))
    monkeypatch.setattr(stage, "FREE_SOLVE_OPERATORS", 10)
    monkeypatch.setattr(stage, "LARGE_STAGE_OPERATORS", 10)
    monkeypatch.setattr(stage._Stage, "_resharded", noted)
    found = seconds()
    monkeypatch.setattr(stage._Stage, "_resharded", lambda *_: None)
    assert found < seconds() * (1 - 1e-3)

    for self, (section, picks), free, kind, moved in seen:
        rows = zip(section.kinds, section.names, section.choices, picks)
        before = {(what, name): choices[pick] for what, name, choices, pick in rows}
        for what, name, choices, pick in zip(free.kinds, free.names, free.choices, moved):
            was, now = before[what, name], choices[pick]
            if was != now:  # a parameter that lies the same, without the message
                assert self._sends(was, kind)
                assert not self._sends(now, kind)
                assert was.compute == now.compute
