"""Stages by dynamic programming: against every pipeline of small tables, the clock, and known answers."""

from dataclasses import replace
from math import ceil, inf, isfinite

import numpy as np
import pytest
from meshwright.compiler.pipeline.bounds import candidate_makespan
from meshwright.compiler.pipeline.families import generate, in_flight_formula
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.compiler.pipeline.stage_dp import RankingLimits, bound_of, cut_again, describe_pipeline, solve
from meshwright.compiler.pipeline.table import (
    InfeasiblePipeline,
    LowerBounds,
    PipelineSolution,
    PipelineTable,
    StageChoice,
    StageConstraints,
    StageOption,
)

from tests.oracles.pipelines import clock, every_pipeline, meshes, objectives, over_the_limit
from tests.support.pipeline_tables import even_table, random_constraints, random_table, with_slow_messages

FAMILIES = ("1f1b", "gpipe", "zb-h1")


def check_figures(table: PipelineTable, found: PipelineSolution, m: int, schedule: str) -> None:
    for one in found.pipelines:
        assert one == describe_pipeline(table, m, schedule, one.stages)
        assert (one.path_s, one.latency_s) == pytest.approx(objectives(table, one.stages, m, schedule))
        assert over_the_limit(table, one.stages, schedule, m) <= 0
        assert max(np.subtract(one.peak_bytes, one.limit_bytes)) <= 0
        assert one.estimate_s <= clock(table, one.stages, schedule, m) * (1 + 1e-9)
        device = 0
        for stage in one.stages:
            assert stage.device_offset >= device
            device = stage.device_offset + table.options[stage.option].num_devices


