"""A few of the random graphs of ``benchmarks/random_graphs.py``, which trains hundreds."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import pytest

from tests.support.random_graphs import OPS, RandomGraph, graph_case, losses_of, one_device

CASES = (3, 4, 58, 183)  # the last two read a batch norm only for its running statistics


def test_each_op_is_drawn() -> None:
    assert {name for seed in range(60) for name, *_ in RandomGraph(seed).ops} == set(OPS)


@pytest.mark.ranks
@pytest.mark.parametrize("seed", CASES)
def test_a_random_graph_trains_like_on_one_device(ranks: Any, seed: int) -> None:
    case, expected = graph_case(seed), one_device(seed)
    plan = mw.plan(case.model, mw.Cluster.local(2), example_inputs=case.batch(0), executable=True, **case.wishes)
    found = mw.verify(plan, case.model, example_inputs=case.batch(0))
    assert found.ok, f"{case.model.text}\n{found}"
    for losses in ranks.run(2, losses_of, seed):
        assert losses == pytest.approx(expected, rel=1e-9), case.model.text
