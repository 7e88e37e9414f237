"""The inter-operator pass: against brute force on random tables, on known answers, and its speed on a large one."""

import time
from dataclasses import replace
from math import inf, isfinite

import numpy as np
import pytest
from meshwright.compiler.inter_op import Infeasible, Pipeline, StageTable, solve
from meshwright.compiler.schedule import generate, in_flight
from meshwright.compiler.simulate import simulate
from oracles import brute_force_pipeline


def random_table(rng: np.random.Generator, layers: int, devices: int, options: int) -> StageTable:
    """Integer seconds and bytes, so that sums are exact; sharding pays less than pipelining, and memory often binds."""
    shape = (options, layers, layers + 1)
    first, end = np.indices(shape[1:])
    length = np.maximum(end - first, 0)
    count = rng.integers(1, min(devices, int(rng.integers(1, 5))) + 1, options)
    size = count[:, None, None]
    work = np.concatenate([[0], np.cumsum(rng.integers(10, 30, layers))])
    seconds = np.ceil((work[end] - work[first]) / size**0.4) + rng.integers(0, 12, shape)
    seconds = np.where(rng.random(shape) < 0.1, inf, seconds)
    kept = np.ceil(length / np.where(rng.random(options) < 0.5, 1, count)[:, None, None])
    resident = kept * rng.integers(2, 8, shape)
    saved = kept * rng.integers(0, 4, shape)
    transient = rng.integers(0, 4, shape).astype(float)
    admissible = rng.random((options, devices)) < rng.choice([0.7, 0.9, 1.0])
    limit = np.full(devices, float(np.ceil(layers * rng.uniform(2, 12))))
    if rng.random() < 0.4:
        limit = np.where(np.arange(devices) < devices // 2, limit, limit + rng.integers(0, 10))
    return StageTable(layers, devices, count, seconds, resident, saved, transient, admissible, limit)


def check(table: StageTable, found: Pipeline, m: int, schedule: str, fill: bool) -> None:
    """Every constraint and figure of a solution, from the raw arrays."""
    layer = device = idle = 0
    total = slowest = 0.0
    held = in_flight(generate(schedule, len(found.stages), m))
    assert found.in_flight == held
    for k, (first, end, option, offset) in enumerate(found.stages):
        n = table.devices[option]
        assert first == layer < end
        assert offset >= device
        assert offset + n <= table.num_devices
        assert table.admissible[option, offset]
        idle += offset - device
        need = (
            table.resident_bytes[option, first, end]
            + held[k] * table.saved_bytes[option, first, end]
            + table.transient_bytes[option, first, end]
        )
        assert need == found.peak_bytes[k]
        assert need <= min(table.limit_bytes[offset : offset + n]) == found.limit_bytes[k]
        total += table.seconds[option, first, end]
        slowest = max(slowest, table.seconds[option, first, end])
        layer, device = end, offset + n
    assert layer == table.num_layers
    assert found.idle_devices == idle + table.num_devices - device
    assert not (fill and found.idle_devices)
    assert found.objective_s == total + (m - 1) * slowest


def test_agrees_with_brute_force_on_random_tables():
    rng = np.random.default_rng(7)
    kinds: dict[str, int] = {}
    lengths: dict[int, int] = {}
    binding = 0
    for case in range(400):
        devices = int(rng.choice([1, 2, 3, 4, 5, 6]) if case % 3 else rng.choice([3, 6]))
        table = random_table(rng, min(5, int(rng.integers(1, 8))), devices, int(rng.integers(1, 5)))
        m = int(rng.integers(1, 13))
        schedule = str(rng.choice(["1f1b", "gpipe"]))
        fill = bool(rng.random() < 0.3)
        most = min(table.num_layers, devices)
        stages = int(rng.integers(1, most + 1))
        limits = [{}, {"num_stages": stages}, {"max_stages": stages}][int(rng.integers(3))]
        arguments = {"schedule": schedule, "require_all_devices": fill, **limits}
        expected_s, missing = brute_force_pipeline(table, m, **arguments)
        found = solve(table, m, epsilon=0.0, **arguments)
        kind = "solved" if isfinite(expected_s) else "memory" if isfinite(missing) else "layout"
        kinds[kind] = kinds.get(kind, 0) + 1
        if kind == "solved":
            assert isinstance(found, Pipeline), (case, found)
            assert found.objective_s == found.bound_s == expected_s, case
            check(table, found, m, schedule, fill)
            lengths[len(found.stages)] = lengths.get(len(found.stages), 0) + 1
            free = solve(replace(table, limit_bytes=table.limit_bytes + 1000), m, epsilon=0.0, **arguments)
            binding += free.objective_s < found.objective_s
            rough = solve(table, m, epsilon=0.2, **arguments)
            assert rough.bound_s <= expected_s <= rough.objective_s
            assert rough.gap <= 0.2
        else:
            assert isinstance(found, Infeasible), (case, found)
            assert found.missing_bytes == missing, case
            if found.nearest:
                assert found.missing_bytes == found.needed_bytes - found.limit_bytes > 0
                assert found.choice == found.nearest[found.stage]
                enough = replace(table, limit_bytes=table.limit_bytes + found.missing_bytes)
                assert isinstance(solve(enough, m, **arguments), Pipeline)
                less = replace(table, limit_bytes=table.limit_bytes + found.missing_bytes - 1)
                assert isinstance(solve(less, m, **arguments), Infeasible)
    # The cases are of use only if every outcome is common, pipelines have many stages, and memory binds.
    assert set(kinds) == {"solved", "memory", "layout"}
    assert min(kinds.values()) >= 30, kinds
    assert kinds["solved"] >= 200, kinds
    assert sum(n for stages, n in lengths.items() if stages > 1) >= 100, lengths
    assert max(lengths) == 5, lengths
    assert binding >= 30, binding


def even_table(layers: int, devices: int, sizes: list[int], host: int, limit: float = inf, saved: float = 0.0):
    """Layers of one second and one byte each that split perfectly; starts are multiples of the size, or of a host."""
    first, end = np.indices((layers, layers + 1))
    length = np.maximum(end - first, 0).astype(float)
    size = np.array(sizes)
    work = length[None] / size[:, None, None]
    starts = np.arange(devices)
    admissible = np.array([starts % (n if n < host else host) == 0 for n in sizes])
    zero = np.zeros_like(work)
    return StageTable(
        layers, devices, size, work, work.copy(), saved * work, zero, admissible, np.full(devices, float(limit))
    )


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 7])
def test_without_limits_one_stage_on_all_devices_wins(devices):
    found = solve(even_table(6, devices, list(range(1, devices + 1)), host=devices), 8, epsilon=0.0)
    assert [(c.first_layer, c.end_layer, c.device_offset) for c in found.stages] == [(0, 6, 0)]
    assert found.objective_s == pytest.approx(8 * 6 / devices)