def ranked_by(table: PipelineTable, stages: tuple[StageChoice, ...], m: int, schedule: str) -> float:
    """T under zb-h1, else what is proven of the pipeline."""
    if schedule == "zb-h1":
        return objectives(table, stages, m, schedule)[1]
    return describe_pipeline(table, m, schedule, stages).estimate_s


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_every_pipeline_of_small_tables(seed):
    rng = np.random.default_rng(seed)
    outcomes = {"solved": 0, "memory": 0, "layout": 0, "binding": 0, "tight": 0, "several": 0}
    for case in range(40):
        layers, devices = int(rng.integers(1, 6)), int(rng.integers(1, 7))
        m, schedule = int(rng.integers(1, 9)), str(rng.choice(FAMILIES))
        shapes, levels = (int(rng.integers(1, 4)), 1) if rng.random() < 0.5 else (int(rng.integers(1, 3)), 2)
        table = random_table(rng, layers, devices, shapes, levels, m)
        constraints = random_constraints(rng, layers)
        possible = constraints.stages[0] <= min(layers, devices)
        constraints = constraints if possible else StageConstraints()
        best: dict[tuple[tuple[int, ...], ...], float] = {}
        least = free = fastest = least_path = inf
        for stages in every_pipeline(table, constraints):
            over = over_the_limit(table, stages, schedule, m)
            least, free = min(least, max(over, 0.0)), min(free, ranked_by(table, stages, m, schedule))
            if over <= 0:
                key = meshes(table, stages)
                best[key] = min(best.get(key, inf), ranked_by(table, stages, m, schedule))
                fastest = min(fastest, clock(table, stages, schedule, m))
                least_path = min(least_path, objectives(table, stages, m, schedule)[0])
        found = solve(table, m, schedule, constraints, RankingLimits(5, inf, 10**6))
        if not best:
            assert isinstance(found, InfeasiblePipeline), (case, found)
            assert found.missing_bytes == least, (case, found)
            outcomes["memory" if isfinite(least) else "layout"] += 1
            if isfinite(least):
                options = [replace(o, limit_bytes=tuple(x + least for x in o.limit_bytes)) for o in table.options]
                more = solve(replace(table, options=tuple(options)), m, schedule, constraints)
                assert isinstance(more, PipelineSolution)
                assert found.missing_bytes == found.needed_bytes - found.limit_bytes
            continue
        assert isinstance(found, PipelineSolution), (case, found)
        assert found.complete
        check_figures(table, found, m, schedule)
        expected = sorted(best.values())
        assert found.least_s <= expected[0] * (1 + 1e-9), case
        assert found.least_s >= (least_path if schedule == "zb-h1" else 0.7 * expected[0]) * (1 - 1e-9), case
        got: dict[tuple[tuple[int, ...], ...], float] = {}
        for one in found.pipelines:
            key = meshes(table, one.stages)
            got[key] = min(got.get(key, inf), ranked_by(table, one.stages, m, schedule))
        assert sorted(got.values())[:5] == pytest.approx(expected[:5]), case
        bound_s = bound_of(table.floors, devices, m, schedule, constraints, found.best.estimate_s * (1 + 1e-12))
        assert bound_s <= fastest * (1 + 1e-9), case
        outcomes["solved"] += 1
        outcomes["binding"] += free < expected[0]
        outcomes["tight"] += bound_s >= 0.9 * fastest
        outcomes["several"] += len(expected) >= 5
    assert outcomes["solved"] >= 20, outcomes
    assert outcomes["tight"] >= 15, outcomes
    assert min(outcomes.values()) >= 3, outcomes


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_adjacent_options_leave_no_device_idle_in_front(schedule):
    rng = np.random.default_rng(7)
    table, m = even_table(3, 6, [1, 2, 3], [3, 3], limit=2.0, saved=0.1), 5
    options = tuple(replace(option, adjacent=option.num_devices > 1) for option in table.options)
    seen = set()
    for _ in range(6):
        one = replace(table, options=options, pace_s=table.pace_s * rng.integers(60, 140, table.pace_s.shape))
        best = {True: inf, False: inf}  # by whether gaps were allowed
        for stages in every_pipeline(one, StageConstraints()):
            if over_the_limit(one, stages, schedule, m) <= 0:
                ends = [0, *(stage.device_offset + options[stage.option].num_devices for stage in stages)]
                gaps = any(options[s.option].adjacent and s.device_offset > end for s, end in zip(stages, ends))
                value = describe_pipeline(one, m, schedule, stages).estimate_s
                best[True] = min(best[True], value)
                best[False] = best[False] if gaps else min(best[False], value)
        assert solve(one, m, schedule, limits=RankingLimits(slack=inf)).best.estimate_s == pytest.approx(
            best[False], rel=1e-9
        )
        seen.add(best[True] < best[False])
    assert True in seen  # somewhere a gap would have looked better


@pytest.mark.parametrize(("hosts", "sizes"), [([2, 4], [1, 2, 3]), ([3, 4], [1, 2, 4]), ([5, 7], [2, 3, 5])])
def test_uneven_hosts_are_exact(hosts, sizes):
    rng = np.random.default_rng(sum(hosts))
    table = even_table(3, sum(hosts), sizes, hosts, limit=2.0, saved=0.1)
    for m, schedule in ((1, "1f1b"), (4, "gpipe"), (7, "1f1b"), (7, "zb-h1")):
        pace = table.pace_s * rng.integers(90, 110, table.pace_s.shape)
        one = replace(table, pace_s=pace)
        values = {}
        for stages in every_pipeline(one, StageConstraints()):
            if over_the_limit(one, stages, schedule, m) <= 0:
                value = ranked_by(one, stages, m, schedule)
                values[meshes(one, stages)] = min(value, values.get(meshes(one, stages), inf))
        found = solve(one, m, schedule, limits=RankingLimits(3, inf))
        assert isinstance(found, PipelineSolution)
        got = sorted(
            {meshes(one, each.stages): ranked_by(one, each.stages, m, schedule) for each in found.pipelines}.values()
        )
        assert got[:3] == pytest.approx(sorted(values.values())[:3])


