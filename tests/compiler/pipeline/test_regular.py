"""Regular pipelines: against every one of small tables, on the clock; their places, and what is proven of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest
from meshwright.compiler.pipeline import regular_solver
from meshwright.compiler.pipeline.bounds import clock_seconds
from meshwright.compiler.pipeline.families import generate, in_flight_formula, is_split, virtual_order
from meshwright.compiler.pipeline.recurrence import fill_share
from meshwright.compiler.pipeline.regular import (
    MeshTable,
    PipelineCase,
    groups_that_fit,
    in_flight_by_chunk,
    places,
    representative_microbatches,
)
from meshwright.compiler.pipeline.regular_bounds import case_bounds, mesh_bound
from meshwright.compiler.pipeline.regular_solver import _even, _Solver, close_bound, played_bound, solve_case
from meshwright.compiler.pipeline.schedule import in_flight
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.compiler.pipeline.table import Pipeline, PipelineTable, StageConstraints, StageOption
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.space import forced_submeshes, stays_inside
from meshwright.costmodel.cluster import Cluster

from tests.support.mesh_tables import (
    Cells,
    Order,
    Regular,
    at_places,
    case_of,
    clock,
    every_regular,
    mesh_table,
    peaks,
)

CHUNKED = [("interleaved", 2), ("interleaved", 3), ("zb-v", 2)]
SINGLE = ["1f1b", "gpipe", "zb-h1", "eager-1f1b"]
SEEDS = range(24)
EPS = 1e-9


# ---- what is in flight


@pytest.mark.parametrize(("schedule", "v"), CHUNKED)
def test_few_microbatches_show_all_that_many_hold(schedule, v):
    for p in (1, 2, 3, 4):
        for m in (1, 2, p, 2 * p + 1, 6 * p + 1, 9 * p + 2, p * p * 3):
            rows = generate(schedule, p, m, v).actions
            for k, (row, seen) in enumerate(zip(rows, in_flight_by_chunk(schedule, p, m, v))):
                weights = np.random.default_rng(p + m + k).random((8, v))
                now, most = np.zeros(v), np.zeros(8)
                for action in row:
                    now[action.chunk] += {"F": 1, "I": 0}.get(action.kind, -1)
                    most = np.maximum(most, weights @ now)
                assert (seen @ weights.T).max(axis=0) == pytest.approx(most)
                assert seen.sum(axis=1).max() == in_flight(generate(schedule, p, m, v))[k]
                assert any((times >= 1).all() for times in seen)  # ``mesh_bound`` counts on one of each chunk


@pytest.mark.parametrize(("schedule", "v"), CHUNKED)
def test_few_microbatches_show_every_moment_of_many(schedule, v):
    """What a stage does, what comes next, what is in flight, whether there are gradients, and what is over."""

    def moments(row):
        flying, backwards = [0] * v, [0] * v
        last = {action.chunk: at for at, action in enumerate(row) if action.kind != "F"}
        for at, action in enumerate(row):
            following = [(one.kind, one.chunk) for one in row[at + 1 : at + 2]]
            gradients = tuple(map(bool, backwards))
            yield action.kind, action.chunk, at == last[action.chunk], tuple(following), tuple(flying), gradients
            flying[action.chunk] += {"F": 1, "I": 0}.get(action.kind, -1)
            backwards[action.chunk] += action.kind in "BW"

    for p in (1, 2, 3, 5):
        for m in (1, 2 * p, 2 * p + 1, 6 * p + 1, 9 * p + 2):
            few = representative_microbatches(schedule, p, m)
            for some, every in zip(generate(schedule, p, few, v).actions, generate(schedule, p, m, v).actions):
                assert {*moments(some)} == {*moments(every)}


# ---- places


def _lying(cluster: str, strategy: str) -> tuple[Cluster, MeshTable]:
    """A mesh's groups on a cluster; a message inside a host takes a second, another one 10 ahead and 20 back."""
    machines = Cluster.parse(cluster)
    sites = forced_submeshes(machines, parse_strategy(strategy), None)
    size = sites[0].num_devices
    at = places([site.offsets for site in sites], size)
    near = [stays_inside(machines, site) for site in sites]
    zero, one = np.zeros((len(sites), 4, 5)), np.ones((1, 4, 5))
    entry, transfer = (
        np.concatenate([one if inside[side] else seconds * one for inside in near])
        for side, seconds in ((0, 10), (1, 20))
    )
    options = tuple(StageOption(size, site.offsets, (inf,) * len(site.offsets)) for site in sites)
    table = PipelineTable(4, machines.num_devices, options, zero, transfer, zero, zero, zero, zero, entry)
    none, flat = np.zeros(0), np.zeros((4, 5))
    hosts = [machines.host_of(offset) for offset, _ in at]
    return machines, MeshTable(
        table, len(sites), flat, np.zeros((0, 4, 5)), none, none, flat, flat, flat, flat, near, hosts
    )


