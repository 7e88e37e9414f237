"""Schedules as a decision of the search: every family by name, the best of all by itself, and what is proven."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.pipeline.families import generate, known_schedules
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.compiler.pipeline.stage_dp import bound_of
from meshwright.compiler.pipeline.table import LagrangianBound, LowerBounds, StageConstraints
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.plan.validation import validate
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.search.driver import simplest_index
from meshwright.compiler.search.space import SCHEDULES, Space
from meshwright.compiler.search.state import TIE_TOLERANCE
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.memory import FRAMEWORK_BYTES

from tests.oracles.pipelines import every_pipeline, messages, over_the_limit
from tests.support.pipeline_tables import random_table, with_slow_messages
from tests.support.planning import make_plan
from tests.support.random_instances import with_memory
from tests.support.zoo import ZOO

BATCH = 16
WISH = "stages = 4; microbatches = 8"


@pytest.fixture(scope="module")
def graph():
    return capture(*ZOO["gpt"](BATCH, device="meta", layers=4, tied=False))


@pytest.fixture(scope="module")
def cluster():
    """Four devices of a machine, so slow that a small model keeps them busy: what idles is a pipeline's bubble."""
    whole = Cluster.preset("p3.16xlarge")
    host = whole.hosts[0]
    slow = tuple((name, rate / 1000) for name, rate in host.device.flops_per_s)
    device = replace(host.device, flops_per_s=slow, launch_s=0.0)
    return replace(whole, hosts=(replace(host, num_devices=4, device=device),))


def planned(graph, cluster, schedule, wish=WISH):
    return make_plan(graph, cluster, BATCH, space=Space.asked(schedule), constraints=wish)


@pytest.fixture(scope="module")
def by_name(graph, cluster):
    return {name: planned(graph, cluster, name) for name in known_schedules()}


@pytest.mark.parametrize("schedule", known_schedules())
def test_every_family_gives_a_plan_by_name(graph, cluster, by_name, schedule, tmp_path):
    plan = by_name[schedule]
    assert plan.schedule == schedule
    assert plan.num_chunks == {"zb-v": 2}.get(schedule, plan.num_chunks if schedule == "interleaved" else 1)
    assert plan.num_chunks > 1 or schedule not in ("interleaved", "zb-v")
    assert 0 < plan.prediction.bound_s <= plan.prediction.step_s
    assert plan.check() == []
    assert validate(plan, graph) == []
    assert not any("memory of stage" in note for note in plan.prediction.notes)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    again = reprice(plan, graph, cluster)
    assert again.prediction.step_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    for one, other in zip(again.prediction.stages, plan.prediction.stages, strict=True):
        assert one.memory_bytes == pytest.approx(other.memory_bytes)
    assert f"Schedule: {schedule}" in plan.explain()
    assert not any(line.startswith("schedule") for line in plan.not_executable())


def test_the_best_of_all_is_no_slower_than_any(graph, cluster, by_name):
    plan = planned(graph, cluster, "auto")
    steps = {name: by_name[name].prediction.step_s for name in SCHEDULES}  # those that optimise the same
    assert plan.prediction.step_s <= min(steps.values()) * (1 + TIE_TOLERANCE)
    assert plan.schedule != "1f1b"
    assert plan.prediction.step_s < 0.95 * steps["1f1b"]
    assert plan.prediction.bound_s <= min(steps.values())
    assert plan.provenance["passes"]["regular"] > 0


def test_what_runs_is_all_that_executable_plans_search(graph, cluster):
    assert Space.executable().schedules == SCHEDULES
    space = replace(Space.executable(), sequence=False)
    plan = make_plan(graph, cluster, BATCH, space=space, constraints=WISH)
    assert not any(line.startswith("schedule") for line in plan.not_executable())


@pytest.mark.parametrize("share", [1.0, 1.25])
def test_memory_decides_among_schedules(graph, cluster, by_name, share):
    """Under a limit that ends some families, what is left is taken, and fits."""
    framework = FRAMEWORK_BYTES[cluster.device(0).kind]
    held = max(stage.peak_bytes for stage in by_name["1f1b"].prediction.stages) - framework
    small = with_memory(cluster, int(framework + share * held))
    steps = {}
    for name in ("1f1b", "interleaved", "zb-v", "auto"):
        try:
            plan = planned(graph, small, name, f"{WISH}; no recompute; no zero")
        except InfeasibleError:
            continue
        steps[name] = plan.prediction.step_s
        assert max(stage.peak_bytes for stage in plan.prediction.stages) <= framework + share * held
    assert set(steps) == ({"1f1b", "auto"} if share == 1.0 else {"1f1b", "interleaved", "zb-v", "auto"})
    assert steps["auto"] <= min(steps.values()) * (1 + TIE_TOLERANCE)