def test_three_devices_that_cannot_be_joined_make_three_equal_stages():
    found = solve(even_table(6, 3, [1], [1, 1, 1]), 12)
    assert [tuple(stage) for stage in found.best.stages] == [(0, 2, 0, 0), (2, 4, 0, 1), (4, 6, 0, 2)]
    assert found.least_s == found.best.path_s == found.best.latency_s == found.best.estimate_s == 12 * 2 + 2 * 2
    assert found.best.idle_devices == 0


def test_in_flight_memory_moves_layers_to_the_end_under_1f1b_only():
    # Stage 0 of 2 holds two microbatches: 3 bytes a layer there and 2 in the last stage; GPipe holds all eight.
    table = even_table(6, 2, [1], [1, 1], limit=8.0, saved=1.0)
    found = solve(table, 8)
    assert [stage.end_layer - stage.first_layer for stage in found.best.stages] == [2, 4]
    assert found.best.peak_bytes == (6.0, 8.0)
    gpipe = solve(table, 8, "gpipe")
    assert isinstance(gpipe, InfeasiblePipeline)
    assert gpipe.missing_bytes == 3 * 9 - 8


def test_infeasible_names_the_stage_or_what_cannot_be():
    found = solve(even_table(8, 2, [1, 2], [2], limit=3.0), 4)
    assert isinstance(found, InfeasiblePipeline)
    assert (found.missing_bytes, found.needed_bytes, found.limit_bytes) == (1.0, 4.0, 3.0)
    assert "1 bytes are missing" in str(found)
    table = even_table(3, 2, [1], [1, 1])
    pace = table.pace_s.copy()
    pace[:, :2, 2:] = inf
    assert str(solve(replace(table, pace_s=pace), 2)) == "no option can run layers 1 on 2 devices"
    assert "with these cuts" in str(solve(table, 2, constraints=StageConstraints(frozenset({1, 2}))))


def test_many_layers_agree_with_a_plain_recurrence():
    """A table too large for enumeration: Z by a plain recurrence over (layer, devices left, stages left)."""
    rng = np.random.default_rng(5)
    layers, devices, m, sizes = 14, 12, 16, [1, 2, 4]
    table = even_table(layers, devices, sizes, [1] * devices, limit=2.2, saved=0.2)
    table = replace(
        table,
        options=tuple(StageOption(n, tuple(range(devices - n + 1)), (2.2,) * (devices - n + 1), n) for n in sizes),
        pace_s=table.pace_s * rng.uniform(0.8, 1.2, table.pace_s.shape),
        transfer_s=np.full(table.pace_s.shape, 0.01),
    )
    value = {(layers, d, 0): 0.0 for d in range(devices + 1)}
    sums = dict(value)
    for s in range(1, devices + 1):
        for i in range(layers):
            for d in range(devices + 1):
                best = least = inf
                q = min(m, s)
                for o, n in enumerate(sizes):
                    for j in range(i + 1, layers + 1 if n <= d else 0):
                        left, t = (j, d - n, s - 1), table.pace_s[o, i, j]
                        if left in value and table.peak(StageChoice(i, j, o, 0), q) <= 2.2:
                            x = table.transfer_s[o, i, j] if j < layers else 0.0
                            behind = x + sums[left]
                            turns = max(ceil(m / q) * (t + behind), (m - q + 1) * t + 2 * behind if m > q else 0.0)
                            best, least = min(best, max(m * t, t + x + value[left], turns)), min(least, t + behind)
                value[i, d, s], sums[i, d, s] = best, least
    found = solve(table, m, limits=RankingLimits(slack=inf))
    expected = min(value[0, devices, s] for s in range(1, devices + 1))
    assert found.least_s == pytest.approx(expected)
    assert expected <= found.best.estimate_s <= expected * 1.02
    assert len(found.pipelines) >= 8
    assert len({meshes(table, one.stages) for one in found.pipelines}) == len(found.pipelines)