@pytest.mark.parametrize(
    ("cluster", "strategy", "offsets"),
    [
        ("p3.16xlarge:2", "dp4", [0, 4, 8, 12]),
        ("p3.16xlarge:2", "tp2", [0, 2, 4, 6, 8, 10, 12, 14]),
        ("p3.16xlarge:2", "dp3", [0, 3, 8, 11]),
        ("p3.16xlarge:2", "dp5", [0, 8]),
        ("p3.16xlarge:4", "dp2,tp8", [0, 16]),
        ("p3.16xlarge:2", "dp1", list(range(16))),
        ("p3.16xlarge", "dp3", [0, 3]),
    ],
)
def test_groups_lie_in_a_host_as_many_as_there_is_room_for(cluster, strategy, offsets):
    machines, mesh = _lying(cluster, strategy)
    assert [offset for offset, _ in mesh.places] == offsets
    for (one, site), (other, after) in pairwise(mesh.places):
        inside = machines.host_of(one) == machines.host_of(other)
        groups = [offsets.index(one), offsets.index(other)]
        ((ahead, back),) = mesh.messages([[(site, 0, 1)], [(after, 1, 2)]], groups)
        assert (ahead, back) == ((1.0, 1.0) if inside else (10.0, 20.0)), (one, other)


def test_messages_of_several_chunks_are_priced_by_where_their_groups_lie():
    """zb-v turns around in a group; interleaved goes back to the first host."""
    _, mesh = _lying("p3.16xlarge:2", "dp4")
    sites = [site for _, site in mesh.places]
    for schedule, expected in (
        ("zb-v", [1, 10, 1, 0, 1, 10, 1]),
        ("interleaved", [1, 10, 1, 10, 1, 10, 1]),
    ):
        groups = [group for group, _ in virtual_order(schedule, 4, 2)]
        found = mesh.messages([[(sites[group], 0, 1)] for group in groups], groups)
        assert [ahead for ahead, _ in found] == expected
        assert [back for _, back in found] == [20 if seconds == 10 else seconds for seconds in expected]


# ---- divisions


@pytest.mark.parametrize("seed", range(6))
def test_a_division_is_the_most_even_of_those_with_the_least_largest_chunk(seed):
    layers, rng = 7, np.random.default_rng(seed)
    made = rng.integers(1, 9, (2, layers, layers + 1)).astype(float)
    made[:, *np.tril_indices(layers)] = inf
    for count in (2, 3, 4, 6):
        arrays = [made[number % 2] for number in range(count)]  # chunks that differ in their seconds
        every = [(0, *cuts, layers) for cuts in combinations(range(1, layers), count - 1)]
        chunks = {cuts: [one[at] for one, at in zip(arrays, pairwise(cuts))] for cuts in every}
        least = min(max(one) for one in chunks.values())
        found = _even(arrays)
        assert max(chunks[found]) == least
        assert sum(t * t for t in chunks[found]) == min(
            sum(t * t for t in one) for one in chunks.values() if max(one) == least
        )


def test_no_division_of_what_cannot_be_cut():
    pace = np.full((3, 4), inf)
    pace[0, 3] = 1.0
    assert _even([pace, pace]) is None
    assert _even([pace]) == (0, 3)


# ---- one chunk per group