def test_three_devices_that_cannot_be_joined_make_three_equal_stages():
    found = solve(even_table(6, 3, [1], host=1), 12, epsilon=0.0)
    assert [tuple(c) for c in found.stages] == [(0, 2, 0, 0), (2, 4, 0, 1), (4, 6, 0, 2)]
    assert found.objective_s == 6 + 11 * 2
    # The objective is what the clock says of equal stages.
    assert simulate(generate("1f1b", 3, 12), [0.5] * 3, [1.5] * 3).makespan_s == found.objective_s


def test_six_devices_on_three_hosts_of_two():
    found = solve(even_table(6, 6, [2], host=2), 12, epsilon=0.0)
    assert [c.device_offset for c in found.stages] == [0, 2, 4]
    assert found.idle_devices == 0


def test_in_flight_memory_moves_layers_to_the_end_under_1f1b_only():
    # Stage 0 of 2 holds two microbatches: 3 bytes a layer there and 2 in the last stage; GPipe holds all eight.
    table = even_table(6, 2, [1], host=1, limit=9.0, saved=1.0)
    early = solve(table, 8, epsilon=0.0)
    assert [c.end_layer - c.first_layer for c in early.stages] == [3, 3]
    assert early.peak_bytes == (9.0, 6.0)
    tight = solve(replace(table, limit_bytes=np.full(2, 8.0)), 8, epsilon=0.0)
    assert [c.end_layer - c.first_layer for c in tight.stages] == [2, 4]
    gpipe = solve(table, 8, schedule="gpipe", epsilon=0.0)
    assert isinstance(gpipe, Infeasible)
    assert gpipe.missing_bytes == 3 * 9 - 9


def test_a_slower_option_is_taken_where_the_fast_one_does_not_fit():
    table = even_table(4, 2, [1, 1], host=1, limit=9.0, saved=3.0)
    slow = table.seconds.copy()
    slow[1] *= 1.25  # recompute: more seconds, nothing saved
    saved = table.saved_bytes.copy()
    saved[1] = 0
    found = solve(replace(table, seconds=slow, saved_bytes=saved), 8, num_stages=2, epsilon=0.0)
    assert [c.option for c in found.stages] == [1, 0]