@pytest.mark.parametrize("schedule", FAMILIES)
def test_figures_of_one_pipeline_are_at_most_the_clock(schedule):
    rng = np.random.default_rng(11)
    close = 0
    for _ in range(300):
        p, m = int(rng.integers(1, 7)), int(rng.integers(1, 25))
        forward, inputs, weights = rng.uniform(1, 1.5, (3, p))
        ahead, back = rng.uniform(0, 2 * rng.random(), (2, p))
        step = rng.uniform(0, 5, p)
        pace = forward + inputs + weights
        held = [in_flight_formula(schedule, k, p, m) for k in range(p)]
        figures = candidate_makespan(schedule, m, pace, ahead + back, step, held, forward, inputs)
        edges = {(k, k + 1): ahead[k] for k in range(p - 1)} or None
        returns = {(k, k + 1): back[k] for k in range(p - 1)} or None
        seconds = simulate(
            generate(schedule, p, m), forward, inputs + weights, edges, step, returns, weights
        ).makespan_s
        assert figures.floor_s <= seconds * (1 + 1e-9)
        assert figures.path_s <= figures.latency_s * (1 + 1e-9)
        close += figures.floor_s >= 0.9 * seconds
    assert close >= 150, close


@pytest.mark.parametrize("schedule", FAMILIES)
def test_a_cut_off_leaves_out_what_does_not_matter_alone(schedule):
    rng = np.random.default_rng(2)
    kept = left_out = 0
    for _ in range(30):
        layers, devices, m = int(rng.integers(2, 6)), int(rng.integers(2, 7)), int(rng.integers(1, 12))
        table = random_table(rng, layers, devices, 2, 2, m)
        free = solve(table, m, schedule, explain=False)
        if isinstance(free, InfeasiblePipeline):
            continue
        seconds = min(
            clock(table, stages, schedule, m)
            for stages in every_pipeline(table, StageConstraints())
            if over_the_limit(table, stages, schedule, m) <= 0
        )
        for most in (free.best.estimate_s * 1.001, free.best.estimate_s * 0.999, seconds * 0.8):
            found = solve(table, m, schedule, limits=RankingLimits(most=most))
            bound_s = bound_of(table.floors, devices, m, schedule, StageConstraints(), most)
            assert min(bound_s, most) <= seconds * (1 + 1e-9)
            if isinstance(found, InfeasiblePipeline):
                assert most < free.best.estimate_s or schedule == "zb-h1"
                assert bound_s <= most
                left_out += bound_s == most
                continue
            assert found.best.estimate_s <= most
            assert found.best.estimate_s == pytest.approx(free.best.estimate_s) or schedule == "zb-h1"
            kept += 1
        bounds = [
            bound_of(table.floors, devices, m, schedule, StageConstraints(), 1.5 * seconds, count)
            for count in (0, 2, 6)
        ]
        assert bounds == sorted(bounds)
        assert bounds[-1] <= seconds * (1 + 1e-9)
    assert min(kept, left_out) >= 10, (kept, left_out)