def path_s(mesh: MeshTable, schedule: str, m: int, at: list[tuple[int, int, int]]) -> float:
    """W as the docstring of ``regular`` states it."""
    fill, path, table = float(fill_share(schedule, 1 / 3, 1 / 3)), 0.0, mesh.table
    for one in reversed(at):
        t, message = table.pace_s[one], table.transfer_s[one] + table.entry_s[one]
        path = max(m * t + table.step_s[one], fill * t + message + path)
    return float(path)


def drawn(seed: int, whole: bool = False) -> tuple[np.random.Generator, MeshTable, int]:
    rng = np.random.default_rng(seed)
    layers, groups, m = int(rng.integers(3, 7)), int(rng.integers(2, 5)), int(rng.integers(1, 10))
    mesh = mesh_table(rng, layers, groups, int(rng.integers(1, 4)), m, whole)
    if rng.random() < 0.2:
        mesh = replace(mesh, constraints=StageConstraints(frozenset({2}), frozenset({1})))
    return rng, mesh, m


@pytest.mark.parametrize("schedule", SINGLE)
def test_one_chunk_per_group_has_the_least_path_of_all_cuts_and_levels(monkeypatch, schedule):
    """Before its cuts are sought by the paths of the schedule."""
    monkeypatch.setattr(regular_solver, "cuts_by_paths", lambda schedule, m, costs, starts, most_s: starts[0])
    outcomes = {"solved": 0, "nothing": 0, "binding": 0}
    for seed in range(60):
        _, mesh, m = drawn(seed)
        for p in range(1, len(mesh.places) + 1):
            case, order = case_of(mesh, p, schedule, 1)
            values = {one: path_s(mesh, schedule, m, at) for one, at in every_regular(mesh, case, order, m)}
            found = solve_case(mesh, m, case)
            if not values:
                assert found.pipelines == ()
                outcomes["nothing"] += 1
                continue
            least = min(values.values())
            made = [path_s(mesh, schedule, m, [(s.option, *s[:2]) for s in one.stages]) for one in found.pipelines]
            assert min(made) == pytest.approx(least, rel=1e-6), (seed, p)
            outcomes["solved"] += 1
            roomy = _roomy(mesh)
            outcomes["binding"] += least > min(
                path_s(roomy, schedule, m, at) for _, at in every_regular(roomy, case, order, m)
            ) * (1 + 1e-6)
    assert outcomes["solved"] >= 60, outcomes
    assert min(outcomes.values()) >= 5, outcomes


def _roomy(mesh: MeshTable) -> MeshTable:
    """The mesh with plenty of memory."""
    options = tuple(replace(one, limit_bytes=(1e6,) * len(one.offsets)) for one in mesh.table.options)
    return replace(mesh, table=replace(mesh.table, options=options))


@pytest.mark.parametrize("schedule", SINGLE)
def test_figures_of_pipelines_of_one_chunk_are_those_of_the_table(schedule):
    solved = 0
    for seed in range(40):
        _, mesh, m = drawn(seed)
        for p in range(1, len(mesh.places) + 1):
            case, order = case_of(mesh, p, schedule, 1)
            for one in solve_case(mesh, m, case).pipelines:
                check(mesh, one, case, order, m)
                assert one.in_flight == tuple(in_flight_formula(schedule, k, p, m) for k in range(p))
                assert all(
                    mesh.table.peak(stage, q) == pytest.approx(peak)
                    for stage, q, peak in zip(one.stages, one.in_flight, one.peak_bytes)
                )
                solved += 1
    assert solved >= 60


