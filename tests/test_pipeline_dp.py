"""Stages by dynamic programming: against every pipeline of small tables, the clock, and known answers."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf, isfinite

import numpy as np
import pytest
from meshwright.compiler.pipeline_bound import candidate_makespan
from meshwright.compiler.pipeline_dp import describe_pipeline, solve
from meshwright.compiler.pipeline_table import (
    Constraints,
    Floors,
    Infeasible,
    Lagrange,
    PipelineTable,
    Solution,
    StageChoice,
    StageOption,
)
from meshwright.compiler.schedule import generate, in_flight_formula
from meshwright.compiler.simulate import simulate

FAMILIES = ("1f1b", "gpipe", "zb-h1")


def random_options(rng: np.random.Generator, devices: int, shapes: int, levels: int) -> list[StageOption]:
    """Submeshes with gaps between their offsets; devices of several sizes of memory; each at several levels."""
    limit = np.full(devices, float(rng.integers(4, 40)))
    if rng.random() < 0.5:  # a second pool
        limit[rng.integers(0, devices) :] += rng.integers(0, 12)
    options = []
    for shape in range(shapes):
        n = int(rng.integers(1, min(devices, 3) + 1))
        offsets = [d for d in range(devices - n + 1) if rng.random() < 0.85]
        limits = tuple(float(limit[d : d + n].min()) for d in offsets)
        options += [StageOption(n, tuple(offsets), limits, shape, level) for level in range(levels)]
    return options


def random_table(
    rng: np.random.Generator, layers: int, devices: int, shapes: int, levels: int, m: int
) -> PipelineTable:
    """Integer seconds and bytes, so that sums are exact; memory often binds; floors of all the levels of a shape."""
    options = random_options(rng, devices, shapes, levels)
    shape = (len(options), layers, layers + 1)
    first, end = np.indices(shape[1:])
    length = np.maximum(end - first, 0)
    count = np.array([option.num_devices for option in options])[:, None, None]
    level = np.array([option.level for option in options])[:, None, None]
    pace = np.ceil(length * 24 / count**0.6 * (1 + 0.2 * level)) + rng.integers(0, 8, shape)
    pace = np.where(rng.random((shapes, layers, layers + 1)).repeat(levels, axis=0) < 0.05, inf, 3 * pace)
    resident = np.ceil(length * rng.integers(1, 6, shape) / (1 + level))
    saved = np.ceil(length * rng.integers(0, 4, shape) / (1 + level))
    transient, step = rng.integers(0, 4, shape).astype(float), rng.integers(0, 30, shape).astype(float)
    transfer = 2.0 * rng.integers(0, 12, shape)
    entry = 2.0 * rng.integers(0, 6, shape) if rng.random() < 0.3 else None

    def least(array: np.ndarray) -> np.ndarray:
        return array.reshape(shapes, levels, layers, layers + 1).min(axis=1)

    rows = []
    for byte, saved_byte, whole in ((0.5, 0.5, False), (4.0, 1.0, True), (1.0, 6.0, False)):
        value = pace + (step / m if whole else 0.0) + byte * resident + saved_byte * saved
        rows.append(Lagrange(byte, saved_byte, least(value), whole))
    floors = Floors(
        tuple(options[::levels]), least(pace), least(pace + step / m), least(step), least(transfer), least(transient),
        1 / 3, 1 / 3, tuple(rows),
    )  # fmt: skip
    return PipelineTable(
        layers, devices, tuple(options), pace, transfer, step, resident, saved, transient, entry, floors=floors
    )


def every_pipeline(table: PipelineTable, constraints: Constraints) -> Iterator[tuple[StageChoice, ...]]:
    """All pipelines at any memory limit, whatever devices stay idle."""
    least, most = constraints.stages

    def rest(layer: int, device: int, count: int) -> Iterator[tuple[StageChoice, ...]]:
        if layer == table.num_layers and count >= least:
            yield ()
        for end in range(layer + 1, table.num_layers + 1):
            spans = any(layer < cut < end for cut in constraints.boundaries)
            if spans or {layer, end} & constraints.forbidden or (most is not None and count >= most):
                continue
            for index, option in enumerate(table.options):
                if isfinite(table.pace_s[index, layer, end]):
                    for offset in option.offsets:
                        if offset >= device:
                            for tail in rest(end, offset + option.num_devices, count + 1):
                                yield (StageChoice(layer, end, index, offset), *tail)

    return rest(0, 0, 0)


def over_the_limit(table: PipelineTable, stages: tuple[StageChoice, ...], schedule: str, m: int) -> float:
    return max(
        table.peak(stage, in_flight_formula(schedule, k, len(stages), m))
        - table.options[stage.option].limit(stage.device_offset)
        for k, stage in enumerate(stages)
    )


def objectives(table: PipelineTable, stages: tuple[StageChoice, ...], m: int, schedule: str) -> tuple[float, float]:
    """W and T as the docstring of the pass states them; under zb-h1 a third of the pace fills (f = i = w)."""
    path, total, slowest = 0.0, 0.0, 0.0
    share = 1 / 3 if schedule == "zb-h1" else 1.0
    for k in reversed(range(len(stages))):
        at = (stages[k].option, stages[k].first_layer, stages[k].end_layer)
        t, last = table.pace_s[at], k == len(stages) - 1
        x = 0.0 if last else table.transfer_s[at]
        e = 0.0 if k == 0 or table.entry_s is None else table.entry_s[at]
        path = e + max(m * t, share * t + x + path)
        total, slowest = total + e + share * t + x, max(slowest, t)
    step = table.step_s[stages[0].option, 0, stages[0].end_layer]
    return path + step, total + (m - share) * slowest + step


def clock(table: PipelineTable, stages: tuple[StageChoice, ...], schedule: str, m: int) -> float:
    """The simulated makespan: a third of a pace forward, as much for I and for W, half of a message each way."""
    pace = [table.pace_s[stage.option, stage.first_layer, stage.end_layer] for stage in stages]
    step = [table.step_s[stage.option, stage.first_layer, stage.end_layer] for stage in stages]
    half = {}
    for k, (stage, after) in enumerate(zip(stages, stages[1:])):
        entry = 0.0 if table.entry_s is None else table.entry_s[after.option, after.first_layer, after.end_layer]
        half[k, k + 1] = (table.transfer_s[stage.option, stage.first_layer, stage.end_layer] + entry) / 2
    run = generate(schedule, len(stages), m)
    return simulate(run, [t / 3 for t in pace], [t * 2 / 3 for t in pace], half or None, step).makespan_s


def meshes(table: PipelineTable, stages: tuple[StageChoice, ...]) -> tuple[tuple[int, ...], ...]:
    options = table.options
    return tuple((s[0], s[1], options[s.option].num_devices, options[s.option].shape) for s in stages)


def random_constraints(rng: np.random.Generator, layers: int) -> Constraints:
    cuts = list(rng.permutation(np.arange(1, layers)))
    kind = rng.integers(4)
    if kind == 0 and cuts:
        return Constraints(boundaries=frozenset({int(cuts[0])}), forbidden=frozenset(map(int, cuts[1:2])))
    if kind == 1 and layers > 1:
        least = int(rng.integers(1, layers))
        return Constraints(stages=(least, least if rng.random() < 0.5 else least + 1))
    return Constraints()


def check_figures(table: PipelineTable, found: Solution, m: int, schedule: str) -> None:
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
        constraints = constraints if possible else Constraints()
        best: dict[tuple[tuple[int, ...], ...], float] = {}
        latency = least = free = fastest = inf
        for stages in every_pipeline(table, constraints):
            over, (path, total) = over_the_limit(table, stages, schedule, m), objectives(table, stages, m, schedule)
            least, free = min(least, max(over, 0.0)), min(free, path)
            if over <= 0:
                key = meshes(table, stages)
                best[key] = min(best.get(key, inf), path)
                latency, fastest = min(latency, total), min(fastest, clock(table, stages, schedule, m))
        found = solve(table, m, schedule, constraints, top_k=5, slack=inf, visits=10**6)
        if not best:
            assert isinstance(found, Infeasible), (case, found)
            assert found.missing_bytes == least, (case, found)
            outcomes["memory" if isfinite(least) else "layout"] += 1
            if isfinite(least):
                options = [replace(o, limit_bytes=tuple(x + least for x in o.limit_bytes)) for o in table.options]
                more = solve(replace(table, options=tuple(options), floors=None), m, schedule, constraints)
                assert isinstance(more, Solution)
                assert found.missing_bytes == found.needed_bytes - found.limit_bytes
            continue
        assert isinstance(found, Solution), (case, found)
        assert found.complete
        check_figures(table, found, m, schedule)
        expected = sorted(best.values())
        assert found.path_s == pytest.approx(expected[0]), case
        got: dict[tuple[tuple[int, ...], ...], float] = {}
        for one in found.pipelines:
            key = meshes(table, one.stages)
            got[key] = min(got.get(key, inf), one.path_s)
        assert sorted(got.values())[:5] == pytest.approx(expected[:5]), case
        assert min(one.latency_s for one in found.pipelines) <= latency * 1.002, case
        assert found.bound_s <= fastest * (1 + 1e-9), case
        outcomes["solved"] += 1
        outcomes["binding"] += free < expected[0]
        outcomes["tight"] += found.bound_s >= 0.9 * fastest
        outcomes["several"] += len(expected) >= 5
    print(outcomes)
