"""Pipelines with several chunks per device group: against the clock, the schedules' own memory, and every division."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf, isfinite

import numpy as np
import pytest
from meshwright.compiler.pipeline.bounds import clock_seconds
from meshwright.compiler.pipeline.families import generate, virtual_order
from meshwright.compiler.pipeline.schedule import in_flight
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.compiler.pipeline.table import (
    InfeasiblePipeline,
    Pipeline,
    PipelineSolution,
    PipelineTable,
    StageChoice,
    StageConstraints,
)
from meshwright.compiler.pipeline.virtual_stages import (
    _Divisions,
    _offsets,
    in_flight_by_chunk,
    quick_bound,
    solve_chunked,
)
from meshwright.compiler.search.optimality import chunk_bound, concurrent_microbatches

from tests.support.pipeline_tables import random_table

FAMILIES = [("interleaved", 2), ("interleaved", 3), ("zb-v", 2)]


def clock(table: PipelineTable, stages: tuple[StageChoice, ...], schedule: str, p: int, v: int, m: int) -> float:
    """The simulated makespan, f = i = w, half of a message each way."""
    at = [(stage.option, stage.first_layer, stage.end_layer) for stage in stages]
    places, run = virtual_order(schedule, p, v), generate(schedule, p, m, v)
    pace, half, step = [float(table.pace_s[one]) for one in at], {}, [0.0] * p
    for c, one in enumerate(at):
        step[places[c][0]] += float(table.step_s[one])
        if c + 1 < len(at):
            entry = 0.0 if table.entry_s is None else float(table.entry_s[at[c + 1]])
            half[c, c + 1] = (float(table.transfer_s[one]) + entry) / 2 if places[c][0] != places[c + 1][0] else 0.0
    return simulate(run, [t / 3 for t in pace], [t * 2 / 3 for t in pace], half or None, step).makespan_s


def peaks(table: PipelineTable, stages: tuple[StageChoice, ...], schedule: str, p: int, v: int, m: int) -> list[float]:
    """Bytes of each group, action by action."""
    places, out = virtual_order(schedule, p, v), []
    where = {place: (s.option, s.first_layer, s.end_layer) for place, s in zip(places, stages)}
    for k, row in enumerate(generate(schedule, p, m, v).actions):
        mine = [where[k, c] for c in range(v)]
        now = most = 0.0
        for action in row:
            now += {"F": 1, "I": 0}.get(action.kind, -1) * table.saved[mine[action.chunk]]
            most = max(most, now)
        out.append(sum(table.resident[one] for one in mine) + most + max(table.transient[one] for one in mine))
    return out


@pytest.mark.parametrize("seed", range(4))
def test_divisions_are_the_most_even_of_all(seed):
    layers = 7
    pace = np.random.default_rng(seed).integers(1, 9, (layers, layers + 1)).astype(float)
    pace[np.tril_indices(layers)] = inf
    for cap in (5.0, 8.0):
        found = _Divisions(pace, cap)
        for count in (3, 6, 2, 4):  # in any order
            every = [(0, *cuts, layers) for cuts in combinations(range(1, layers), count - 1)]
            chunks = [[pace[at] for at in pairwise(cuts)] for cuts in every]
            least = min((sum(t * t for t in one) for one in chunks if max(one) <= cap), default=inf)
            if least < inf:
                taken = [pace[at] for at in pairwise(found.cuts(count))]
                assert len(taken) == count
                assert max(taken) <= cap
                assert sum(t * t for t in taken) == least


@pytest.mark.parametrize(("schedule", "v"), FAMILIES)
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
                if p > 1:
                    mine = [q for q, place in enumerate(virtual_order(schedule, p, v)) if place[0] == k]
                    wanted = np.array(
                        [concurrent_microbatches(schedule, p, m, v)[q] for q in mine]
                    )  # in the order of the chunks
                    assert wanted.min() >= 1
                    assert any((times >= wanted).all() for times in seen), (p, m, k)


def every_division(table: PipelineTable, index: int, count: int, constraints: StageConstraints):
    layers = range(1, table.num_layers)
    for inner in combinations(layers, count - 1):
        if set(inner) >= constraints.boundaries and not set(inner) & constraints.forbidden:
            cuts = [0, *inner, table.num_layers]
            if all(isfinite(table.pace_s[index, i, j]) for i, j in pairwise(cuts)):
                yield cuts


def check(table: PipelineTable, one: Pipeline, schedule: str, m: int) -> None:
    p, v = len(one.peak_bytes), one.chunks
    assert one.peak_bytes == pytest.approx(peaks(table, one.stages, schedule, p, v, m))
    assert max(np.subtract(one.peak_bytes, one.limit_bytes)) <= 0
    assert one.estimate_s <= clock(table, one.stages, schedule, p, v, m) * (1 + 1e-9)
    assert one.estimate_s <= one.path_s * (1 + 1e-9)
    if table.entry_s is None:
        simulated = clock(table, one.stages, schedule, p, v, m)
        assert clock_seconds(table, m, schedule, one) == pytest.approx(simulated, rel=1e-9 if m <= 4 * p else 0.02)
    transient = [float(table.transient[s.option, s.first_layer, s.end_layer]) for s in one.stages]
    homes = [group for group, _ in virtual_order(schedule, p, v)]
    for group, peak in enumerate(one.peak_bytes):  # chunks' transients are not held together
        mine = [k for k, home in enumerate(homes) if home == group]
        together = sum(one.chunk_bytes[k] - transient[k] for k in mine) + max(transient[k] for k in mine)
        assert together == pytest.approx(peak)
    offsets = [stage.device_offset for stage in one.stages]
    assert len(set(offsets)) == p


@pytest.mark.parametrize(("schedule", "v"), FAMILIES)
def test_fits_is_at_most_the_clock_and_above_the_bound(schedule, v):
    rng = np.random.default_rng(3)
    outcomes = {"solved": 0, "memory": 0, "layout": 0, "optimal": 0, "lifted": 0}
    for _ in range(50):
        layers, devices, m = int(rng.integers(4, 8)), int(rng.integers(2, 5)), int(rng.integers(1, 10))
        table = random_table(rng, layers, devices, int(rng.integers(1, 3)), 2, m)
        options = [replace(o, limit_bytes=tuple(3 * x for x in o.limit_bytes)) for o in table.options]
        floors = replace(table.floors, options=tuple(options[::2]))
        table = replace(table, options=tuple(options), floors=floors)
        constraints = StageConstraints(frozenset({2})) if rng.random() < 0.2 else StageConstraints()
        found = solve_chunked(table, m, schedule, (v,), constraints)
        fastest = inf
        for index, option in enumerate(table.options):
            offsets = _offsets(option)
            for p in range(2, len(offsets) + 1):
                places = virtual_order(schedule, p, v)
                for cuts in every_division(table, index, p * v, constraints):
                    stages = tuple(StageChoice(i, j, index, offsets[g]) for (g, _), i, j in zip(places, cuts, cuts[1:]))
                    limits = [option.limit(offset) for offset in offsets[:p]]
                    if all(a <= b for a, b in zip(peaks(table, stages, schedule, p, v, m), limits)):
                        fastest = min(fastest, clock(table, stages, schedule, p, v, m))
        if isinstance(found, PipelineSolution):
            for one in found.pipelines:
                check(table, one, schedule, m)
            quick = quick_bound(table.floors, m, constraints)
            assert quick <= fastest * (1 + 1e-9)
            for most in (inf, 1.5 * fastest, 0.9 * fastest):
                bound = chunk_bound(table.floors, m, schedule, (v,), constraints, most)
                assert min(quick, most) * (1 - 1e-9) <= bound <= min(fastest, most) * (1 + 1e-9)
            outcomes["lifted"] += bound > quick * (1 + 1e-6)
            faster = solve_chunked(table, m, schedule, (v,), constraints, most=found.best.estimate_s * (1 + 1e-9))
            assert isinstance(faster, PipelineSolution)
            assert faster.best.estimate_s == pytest.approx(found.best.estimate_s)
            best = min(clock(table, one.stages, schedule, len(one.peak_bytes), v, m) for one in found.pipelines)
            assert fastest <= best * (1 + 1e-9)
            outcomes["solved"] += 1
            outcomes["optimal"] += best <= fastest * 1.05
        elif isfinite(found.missing_bytes):
            assert isinstance(found, InfeasiblePipeline)
            extra = found.missing_bytes
            more = [replace(o, limit_bytes=tuple(x + extra for x in o.limit_bytes)) for o in table.options]
            assert isinstance(
                solve_chunked(replace(table, options=tuple(more)), m, schedule, (v,), constraints), PipelineSolution
            )
            outcomes["memory"] += 1
        else:
            assert fastest == inf
            outcomes["layout"] += 1
    assert outcomes["solved"] >= 10, outcomes
    assert outcomes["optimal"] >= outcomes["solved"] // 2, outcomes
    assert outcomes["memory"] + outcomes["layout"] >= 2, outcomes
    assert outcomes["lifted"] >= 1, outcomes


def test_bad_arguments():
    table = random_table(np.random.default_rng(0), 4, 4, 1, 1, 4)
    with pytest.raises(ValueError, match="interleaved or zb-v, but got '1f1b'"):
        solve_chunked(table, 4, "1f1b")