def check(mesh: MeshTable, one: Pipeline, case: PipelineCase, order: Order, m: int) -> None:
    """A pipeline's figures are those of its table, and it fits."""
    at = [(stage.option, stage.first_layer, stage.end_layer) for stage in one.stages]
    assert [stage.first_layer for stage in one.stages[1:]] == [stage.end_layer for stage in one.stages[:-1]]
    assert (one.stages[0].first_layer, one.stages[-1].end_layer) == (0, mesh.table.num_layers)
    assert [stage.device_offset for stage in one.stages] == [mesh.places[group][0] for group, _ in order]
    assert [option % mesh.sites for option, _, _ in at] == [mesh.places[group][1] for group, _ in order]
    assert one.peak_bytes == pytest.approx(peaks(mesh, case, order, m, at))
    assert one.limit_bytes == tuple(mesh.limits[k, 0] for k in range(case.groups))
    assert max(np.subtract(one.peak_bytes, one.limit_bytes)) <= 0
    assert one.idle_devices == mesh.table.num_devices - case.groups
    simulated = clock(mesh, case, order, m, at)
    few = 4 if case.chunks > 1 else 9
    assert clock_seconds(mesh.table, m, case.schedule, one) == pytest.approx(
        simulated, rel=EPS if m <= few * case.groups else 0.02
    )
    loads = [0.0] * case.groups
    for (group, _), cell in zip(order, at):
        loads[group] += m * float(mesh.table.pace_s[cell]) + float(mesh.table.step_s[cell])
    assert max(loads) <= one.estimate_s * (1 + EPS)


# ---- several chunks per group


@pytest.mark.parametrize(("schedule", "v"), CHUNKED)
def test_several_chunks_fit_and_have_the_figures_of_their_table(schedule, v):
    outcomes = {"solved": 0, "nothing": 0, "near": 0, "missed": 0}
    for seed in range(40):
        rng = np.random.default_rng(seed)
        layers, m = int(rng.integers(2 * v, 7)), int(rng.integers(2, 10))
        mesh = mesh_table(rng, layers, 2, 2, m, False)
        options = [replace(o, limit_bytes=tuple(1.5 * x for x in o.limit_bytes)) for o in mesh.table.options]
        mesh = replace(mesh, table=replace(mesh.table, options=tuple(options)))
        case, order = case_of(mesh, 2, schedule, v)
        seconds = [clock(mesh, case, order, m, at) for _, at in every_regular(mesh, case, order, m)]
        found = solve_case(mesh, m, case).pipelines
        outcomes["missed"] += bool(seconds) and not found
        outcomes["nothing"] += not seconds
        for one in found:
            check(mesh, one, case, order, m)
            assert one.chunks == v
            transient = [float(mesh.table.transient[s.option, s.first_layer, s.end_layer]) for s in one.stages]
            for group, peak in enumerate(one.peak_bytes):  # chunks' transients are not held together
                mine = [k for k, (home, _) in enumerate(order) if home == group]
                together = sum(one.chunk_bytes[k] - transient[k] for k in mine) + max(transient[k] for k in mine)
                assert together == pytest.approx(peak)
            outcomes["solved"] += 1
            outcomes["near"] += clock_seconds(mesh.table, m, schedule, one) <= 1.1 * min(seconds)
    assert outcomes["solved"] >= 8, outcomes
    assert outcomes["near"] >= outcomes["solved"] // 2, outcomes
    assert outcomes["missed"] <= outcomes["solved"] // 2, outcomes


def even_mesh(layers: int) -> MeshTable:
    """Two groups, and layers of a second each, without messages, bytes and an end of the step."""
    first, end = np.indices((layers, layers + 1))
    work = np.maximum(end - first, 0).astype(float)[None]
    zero, free = np.zeros_like(work), np.zeros(1)
    table = PipelineTable(layers, 2, (StageOption(1, (0, 1), (9.0, 9.0)),), work, zero, zero, zero, zero, zero, zero)
    return MeshTable(
        table, 1, work[0], work, free, free, work[0] * 2 / 3, work[0] / 3, work[0] * 2 / 3, zero[0], [(True, True)],
        [0, 0],
    )  # fmt: skip


@pytest.mark.parametrize(("schedule", "v"), CHUNKED)
@pytest.mark.parametrize("layers", [7, 8, 11, 12])
def test_equal_layers_are_dealt_evenly(schedule, v, layers):
    (one,) = solve_case(even_mesh(layers), 8, PipelineCase(2, schedule, v)).pipelines
    sizes = [stage.end_layer - stage.first_layer for stage in one.stages]
    assert max(sizes) - min(sizes) <= 1


# ---- bounds


