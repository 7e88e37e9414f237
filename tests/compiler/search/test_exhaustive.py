"""The search against every plan document of tiny random instances (``benchmarks/bruteforce.py`` takes hundreds)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search.space import SCHEDULES

from tests.oracles.exhaustive import Exhaustive
from tests.oracles.plan_difference import difference
from tests.oracles.stage_documents import StageDocuments
from tests.oracles.verdict import judge
from tests.support.planning import make_plan
from tests.support.random_instances import chunked_case, random_case

MOST_DEVICES = 3
SEEDS = range(20)
CHUNKED_SEEDS = (0, 3, 5, 8)


def _plan_of(graph, cluster, global_batch, space):
    return make_plan(graph, cluster, global_batch, space=space)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_document_is_below_the_bound_or_better_than_the_plan_and_its_gap(seed):
    verdict = judge(random_case(seed, MOST_DEVICES), _plan_of)
    assert not verdict.problems, verdict.case + "\n" + "\n".join(verdict.problems)


@pytest.mark.parametrize("seed", [27, 42, 168, 258, 481])
def test_plans_are_found_where_memory_is_scarce(seed):
    """Weights that layers share count once; a limit that a step's batch exceeds has a price; estimates may be high."""
    verdict = judge(random_case(seed), _plan_of)
    assert not verdict.problems, verdict.case + "\n" + "\n".join(verdict.problems)


@pytest.mark.parametrize("seed", [3, 8, 18, 20, 24, 54, 61, 267, 333])
def test_no_document_is_faster_where_tables_are_rough(seed):
    """Reductions that fill no bucket (8, 24), pipelines that tables find too slow (3, 20, 54, 333) or too large."""
    verdict = judge(random_case(seed), _plan_of)
    assert verdict.equal, f"{verdict.case}: {verdict.ours_s} s, but a document takes {verdict.best_s} s"


@pytest.mark.parametrize("seed", [72, 113])
def test_no_document_is_faster_where_estimates_rank_the_memory_of_choices_wrongly(seed):
    """Choices that are equally fast (72) or a little slower (113) hold less than the one with the lowest estimate."""
    verdict = judge(random_case(seed), _plan_of)
    assert verdict.equal, f"{verdict.case}: {verdict.ours_s} s, but a document takes {verdict.best_s} s"


@pytest.mark.parametrize("seed", CHUNKED_SEEDS)
def test_no_document_of_several_chunks_is_below_the_bound_or_better_than_the_plan_and_its_gap(seed):
    verdict = judge(chunked_case(seed), _plan_of)
    assert not verdict.problems, verdict.case + "\n" + "\n".join(verdict.problems)


def test_divisions_that_tables_think_too_large_are_tried_where_nothing_else_fits():
    case = chunked_case(52)
    assert case.memory is not None
    verdict = judge(replace(case, memory=1.02 * case.memory), _plan_of)
    assert verdict.ours_s
    assert not verdict.problems, "\n".join(verdict.problems)


@pytest.mark.parametrize("seed", [0, 9])
def test_documents_of_several_chunks_cost_what_reprice_says(seed):
    case = chunked_case(seed)
    space = replace(case.space, schedules=SCHEDULES)
    exhaustive = Exhaustive(capture(case.model, case.inputs), case.cluster, case.global_batch, space, limited=True)
    draw = random.Random(seed)
    for schedule in ("interleaved", "zb-v", "zb-h1"):
        pipelines = [one for one in exhaustive.pipelines(schedule) if len(one) > 1]
        for pipeline in draw.sample(pipelines, min(2, len(pipelines))):
            parts = [exhaustive.parts(4, schedule, layers, mesh) for layers, mesh, _ in pipeline]
            exhaustive.priced(4, schedule, pipeline, [draw.choice(some) for some in parts])


@pytest.mark.parametrize("seed", [2, 30])
def test_other_families_are_looked_at_where_the_guide_is_far_from_its_best(seed):
    """Chunks with a count for which the guide has nothing (2); ZB-H1 where reductions fill no bucket (30)."""
    verdict = judge(chunked_case(seed), _plan_of)
    assert verdict.equal, f"{verdict.case}: {verdict.ours_s} s, but a document takes {verdict.best_s} s"


@pytest.mark.parametrize("seed", [3, 12, 13, 16, 20])
def test_documents_cost_what_reprice_says(seed):
    case = random_case(seed, MOST_DEVICES)
    exhaustive = Exhaustive(capture(case.model, case.inputs), case.cluster, case.global_batch, case.space, limited=True)
    draw = random.Random(seed)
    pipelines = list(exhaustive.pipelines())
    for pipeline in draw.sample(pipelines, min(6, len(pipelines))):
        m = draw.choice(list(exhaustive.graphs))
        stages = [exhaustive.parts(m, "1f1b", layers, mesh) for layers, mesh, _ in pipeline]
        if all(stages):
            exhaustive.priced(m, "1f1b", pipeline, [draw.choice(parts) for parts in stages])


@pytest.mark.parametrize("seed", [4, 27, 32, 49])
def test_what_others_undercut_is_left_out_at_no_loss(seed, monkeypatch):
    case = random_case(seed, 2)
    graph = capture(case.model, case.inputs)
    pruned = Exhaustive(graph, case.cluster, case.global_batch, case.space).best()
    monkeypatch.setattr(StageDocuments, "prune", lambda self: None)
    whole = Exhaustive(graph, case.cluster, case.global_batch, case.space).best()
    assert whole.documents > pruned.documents
    assert whole.step_s == pytest.approx(pruned.step_s, rel=1e-12)


def test_a_difference_names_what_two_plans_do_differently():
    case = random_case(15, 2, wide=False)
    plan = _plan_of(capture(case.model, case.inputs), case.cluster, case.global_batch, case.space)
    data = plan.to_json()
    data["microbatches"] = 1 if plan.microbatches > 1 else 2
    assert difference(plan, plan) == ""
    assert "microbatches" in difference(plan, Plan.from_json(data))
