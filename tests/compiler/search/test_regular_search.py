"""The search for regular plans: nothing is lost by looking at the best first, its clock is the simulation's, and its
plans fit."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from math import inf, prod

import pytest
import torch
from meshwright.compiler.errors import InfeasibleError, OverfullError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import cluster_layers
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.ir.spec import R, S
from meshwright.compiler.pipeline.regular import PipelineCase
from meshwright.compiler.search import regular
from meshwright.compiler.search.build_plan import build_plan, estimated_bytes, stage_limits
from meshwright.compiler.search.driver import start_search, without_gc
from meshwright.compiler.search.irregular import IrregularSearch
from meshwright.compiler.search.lower_bounds import SearchBounds
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.predict import Holder, least_tied_seconds, tied_seconds
from meshwright.compiler.search.regular import BETWEEN, DIVIDED_AGAIN, RegularSearch
from meshwright.compiler.search.space import CHUNKED, Space
from meshwright.compiler.search.state import SearchState
from meshwright.compiler.search.tables import BOUND_TOLERANCE
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.memory import FRAMEWORK_BYTES, usable_bytes
from meshwright.models import GPT

from tests.support.clusters import limited
from tests.support.graphs import graph_of
from tests.support.planning import make_plan, request_of
from tests.support.random_instances import with_memory

PLENTY = 16384  # MiB
TIGHT = (
    150,
    300,
)  # MiB; at 120 a search takes minutes (known fault). Of 972 that the model takes with everything replicated


def gpt(batch: int = 16, **options: object) -> Graph:
    with torch.device("meta"):
        model = GPT(**{"vocab": 512, "layers": 4, "hidden": 1024, "heads": 8, "sequence": 64, **options})
        tokens = torch.zeros(batch, 64, dtype=torch.int64)
    return capture(model, (tokens, tokens))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return gpt()


def begun(graph: Graph, cluster: Cluster, schedule: str = "auto", **words: object) -> SearchState:
    return start_search(graph, cluster, request_of(64, space=Space.asked(schedule), **words), 0.0, lambda *_: None)


def solved_cases(search: RegularSearch) -> list[tuple[float, float, PipelineCase]]:
    """(bound, clock, case) of every pipeline that the search finds on its way to the best 30."""
    solve, seen = search._solve, []

    def noted(waiting, *more):
        found = solve(waiting, *more)
        seen.extend((waiting.bound_s, one.clock_s, waiting.case) for one in found)
        return found

    search._solve = noted
    search.explore(inf, 30)
    return seen


# ---- best first


@pytest.mark.parametrize("mib", [150, 300, PLENTY])
@pytest.mark.parametrize("schedule", ["auto", "1f1b", "zb-h1"])
def test_nothing_is_lost_by_solving_the_best_cases_first(graph, mib, schedule, monkeypatch):
    search = begun(graph, limited(mib), schedule, microbatches=8)
    lazily = RegularSearch(search)
    first, *_ = lazily.explore(inf)
    monkeypatch.setattr(regular, "MAX_CANDIDATES", 10**6)
    whole = RegularSearch(search)
    every = whole.explore(inf, 10**6)
    assert all(one.bound_s == inf for one in whole._queue)  # all cases were solved
    assert len(lazily._solved) < len(whole._solved)
    assert first.clock_s <= every[0].clock_s * (1 + 2 * BOUND_TOLERANCE)
    assert lazily.bound_s() <= every[0].clock_s * (1 + 1e-9)
    assert lazily.bound_s() <= first.clock_s


@pytest.mark.parametrize(
    ("mib", "microbatches"),
    [
        pytest.param(
            120, 8, marks=pytest.mark.xfail(reason="known fault: bounds where memory is scarcest", strict=True)
        ),
        (300, 8),
        (150, 32),
    ],
)
def test_bounds_of_cases_are_below_their_clocks(graph, mib, microbatches):
    search = RegularSearch(begun(graph, limited(mib), microbatches=microbatches))
    seen = solved_cases(search)
    assert len(seen) >= (25 if microbatches == 32 else 30)
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for low, clock_s, case in seen:
        several = case.chunks > 1  # the divisions that are found when these are solved are no better here
        ratios[several].append(low / (1 - DIVIDED_AGAIN * several) / clock_s)
    assert max(map(max, ratios.values())) <= 1 + 1e-9
    if microbatches == 32:  # 1.5 % more would be seen
        assert min(map(max, ratios.values())) > 0.985


def test_what_was_solved_is_not_solved_again(graph):
    search = RegularSearch(begun(graph, limited(PLENTY), microbatches=8))
    first, *_ = search.explore(inf)
    solved = list(search._solved)
    assert search.explore(first.clock_s) == []
    assert search._solved == solved


# ---- memory multipliers


def test_where_memory_is_plenty_nothing_has_a_price(graph, monkeypatch):
    plan = make_plan(graph, limited(PLENTY), 64, 8, space=Space.whole())
    monkeypatch.setattr(SearchBounds, "fits_unconstrained", lambda self, m: False)
    priced = make_plan(graph, limited(PLENTY), 64, 8, space=Space.whole())
    assert plan.prediction.step_s <= priced.prediction.step_s * (1 + 1e-3)


@pytest.mark.parametrize("mib", TIGHT)
def test_more_prices_of_memory_find_little(graph, monkeypatch, mib):
    asked = {"space": Space.asked("1f1b"), "microbatches": 8}
    plan = make_plan(graph, limited(mib), 64, **asked)
    monkeypatch.setattr(regular, "FACTORS", tuple(2.0 ** (power / 2) for power in range(-14, 10)))
    finer = make_plan(graph, limited(mib), 64, **asked)
    assert plan.prediction.step_s <= finer.prediction.step_s * 1.01


def test_prices_between_those_of_the_search_lift_its_bound(graph, monkeypatch):
    def bound_and_clock() -> tuple[float, float]:
        search = RegularSearch(begun(graph, limited(150)))
        first, *_ = search.explore(inf)
        return search.bound_s(), first.clock_s

    closer_s, clock_s = bound_and_clock()
    monkeypatch.setattr(regular, "BETWEEN", ())
    bound_s, _ = bound_and_clock()
    assert bound_s * 1.005 < closer_s <= clock_s


def test_a_case_is_solved_again_at_prices_between_those_of_the_search(graph, monkeypatch):
    """As memory of plans is counted, a little less may fit: then the next price that was looked at may be far off."""
    search = RegularSearch(begun(graph, limited(150), microbatches=8))
    first, *_ = search.explore(inf)
    asked, table = list[int](), search._table
    monkeypatch.setattr(search, "_table", lambda waiting, levels: asked.extend(levels) or table(waiting, levels))
    missed = OverfullError("too much", beside=tuple((row.submesh.shape, row.row[1], 1.0) for row in first.rows))
    assert search.solved_again(first, missed)
    grid = {price for one in search._solved for price in search._grid(one.m, one.mesh)}
    known = {search.tables.level(m, *price) for m in {one.m for one in search._solved} for price in grid}
    assert len(set(asked) - known) >= len(BETWEEN) // 2


# ---- a plan holds what its devices have


@pytest.mark.parametrize("mib", TIGHT)
@pytest.mark.parametrize("wish", ["", "stages = 2", "no zero; no recompute"])
def test_no_plan_holds_more_than_its_devices_have(graph, mib, wish):
    cluster = limited(mib)
    try:
        plan = make_plan(graph, cluster, 64, 8, space=Space.whole(), constraints=wish or None)
    except InfeasibleError:
        assert wish == "no zero; no recompute"
        return
    usable = usable_bytes(cluster)
    for stage, price in zip(plan.stages, plan.prediction.stages):
        assert price.peak_bytes - price.memory_bytes["framework"] <= min(usable[device] for device in stage.devices)
    assert not any("memory of stage" in note for note in plan.prediction.notes)


def test_a_plan_that_fills_its_devices_fits_these_and_no_smaller_ones(graph):
    """The bytes that a plan holds are all that it needs: it is found again where there are just so many."""
    strategy = parse_strategy("dp8")
    words = {"strategy": strategy, "microbatches": 8}
    plan = make_plan(graph, limited(PLENTY), 64, **words)
    held = max(stage.peak_bytes for stage in plan.prediction.stages)
    cluster = with_memory(limited(PLENTY), int(held) + 1)
    again = make_plan(graph, cluster, 64, **words)
    assert again.prediction.step_s == pytest.approx(plan.prediction.step_s, rel=1e-2)
    framework = FRAMEWORK_BYTES[cluster.device(0).kind]
    with pytest.raises(InfeasibleError):
        make_plan(graph, with_memory(cluster, int(framework + 0.9 * (held - framework))), 64, **words)


# ---- a time limit


def test_a_time_limit_ends_the_search_with_a_plan_and_a_note(graph):
    begin = time.process_time()
    plan = make_plan(graph, limited(300), 64, space=Space.whole(), alternatives=True, time_limit_s=0.05)
    assert time.process_time() - begin < 10  # the first tables and one plan; the whole search takes several times that
    assert plan.check() == []
    assert plan.prediction.alternatives == ()
    assert any("the time limit passed" in note for note in plan.prediction.notes)
    assert 0 <= plan.prediction.bound_s <= plan.prediction.step_s


# ---- one clock


CLOCKED = [*product(["8x4090:2", "p3.16xlarge:2"], ["1f1b", "zb-h1", "interleaved", "zb-v"], [2, 4])]
CLOSE = {
    ("8x4090:2", "zb-v", 4), ("p3.16xlarge:2", "1f1b", 4), ("p3.16xlarge:2", "zb-h1", 4),
    ("p3.16xlarge:2", "interleaved", 2),
}  # fmt: skip
FAULT = pytest.mark.xfail(strict=True, reason="known fault: stages are solved anew after the clock: off by up to 5 %")


@pytest.mark.parametrize(
    ("cluster", "schedule", "stages"), [pytest.param(*one, marks=() if one in CLOSE else FAULT) for one in CLOCKED]
)
def test_the_clock_of_tied_weights_is_that_of_the_simulation(cluster, schedule, stages):
    graph = gpt(64, vocab=8192, hidden=512, tied=True)
    search = begun(graph, Cluster.parse(cluster), schedule, constraints=f"stages = {stages}", microbatches=8)
    most = 6 if schedule in CHUNKED else 3  # pipelines per mesh and count: up to 2, 1
    with without_gc():
        found = RegularSearch(search).explore(inf, most)[:most]
        steps = [build_plan(search, one).prediction.step_s for one in found]
    # plain values: the message of a failed assertion about a candidate takes half a minute
    cases = [(one.microbatches, one.rows[0].submesh.shape) for one in found]
    clocks, counts = [one.clock_s for one in found], {len(one.pipeline.peak_bytes) for one in found}
    assert len(cases) >= 2
    assert counts == {stages}
    for case, clock_s, step_s in zip(cases, clocks, steps):
        assert clock_s == pytest.approx(step_s, rel=0.02), case
    two = sorted(zip(steps, clocks))[:2]
    assert two[0][1] <= two[1][1] * (1 + 1e-9) or two[0][0] >= two[1][0] * (1 - 1e-3)


@pytest.mark.parametrize(("schedule", "stages", "mib"), [("zb-v", 4, 150), ("interleaved", 2, 140)])
def test_virtual_stages_are_built_within_the_memory_of_their_group(graph, schedule, stages, mib):
    """Each for the microbatches that it holds when its group holds most, and copied only to where it fits."""
    search = begun(graph, limited(mib), schedule, constraints=f"stages = {stages}", microbatches=16)
    with without_gc():
        plans = [build_plan(search, one) for one in RegularSearch(search).explore(inf)[:3]]
    assert plans
    for plan in plans:
        held = [estimated_bytes(stage) for stage in plan.prediction.stages]
        assert all(size <= limit for size, limit in zip(held, stage_limits(search, plan)))


def test_tied_weights_count_on_the_clock():
    """Copies in two stages send gradients and values: on a slow network the clock is slower than for untied weights."""
    clocks = {}
    for tied in (True, False):
        graph = gpt(64, vocab=8192, hidden=512, tied=tied)
        search = begun(graph, Cluster.parse("8x4090:2"), "1f1b", strategy=parse_strategy("pp2,dp8"), microbatches=8)
        first, *_ = RegularSearch(search).explore(inf)
        clocks[tied] = first.clock_s
    sent = 2 * 8192 * 512 * 4 / 8 / Cluster.parse("8x4090:2").link.bytes_per_s  # an eighth of it, there and back
    assert clocks[True] > clocks[False] + 0.5 * sent


@pytest.mark.parametrize("strategy", [None, "pp2,dp8", "pp4,dp2,tp2", "pp8,tp2"])
def test_bounds_know_what_tied_weights_cost(strategy):
    graph = gpt(64, vocab=8192, hidden=512, tied=True)
    words = {"strategy": parse_strategy(strategy)} if strategy else {}
    search = RegularSearch(begun(graph, Cluster.parse("8x4090:2"), **words, microbatches=8))
    seen = solved_cases(search)
    assert [one for one in seen if one[0] > one[1] * (1 + 1e-9)] == []
    several = [bound / clock for bound, clock, case in seen if case.schedule == "1f1b" and case.groups > 1]
    assert min(several) > 0.6


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 4)])
@pytest.mark.parametrize("offsets", [(0, 8), (0, 4), (4, 8)])
def test_no_exchange_of_a_tied_weight_takes_less_than_the_least(shape, offsets):
    cluster, size = Cluster.parse("8x4090:2"), prod(shape)
    graph = gpt(64, vocab=8192, hidden=512, tied=True)
    layering = cluster_layers(graph)
    ((node, _),) = layering.shared_weights(graph)
    placed = [tuple(one) for one in product((R, S(0), S(1)), repeat=len(shape))]
    devices = [range(offset, offset + size) for offset in offsets]
    name = node.meta["source"].name
    for two in product(placed, repeat=2):
        holders = [Holder(some, shape, {name: spec}) for some, spec in zip(devices, two)]
        pieces = max(prod(n for n, one in zip(shape, spec) if one.is_shard) for spec in two)
        seconds = tied_seconds(graph, cluster, "AdamW", layering.needs_grad, holders)
        least_s = least_tied_seconds(graph, cluster, node, pieces, *devices)
        assert 0 < least_s <= min(seconds), two


@pytest.mark.parametrize("strategy", ["dp8", "tp8", "pp2,dp4"])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_bounds_of_irregular_plans_know_what_ends_a_step(strategy, m):
    search = begun(
        graph_of("convnet"), Cluster.parse("8x4090:1"), "1f1b", strategy=parse_strategy(strategy), microbatches=m
    )
    irregular = IrregularSearch(search)
    step_s = min(build_plan(search, one).prediction.step_s for one in irregular.candidates(1e3)[:3])
    bound_s = irregular._bound(m, "1f1b", 1.2 * step_s)
    assert 0.93 * step_s <= bound_s <= step_s * (1 + 1e-9)


# ---- mixed hosts


def test_a_mesh_is_bounded_by_its_fastest_devices():
    """Groups of one shape on hosts of unlike devices: the bound is of those that are fastest."""
    slow = Cluster.preset("p3.16xlarge", 1)
    graph = gpt(64, vocab=2048, hidden=512)
    fast = Cluster.preset("dgx-a100-80", 1)
    for hosts in ((slow.hosts[0], fast.hosts[0]), (fast.hosts[0], slow.hosts[0])):
        cluster = replace(slow, name="mixed", hosts=tuple(replace(host, num_devices=2) for host in hosts))
        search = RegularSearch(begun(graph, cluster, microbatches=8))
        found = search.explore(inf)
        assert search.bound_s() <= found[0].clock_s
        for schedule in ("1f1b", "zb-v"):
            space = Space.asked(schedule)
            plan = make_plan(graph, cluster, 64, 8, space=space)
            assert search.bound_s() <= plan.prediction.step_s * (1 + 1e-9)


@pytest.mark.parametrize("strategy", ["pp2,dp4", "pp4,tp2", "pp2,dp2,tp2"])
@pytest.mark.parametrize("model", ["gpt", "moe", "t5", "convnet"])
def test_no_stage_is_faster_forward_or_backward_than_its_layers_at_the_least(model, strategy):
    """The seconds before the first and between the first two actions of a stage are in the bounds on pipelines."""
    search = begun(graph_of(model), Cluster.parse("8x4090:2"), "1f1b", strategy=parse_strategy(strategy))
    regular_search = RegularSearch(search)
    ratios = []
    for one in regular_search.explore(inf, 3)[:3]:
        plan = build_plan(search, one)
        phases = regular_search.tables.least_phases(one.rows[0].submesh, one.microbatches)
        for stage, price in zip(one.pipeline.stages, plan.prediction.stages):
            least = phases[:, stage.first_layer, stage.end_layer]
            ratios += [least[0] / price.forward_s, least[1] / price.backward_s]
    assert 0.5 < max(ratios) <= 1 + 1e-9