@lru_cache(maxsize=64)
def explored(seed: int, whole: bool) -> tuple[MeshTable, int, dict[PipelineCase, float]]:
    """A table, and the fastest makespan of each of its cases: no message is faster, none is lost to memory."""
    rng = np.random.default_rng(100 + seed)
    layers, groups, m = int(rng.integers(3, 8)), int(rng.integers(2, 4)), int(rng.integers(1, 8))
    mesh = mesh_table(rng, layers, groups, 2, m, whole, _overlap(whole), tied_s=200.0 * (seed % 3))
    if rng.random() < 0.6:  # enough for several chunks
        options = [replace(o, limit_bytes=tuple(2 * x for x in o.limit_bytes)) for o in mesh.table.options]
        mesh = replace(mesh, table=replace(mesh.table, options=tuple(options)))
    if rng.random() < 0.15:
        mesh = replace(mesh, constraints=StageConstraints(frozenset({2})))
    fastest = {}
    for p, schedule, v in _cases(layers, groups, m):
        case, order = case_of(mesh, p, schedule, v)
        fastest[case] = least_clock(mesh, case, order, m, every_regular(mesh, case, order, m))
    return mesh, m, fastest


def _overlap(whole: bool) -> float:
    """The share of the last backward that hides work, where values count microbatches alone."""
    return 0.0 if whole else 0.8


def _cases(layers: int, groups: int, m: int) -> Iterator[tuple[int, str, int]]:
    for p in range(1, groups + 1):
        yield from ((p, schedule, 1) for schedule in SINGLE if p <= layers)
        yield from ((p, schedule, v) for schedule, v in CHUNKED if 2 <= p <= m and p * v <= layers)


def least_clock(
    mesh: MeshTable, case: PipelineCase, order: Order, m: int, pipelines: Iterator[tuple[Regular, Cells]]
) -> float:
    """The least makespan; those that one group's work alone makes slower are not simulated."""
    loads, overlap = [], _overlap(mesh.whole)
    for _, at in pipelines:
        load = [0.0] * case.groups
        for (group, _), one in zip(order, at):
            load[group] += m * float(mesh.table.pace_s[one]) + (1 - overlap) * float(mesh.table.step_s[one])
        loads.append((max(load), at))
    best = inf
    for load, at in sorted(loads):
        if load >= best:
            break
        best = min(best, clock(mesh, case, order, m, at, overlap))
    return best


WHOLE = pytest.mark.parametrize("whole", [False, True], ids=["microbatches", "with the end of the step"])


@WHOLE
@pytest.mark.parametrize("seed", SEEDS)
def test_no_case_is_faster_than_its_bound(seed, whole):
    mesh, m, fastest = explored(seed, whole)
    bounds = dict(zip(fastest, case_bounds(mesh, m, list(fastest))))
    too_high = {case: (bounds[case], best) for case, best in fastest.items() if bounds[case] > best * (1 + EPS)}
    assert not too_high


@WHOLE
@pytest.mark.parametrize("seed", SEEDS)
def test_no_pipeline_is_faster_than_the_bound_of_its_mesh(seed, whole):
    mesh, m, fastest = explored(seed, whole)
    for groups in range(1, len(mesh.places) + 1):
        best = min(seconds for case, seconds in fastest.items() if case.groups <= groups)
        assert mesh_bound(mesh, m, groups) <= best * (1 + EPS)


@WHOLE
@pytest.mark.parametrize("seed", SEEDS)
def test_no_pipeline_of_the_divisions_is_faster_than_the_close_bound(seed, whole):
    mesh, m, fastest = explored(seed, whole)
    for case in fastest:
        if case.chunks > 1:
            _, order = case_of(mesh, case.groups, case.schedule, case.chunks)
            cuts = _Solver(mesh, m, case).divisions
            best = least_clock(mesh, case, order, m, every_regular(mesh, case, order, m, cuts))
            played = min((played_bound(mesh, m, case, one) for one in cuts), default=inf)
            assert close_bound(mesh, m, case) <= played <= best * (1 + EPS)
        else:
            assert close_bound(mesh, m, case) <= fastest[case] * (1 + EPS), case