@pytest.mark.parametrize("slow", [False, True], ids=["", "slow messages"])
@pytest.mark.parametrize("schedule", [*FAMILIES, "eager-1f1b"])
def test_no_pipeline_is_faster_than_the_bound_on_all(schedule, slow):
    rng, ratios = np.random.default_rng(5), []
    for _ in range(60):
        layers, devices, m = int(rng.integers(2, 6)), int(rng.integers(2, 6)), int(rng.integers(1, 16))
        table = random_table(rng, layers, devices, int(rng.integers(1, 3)), 2, m)
        table = with_slow_messages(table) if slow else table
        fitting = [
            stages
            for stages in every_pipeline(table, StageConstraints())
            if over_the_limit(table, stages, schedule, m) <= 0
        ]
        if fitting:
            seconds = min(clock(table, stages, schedule, m) for stages in fitting)
            ratios.append(bound_of(table.floors, devices, m, schedule, StageConstraints(), 2 * seconds) / seconds)
    assert len(ratios) >= 30
    assert max(ratios) <= 1 + 1e-9
    assert max(ratios) >= 0.995  # one that is a little too high would be seen
    assert np.median(ratios) >= 0.85


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_cuts_sought_again_are_nearly_the_best_on_their_devices(schedule):
    rng, ratios, faster = np.random.default_rng(3), [], 0
    for _ in range(60):
        layers, devices, m = int(rng.integers(4, 7)), int(rng.integers(2, 5)), int(rng.integers(3, 16))
        table = with_slow_messages(random_table(rng, layers, devices, 2, 2, m))
        table = replace(table, transfer_s=np.broadcast_to(10.0 * rng.integers(0, 12, layers + 1), table.pace_s.shape))
        constraints = random_constraints(rng, layers)
        placed: dict[tuple[tuple[int, int], ...], list[tuple[StageChoice, ...]]] = {}
        for stages in every_pipeline(table, constraints):
            if len(stages) > 1 and over_the_limit(table, stages, schedule, m) <= 0:
                where = tuple((one.device_offset, table.options[one.option].shape) for one in stages)
                placed.setdefault(where, []).append(stages)
        for where, every in placed.items():
            start = every[int(rng.integers(len(every)))]
            again = cut_again(table, m, schedule, constraints, start)
            assert tuple((one.device_offset, table.options[one.option].shape) for one in again) == where
            assert [(one.first_layer, one.end_layer) for one in again] in (
                [(one.first_layer, one.end_layer) for one in stages] for stages in every
            )
            assert over_the_limit(table, again, schedule, m) <= 0
            before_s, after_s = (clock(table, one, schedule, m) for one in (start, again))
            faster += after_s < before_s
            ratios.append(after_s / min(clock(table, one, schedule, m) for one in every))
    assert faster >= 100, (faster, len(ratios))
    assert np.median(ratios) <= 1.001
    assert np.mean(np.array(ratios) <= 1.05) >= 0.8


def test_messages_count_as_often_as_microbatches_wait_for_them():
    """Four equal stages of a second, and messages of a second each way: a trip takes 4 + 3 · 2, and four microbatches
    are in flight. Stage 1 has trips of 3 + 2 · 2 for every three, after the first 1 + 2: 14 of them are 101 in all."""
    table = even_table(4, 4, [1], [1] * 4)
    first, end = np.indices(table.pace_s.shape[1:])
    table = replace(
        table, transfer_s=np.full(table.pace_s.shape, 2.0), pace_s=np.where(end - first == 1, 1.0, inf)[None]
    )
    floors = LowerBounds(table.options, table.pace_s, transfer_s=table.transfer_s)
    found = solve(table, 40)
    bound_s = bound_of(floors, 4, 40, "1f1b", StageConstraints())
    assert bound_s == found.best.estimate_s == 10 * (4 + 6) + 1 > found.best.path_s


def test_bad_arguments():
    table = even_table(3, 2, [1], [1, 1])
    with pytest.raises(ValueError, match="at least one microbatch"):
        solve(table, 0)
    with pytest.raises(ValueError, match="from 1 to 2"):
        solve(table, 1, constraints=StageConstraints(stages=(3, None)))
    with pytest.raises(ValueError, match="cut before layers 1 to 2, but got 3"):
        solve(table, 1, constraints=StageConstraints(boundaries=frozenset({3})))
    with pytest.raises(ValueError, match="both before layers"):
        solve(table, 1, constraints=StageConstraints(frozenset({1}), frozenset({1})))
    with pytest.raises(ValueError, match="but got 'chimera'"):
        solve(table, 1, "chimera")
    with pytest.raises(ValueError, match=r"regular\.solve_case, but got 'zb-v'"):
        solve(table, 1, "zb-v")
    with pytest.raises(ValueError, match="pace_s has shape"):
        replace(table, pace_s=table.pace_s[:, :2])
    with pytest.raises(ValueError, match="saved is not negative"):
        replace(table, saved=-table.pace_s)
    with pytest.raises(ValueError, match="offsets ascend"):
        StageOption(1, (1, 0), (1.0, 1.0))
    with pytest.raises(ValueError, match="memory limit for each"):
        StageOption(1, (0, 1), (1.0,))