def test_one_that_no_stages_have_room_for_is_refused_with_what_does(graph, cluster):
    with pytest.raises(InfeasibleError, match=r"schedule interleaved fits .*, but got one under 1f1b"):
        planned(graph, cluster, "interleaved", "stages = 1")
    with pytest.raises(ValueError, match="schedule is auto or one of gpipe, 1f1b,"):
        Space.asked("dualpipe")


def test_of_equally_fast_ones_the_simplest_is_taken():
    assert {*SCHEDULES, "pipedream"} == set(known_schedules())
    assert simplest_index(["zb-v", "1f1b", "gpipe"], [1.0, 1.0005, 1.0]) == 1
    assert simplest_index(["zb-v", "1f1b", "gpipe"], [1.0, 1.01, 1.0]) == 2
    assert simplest_index(["zb-v", "1f1b"], [1.0, 1.01]) == 0


def split_case(seed):
    """(table, m, [options, L, L + 1] seconds of forwards and of gradients of weights, the fastest makespan under
    zb-h1)."""
    rng = np.random.default_rng(seed)
    layers, devices, m = int(rng.integers(2, 6)), int(rng.integers(2, 6)), int(rng.integers(1, 12))
    table = random_table(rng, layers, devices, int(rng.integers(1, 3)), 2, m)
    table = with_slow_messages(table) if seed % 4 == 3 else table
    forward, weight = (table.pace_s * rng.uniform(0.1, 0.5, table.pace_s.shape) for _ in range(2))
    fastest = inf
    for stages in every_pipeline(table, StageConstraints()):
        if over_the_limit(table, stages, "zb-h1", m) <= 0:
            at = [(one.option, one.first_layer, one.end_layer) for one in stages]
            there, again = messages(table, at)
            parts = [(forward[one], table.pace_s[one] - forward[one], table.step_s[one], weight[one]) for one in at]
            ahead, back, step, weights = zip(*parts)
            made = generate("zb-h1", len(at), m)
            run = simulate(made, ahead, back, there or None, step, again or None, weights)
            fastest = min(fastest, run.makespan_s)
    return table, m, forward, weight, fastest


def split_bound(table, m, forward, weight):
    """The bound by floors of the pace and of the way there and back, at prices of a byte and at none."""
    floors = table.floors
    possible = np.isfinite(table.pace_s)
    parts = [np.where(possible, part, 0.0) for part in (forward, weight)]
    backward, trip = (np.where(possible, table.pace_s - part, inf) for part in parts)

    def least(values):
        return values.reshape(len(floors.options), -1, *table.pace_s.shape[1:]).min(axis=1)

    rows = [row for row in floors.rows if not row.trip]
    for byte, saved_byte in ((0.0, 0.0), (0.5, 0.5), (1.0, 6.0)):
        value = trip + byte * table.resident + saved_byte * table.saved
        rows.append(LagrangianBound(byte, saved_byte, least(value), trip=True))
    floors = LowerBounds(
        floors.options, floors.pace_s, transfer_s=floors.transfer_s, entry_s=floors.entry_s, forward_s=least(forward),
        backward_s=least(backward), rows=tuple(rows),
    )  # fmt: skip
    return bound_of(floors, table.num_devices, m, "zb-h1", StageConstraints(), 1e6, 2)


@pytest.mark.parametrize("seed", range(40))
def test_split_backwards_are_bounded_by_the_way_there_and_back(seed):
    table, m, forward, weight, fastest = split_case(seed)
    assert split_bound(table, m, forward, weight) <= fastest * (1 + 1e-9)


def test_a_share_of_weights_that_is_too_small_is_no_bound():
    cases = [split_case(seed) for seed in range(40)]
    known = [case for case in cases if case[-1] < inf]
    assert any(split_bound(table, m, forward, 0.3 * weight) > fastest for table, m, forward, weight, fastest in known)
    # and the bounds are worth having: far above the slowest stage alone
    ratios = [split_bound(table, m, forward, weight) / fastest for table, m, forward, weight, fastest in known]
    assert np.median(ratios) > 0.85