@WHOLE
@pytest.mark.parametrize("seed", SEEDS)
def test_no_pipeline_that_is_found_is_faster_than_what_is_proven(seed, whole):
    mesh, m, fastest = explored(seed, whole)
    for case in fastest:
        _, order = case_of(mesh, case.groups, case.schedule, case.chunks)
        answer = solve_case(mesh, m, case)
        close = close_bound(mesh, m, case) if case.chunks > 1 else 0.0
        divisions = _Solver(mesh, m, case).divisions if case.chunks > 1 else []
        for one in answer.pipelines:
            at = [(s.option, s.first_layer, s.end_layer) for s in one.stages]
            seconds = clock(mesh, case, order, m, at, _overlap(whole))
            assert answer.bound_s <= seconds * (1 + EPS), case
            if (0, *(s.end_layer for s in one.stages)) in divisions:  # layers may have been divided again
                assert close <= seconds * (1 + EPS), case


@pytest.mark.parametrize("seed", SEEDS)
def test_no_number_of_groups_with_which_something_fits_is_left_out(seed):
    mesh, m, fastest = explored(seed, False)
    able = groups_that_fit(mesh, m, len(mesh.places))
    assert {case.groups for case, seconds in fastest.items() if seconds < inf} <= set(able)


def test_bounds_are_so_close_that_one_a_thousandth_too_high_would_be_seen():
    """The tests above bite: of each kind of bound some are reached, or nearly."""
    ratios: dict[tuple[str, int], float] = {}
    for seed in SEEDS:
        mesh, m, fastest = explored(seed, False)
        for (case, best), bound in zip(fastest.items(), case_bounds(mesh, m, list(fastest))):
            if case.chunks == 1 and best < inf:
                key = case.schedule, min(case.groups, 2)
                ratios[key] = max(ratios.get(key, 0.0), bound / best)
    assert min(ratios[name, 1] for name in SINGLE) > 0.99
    assert ratios["1f1b", 2] * 1.001 > 1
    assert min(ratios[name, 2] for name in SINGLE) > 0.95


@pytest.mark.parametrize(
    ("schedule", "v", "reached"), [("interleaved", 2, 1.0), ("interleaved", 3, 1.0), ("zb-v", 2, 0.99)]
)
def test_the_close_bound_of_equal_layers_is_reached(schedule, v, reached):
    mesh, case, m = even_mesh(12), PipelineCase(2, schedule, v), 32
    (one,) = solve_case(mesh, m, case).pipelines
    seconds = clock_seconds(mesh.table, m, schedule, one)
    (bound,) = case_bounds(mesh, m, [case])
    assert 0.95 * seconds <= bound <= close_bound(mesh, m, case) <= seconds * (1 + EPS)
    assert close_bound(mesh, m, case) >= reached * seconds * (1 - EPS)


@pytest.mark.parametrize(("schedule", "reached"), [("1f1b", 0.988), ("gpipe", 1.0), ("zb-h1", 1.0)])
@pytest.mark.parametrize("whole", [True, False])
def test_the_end_of_a_step_follows_on_what_a_stage_waits_for(schedule, reached, whole):
    mesh, case, m = even_mesh(8), PipelineCase(2, schedule), 16
    once = 4.0 * mesh.table.pace_s  # as much as four microbatches
    counted = {"value": mesh.value + once / m} if whole else {"work": m * mesh.pace + once[0]}
    mesh = replace(mesh, table=replace(mesh.table, step_s=once), whole=whole, **counted)
    (one,) = solve_case(mesh, m, case).pipelines
    seconds = clock_seconds(mesh.table, m, schedule, one)
    assert reached * seconds * (1 - EPS) <= close_bound(mesh, m, case) <= seconds * (1 + EPS)


def test_the_played_bound_knows_what_waits_for_messages():
    mesh, case, m = even_mesh(12), PipelineCase(2, "interleaved", 2), 8
    slow = np.full_like(mesh.table.pace_s, 2.0)
    mesh = replace(
        mesh, table=replace(mesh.table, entry_s=slow, transfer_s=slow), hosts=[0, 1], near=[(False, False)],
        entry=slow[:, 0], behind=slow[:, 0],
    )  # fmt: skip
    answer = solve_case(mesh, m, case)
    seconds = clock_seconds(mesh.table, m, case.schedule, answer.pipelines[0])
    assert answer.bound_s < 0.9 * seconds
    played = min(played_bound(mesh, m, case, cuts) for cuts in answer.divisions)
    assert 0.98 * seconds <= played <= seconds * (1 + EPS)