def test_devices_stay_idle_only_where_allowed():
    table = even_table(2, 3, [1], host=1)
    assert solve(table, 4).idle_devices == 1
    refused = solve(table, 4, require_all_devices=True)
    assert isinstance(refused, Infeasible)
    assert "all in use" in str(refused)
    assert refused.missing_bytes == inf


def test_small_memory_of_one_device_steers_the_stage_elsewhere():
    table = replace(even_table(2, 3, [1], host=1), limit_bytes=np.array([0.5, 1.0, 2.0]))
    found = solve(table, 1, epsilon=0.0)
    assert [c.device_offset for c in found.stages] == [2]


def test_infeasible_names_the_stage_and_the_bytes():
    found = solve(even_table(8, 2, [1, 2], host=2, limit=3.0), 4)
    assert isinstance(found, Infeasible)
    assert found.missing_bytes == 1.0
    assert (found.needed_bytes, found.limit_bytes) == (4.0, 3.0)
    assert "1 bytes are missing" in str(found)
    assert isinstance(solve(even_table(8, 2, [1, 2], host=2, limit=4.0), 4), Pipeline)


def test_a_layer_that_no_option_runs_is_named():
    table = even_table(3, 2, [1], host=1)
    seconds = table.seconds.copy()
    seconds[:, :2, 2:] = inf
    found = solve(replace(table, seconds=seconds), 2)
    assert str(found) == "no option can run layers 1 on 2 devices"


def test_bad_arguments():
    table = even_table(3, 2, [1], host=1)
    with pytest.raises(ValueError, match="at least one microbatch"):
        solve(table, 0)
    with pytest.raises(ValueError, match="from 1 to 2"):
        solve(table, 1, num_stages=3)
    with pytest.raises(ValueError, match="max_stages is at least 1"):
        solve(table, 1, max_stages=0)
    with pytest.raises(ValueError, match="but got 'chimera'"):
        solve(table, 1, schedule="chimera")
    with pytest.raises(ValueError, match="limit_bytes has shape"):
        replace(table, limit_bytes=np.ones(3))
    with pytest.raises(ValueError, match="seconds is not negative"):
        replace(table, seconds=-table.seconds)
    with pytest.raises(ValueError, match="resident_bytes is not negative, but got nan"):
        replace(table, resident_bytes=table.seconds * np.nan)


def large_table(layers: int, devices: int, variants: int) -> StageTable:
    """Uneven layers, ``variants`` options per power of two of devices, hosts of eight, memory that binds on few."""
    rng = np.random.default_rng(0)
    sizes = [2**e for e in range(devices.bit_length()) for _ in range(variants)]
    work = np.concatenate([[0.0], np.cumsum(rng.uniform(0.8, 1.2, layers))])
    first, end = np.indices((layers, layers + 1))
    length = np.maximum(end - first, 0)
    base = np.where(length > 0, work[end] - work[first], inf)
    columns = []
    for n in sizes:
        kept = rng.uniform(0.3, 1.0)
        noise = 1 + 0.03 * rng.random(base.shape)
        seconds = base / (n**0.95 * rng.uniform(0.55, 0.95)) * noise + 0.002
        columns.append(
            (
                seconds,
                length * (1 + 3 * kept) / n ** rng.uniform(0.5, 1),
                length * 0.3 * (1.2 - kept) / n,
                0.5 + 0 * length,
            )
        )
    starts = np.arange(devices)
    admissible = np.array([starts % min(n, 8) == 0 for n in sizes])
    seconds, resident, saved, transient = (np.array(column) for column in zip(*columns))
    return StageTable(
        layers, devices, np.array(sizes), seconds, resident, saved, transient, admissible, np.full(devices, 12.0)
    )


def test_a_hundred_layers_on_64_devices_take_about_a_second(capsys):
    table = large_table(100, 64, 9)
    assert len(table.devices) == 63
    for m in (8, 64, 1024):
        begin = time.process_time()
        found = solve(table, m)
        seconds = time.process_time() - begin
        with capsys.disabled():
            print(
                f"\nL=100 D=64 63 options m={m}: {seconds:.2f} s, {found.sweeps} sweeps, "
                f"{len(found.stages)} stages, gap {found.gap:.1e}"
            )
        assert found.gap <= 1e-4
        assert isfinite(found.objective_s)
        exact = solve(table, m, epsilon=0.0)
        assert found.bound_s <= exact.objective_s == exact.bound_s <= found.objective_s
        assert seconds < 5.0  # 0.4 s alone on a core; generous, as the machine is shared
