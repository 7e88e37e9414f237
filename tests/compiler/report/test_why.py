"""Why a plan has its choices: min-marginals against forced plans, layers, weights, refusals."""

from __future__ import annotations

import json

import meshwright as mw
import numpy as np
import pytest
from meshwright.compiler.intra_op.solver.problem import Edge, Operator, Problem, evaluate
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.report.why import _min_marginals
from meshwright.compiler.search.space import Space
from meshwright.costmodel.cluster import Cluster

from tests.support import zoo
from tests.support.planning import make_plan

UP = "blocks.0.feed_forward.up"


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, args, _ = zoo.gpt(layers=2)
    return mw.plan(model, Cluster.local(2), example_inputs=args, global_batch=16, strategy="dp2", executable=True)


def test_marginals_are_the_best_assignments_with_each_choice() -> None:
    random = np.random.default_rng(0)
    sizes = [3, 2, 4]
    operators = tuple(
        Operator(str(k), tuple(map(str, range(n))), random.random(n), random.random(n)) for k, n in enumerate(sizes)
    )
    edges = tuple(
        Edge(f"{a}{b}", a, np.arange(sizes[a]), ((b, np.arange(sizes[b])),), *random.random((2, sizes[a], sizes[b])))
        for a, b in ((0, 1), (1, 2))
    )
    problem = Problem(operators, edges)
    found = _min_marginals(problem, 1)
    for choice, (seconds, assignment) in enumerate(found):
        every = [evaluate(problem, (a, choice, c))[0] for a in range(3) for c in range(4)]
        assert seconds == pytest.approx(min(every))
        assert assignment is not None
        assert evaluate(problem, assignment)[0] == pytest.approx(seconds)


def test_an_op_a_module_and_a_layer_have_one_chosen_row_per_subject(plan: Plan) -> None:
    for name in (UP, "linear_4", f"{UP}.weight", "blocks.0.feed_forward", "blocks.0"):
        answer = plan.why(name)
        assert answer.stage == 0
        subjects = {row.subject for row in answer.rows}
        for subject in subjects:
            rows = answer.of(subject)
            assert [row.chosen for row in rows] == [True] + [False] * (len(rows) - 1), (name, subject)
            assert rows[0].seconds == rows[0].bytes == 0.0
            assert [row.seconds for row in rows[1:]] == sorted(row.seconds for row in rows[1:])
        assert "chosen" in str(answer)


def test_recompute_costs_seconds_and_saves_bytes(plan: Plan) -> None:
    rows = {row.label: row for row in plan.why("blocks.0.feed_forward").of("recompute of blocks.0.feed_forward")}
    assert rows["none"].chosen
    assert 0 < rows["selective"].seconds < rows["full"].seconds
    assert rows["full"].bytes < rows["selective"].bytes < 0


def test_a_runner_up_costs_what_the_plan_that_is_forced_to_it_takes_more(plan: Plan) -> None:
    row = next(r for r in plan.why(UP).rows if r.label == "o")
    forced = make_plan(
        plan.graph,  # type: ignore[arg-type]
        Cluster.from_json(json.dumps(plan.cluster)),
        16,
        plan.microbatches,
        space=Space.executable(),
        constraints=[f"split {UP} by o", "stages = 1"],
    )
    assert row.seconds > 0
    assert forced.prediction.step_s - plan.prediction.step_s <= row.seconds * 1.05 + 1e-9


def test_a_loaded_plan_asks_for_its_graph_and_answers_alike(plan: Plan) -> None:
    loaded = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert loaded == plan
    with pytest.raises(ValueError, match="got no graph="):
        loaded.why(UP)
    assert loaded.why(UP, plan.graph) == plan.why(UP)
    other, args, _ = zoo.mlp()
    with pytest.raises(ValueError, match="the model that the plan is for"):
        loaded.why(UP, mw.plan(other, "local:1", example_inputs=args).graph)


def test_unknown_names_are_refused_with_near_ones(plan: Plan) -> None:
    with pytest.raises(ValueError, match=r"but got 'blocks.0.feedforward.up'; use one like blocks.0.feed_forward.up"):
        plan.why("blocks.0.feedforward.up")