def test_bounds_know_what_memory_costs():
    """Where memory binds, they are above those of the least seconds alone."""
    lifted = dict.fromkeys(("case", "mesh", "close", "all work", "all work of chunks"), 0)
    for seed in SEEDS:
        mesh, m, fastest = explored(seed, False)
        roomy, cases = _roomy(mesh), list(fastest)
        bound, loose = (case_bounds(one, m, cases) for one in (mesh, roomy))
        lifted["case"] += any(a > b * (1 + 1e-3) for a, b in zip(bound, loose))
        lifted["mesh"] += mesh_bound(mesh, m, 1) > mesh_bound(roomy, m, 1) * (1 + 1e-3)
        close, loose = ([close_bound(one, m, c) for c in cases if c.chunks > 1] for one in (mesh, roomy))
        lifted["close"] += any(a > b * (1 + 1e-3) for a, b in zip(close, loose))
        for name, some in (("all work", 1), ("all work of chunks", 2)):
            those = [case for case in cases if min(case.chunks, 2) == some]
            priced, loose = (
                [close_bound(one, m, case) for case in those] for one in (mesh, replace(mesh, work_levels=None))
            )
            lifted[name] += any(a > b * (1 + 1e-3) for a, b in zip(priced, loose))
    assert min(lifted.values()) >= 1, lifted


def test_each_chunk_of_a_group_has_the_price_of_its_own_microbatches_in_flight():
    """Under zb-v the first group holds more microbatches of its first chunk than of its second; each layer has a byte,
    and saves one."""
    mesh, flights, price = even_mesh(4), np.array([1.0, 2.0, 3.0, 4.0]), 0.25
    mesh = replace(
        mesh, value=np.stack([mesh.pace * (1 + price * (1 + more)) for more in flights]), byte=np.full(4, price),
        saved_byte=price * flights, table=replace(mesh.table, options=(StageOption(1, (0, 1), (4.0, 4.0)),)),
    )  # fmt: skip
    solver = _Solver(mesh, 8, PipelineCase(2, "zb-v", 2))
    held = max(solver._flights[0].tolist(), key=sum)
    assert held[0] > held[1]
    by_one_level = [2 + price * sum(min(1.0, h / more) * (1 + more) for h in held) - price * 4 for more in flights]
    (found, _) = solver._least_loads((0, 1, 2, 3, 4))
    assert found == pytest.approx(2 + price * sum(1 + h for h in held) - price * 4)
    assert found > 1.02 * max(by_one_level)


def test_a_case_that_never_fits_is_never_solved():
    mesh = mesh_table(np.random.default_rng(0), 4, 2, 2, 4, False)
    none = tuple(replace(one, limit_bytes=(0.5,) * len(one.offsets)) for one in mesh.table.options)
    small = replace(mesh, table=replace(mesh.table, options=none))
    assert groups_that_fit(small, 4, 2) == []
    for case in (PipelineCase(1, "1f1b"), PipelineCase(2, "gpipe"), PipelineCase(2, "zb-v", 2)):
        assert solve_case(small, 4, case).pipelines == ()


def test_a_pipeline_that_is_asked_for_has_these_cuts():
    mesh = _roomy(mesh_table(np.random.default_rng(3), 5, 3, 2, 6, False))
    mesh = replace(mesh, constraints=StageConstraints(frozenset({3}), frozenset({2})))
    at = at_places(mesh, Regular((0, 3, 5), (0, 0)), [(0, 0), (1, 0)])
    if np.isfinite([mesh.table.pace_s[one] for one in at]).all():
        for case in (PipelineCase(2, "1f1b"), PipelineCase(2, "zb-h1"), PipelineCase(2, "interleaved", 2)):
            for one in solve_case(mesh, 6, case).pipelines:
                cuts = {stage.first_layer for stage in one.stages}
                assert 3 in cuts
                assert 2 not in cuts


def test_the_end_of_a_later_step_waits_for_messages_ahead_alone():
    """One microbatch, two groups in two hosts, and much work at the end of the second's step."""
    mesh, case = even_mesh(4), PipelineCase(2, "1f1b")
    slow, once = np.full_like(mesh.table.pace_s, 3.0), np.zeros_like(mesh.table.pace_s)
    once[:, :, 4] = 50.0
    mesh = replace(
        mesh, table=replace(mesh.table, entry_s=slow, transfer_s=slow, step_s=once), hosts=[0, 1],
        near=[(False, False)], entry=slow[:, 0], behind=slow[:, 0], whole=False, work=mesh.pace + once[0],
    )  # fmt: skip
    (found, *_) = solve_case(mesh, 1, case).pipelines
    least_s = 3 * 1 / 3 + 3 + 1 + 50  # three layers forward, a message, the last layer, the end of its step
    assert close_bound(mesh, 1, case) == pytest.approx(least_s)
    assert least_s <= clock_seconds(mesh.table, 1, case.schedule, found) <= least_s + 1


def of_random_chunks(rng: np.random.Generator, schedule: str, v: int) -> tuple[float, float]:
    """(the makespan of a random pipeline with a layer per chunk and groups in hosts of their own, its close bound)."""
    p, m = int(rng.integers(2, 4)), int(rng.integers(3, 10))
    layers, split = p * v, is_split(schedule)
    scale = np.where(rng.random(5) < 0.4, 0.05, 1.0)  # of F, I, W, messages ahead and back
    f, i, w = (rng.uniform(0.5, 1.5, layers) * one for one in scale[:3])
    x, y = (rng.uniform(0.0, 4.0, layers - 1) * one for one in scale[3:])
    once, tied_s = rng.uniform(0.0, 3.0, layers) * (rng.random() < 0.5), float(rng.integers(0, 3))
    places = virtual_order(schedule, p, v)
    groups = [group for group, _ in places]
    edges = [(k, k + 1) for k in range(layers - 1)]
    apart = [groups[k] != groups[k + 1] for k, _ in edges]
    ends = np.bincount(groups, once, p)
    ends[[0, -1]] += tied_s if schedule == "interleaved" else 0.0
    seconds = simulate(
        generate(schedule, p, m, v), f, i + w, dict(zip(edges, x * apart)), ends, dict(zip(edges, y * apart)), w
    ).makespan_s
    first, end = np.indices((layers, layers + 1))
    one = end - first == 1

    def runs(values: np.ndarray, others: float = inf) -> np.ndarray:
        return np.where(one, values[:, None], others)

    option = StageOption(1, tuple(range(p)), (9.0,) * p)
    zero, free = np.zeros((1, layers, layers + 1)), np.zeros(0)
    table = PipelineTable(layers, p, (option,), runs(f + i + w)[None], zero, zero, zero, zero, zero, zero)
    mesh = MeshTable(
        table, 1, runs(f + i + w), np.zeros((0, layers, layers + 1)), free, free, runs(f + i if split else f + i + w),
        runs(f, 0.0), runs(i + w, 0.0), zero[0], [(False, False)], list(range(p)), False, None,
        runs(m * (f + i + w) + once), np.array([0.0, 0.0, *[tied_s] * (p - 1)]),
        entry=np.pad(x, 1)[None], behind=np.pad(y, 1)[None],
    )  # fmt: skip
    return seconds, _Solver(mesh, m, PipelineCase(p, schedule, v)).bound(tuple(range(layers + 1)))


@pytest.mark.parametrize(("schedule", "v"), CHUNKED)
def test_no_pipeline_of_several_chunks_is_faster_than_what_its_groups_wait_for(schedule, v):
    rng = np.random.default_rng(3)
    ratios = [bound / seconds for seconds, bound in (of_random_chunks(rng, schedule, v) for _ in range(500))]
    assert max(ratios) <= 1 + EPS
    assert max(ratios) > 0.995  # one that is a little too high would be seen
    assert np.median(ratios) > 0.6
