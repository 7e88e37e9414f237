"""The profile: the engine keeps its budget, ops and groups have their forms, and real ranks agree on one cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from meshwright.costmodel import op_timing
from meshwright.costmodel.cluster import Cluster, Mesh
from meshwright.costmodel.op_grid import coarse, grid, op_task, surfaces_of
from meshwright.costmodel.op_timing import fact_tasks, stopwatch, timed
from meshwright.costmodel.profiled import op_times_of
from meshwright.costmodel.profiler import NO_TIME, Engine, ProfileState, Task, TaskRecord, Visit
from meshwright.runtime.profiling import message_probes, probes
from meshwright.runtime.profiling.probes import group_forms, send_forms

from tests.support.ranks import RankPool


# ---- the engine
class Clock:
    """Time that passes only when something is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def task(self, key: str, seconds: Callable[[], float], work: float = 1.0, cost: float | None = None) -> Task:
        def visit() -> Visit:
            taken = seconds()
            self.now += taken if cost is None else cost
            return [taken], 1

        return Task(f"{key}/{work:.0f}", key, work, lambda: visit)


def test_the_budget_is_kept_and_what_it_leaves_out_is_recorded() -> None:
    clock = Clock()
    tasks = [clock.task(f"a{k}", lambda: 1.0) for k in range(10)]
    state = ProfileState("here")
    Engine(state, clock=clock).run(tasks, 4.5)
    assert 4.0 <= clock.now <= 5.5
    assert set(state.records) == {f"a{k}/1" for k in range(5)}
    assert state.skipped == {f"a{k}/1": NO_TIME for k in range(5, 10)}


def test_a_size_that_would_not_fit_is_left_out_and_a_smaller_one_is_not() -> None:
    clock = Clock()
    line = [clock.task("wire", lambda w=w: 0.1 * w, work=w) for w in (1.0, 4.0, 400.0)]
    state = ProfileState("here")
    Engine(state, clock=clock).run([*line, clock.task("other", lambda: 0.5)], 5.0)
    assert clock.now <= 5.0
    assert set(state.records) == {"wire/1", "wire/4", "other/1"}


def test_visits_are_interleaved_so_a_disturbance_does_not_move_the_median() -> None:
    clock = Clock()

    def seconds() -> float:
        return 50.0 if 4.0 <= clock.now < 60.0 else 1.0

    state = ProfileState("here")
    Engine(state, clock=clock).run([clock.task(f"a{k}", seconds) for k in range(4)], 1000.0, visits=3)
    assert clock.now > 60  # the disturbance happened
    assert all(state.seconds(f"a{k}/1") == (1.0,) for k in range(4))


def test_of_two_visits_the_one_that_nothing_disturbed_counts() -> None:
    assert TaskRecord([[9.0, 1.0], [2.0, 3.0]], 2).medians() == (2.0, 1.0)


def test_an_op_is_timed_while_it_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process on the core is like a sleep: the clock goes on, the op does not."""
    pause = partial(time.sleep, 0.05)
    for threads, counted in ((1, False), (2, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert (stopwatch(torch.device("cpu"))(pause) >= 0.05) == counted


def test_the_end_of_memory_skips_that_size_and_larger_ones() -> None:
    clock, tried = Clock(), []

    def task(work: float) -> Task:
        def make() -> Callable[[], Visit]:
            tried.append(work)
            if work >= 4:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate too much")
            return lambda: ([work], 1)

        return Task(f"op/{work:.0f}", "op", work, make)

    state = ProfileState("here")
    Engine(state, clock=clock).run([task(w) for w in (1.0, 2.0, 4.0, 8.0)], 100.0, visits=2)
    assert tried == [1.0, 2.0, 4.0, 1.0, 2.0]
    assert set(state.records) == {"op/1", "op/2"}
    assert state.skipped["op/4"] == "out of memory at 4"
    assert "out of memory" in state.skipped["op/8"]


def test_memory_that_ends_on_another_rank_skips_the_size_here_too() -> None:
    state, answers = ProfileState("here"), iter([[0.0, 0.0], [1.0]])
    task = Task("op/1", "op", 1.0, lambda: lambda: ([1.0], 1))
    Engine(state, agree=lambda values: next(answers)).run([task], 100.0, visits=1)
    assert not state.records
    assert "out of memory" in state.skipped["op/1"]


def test_other_errors_are_not_swallowed() -> None:
    def make() -> Callable[[], Visit]:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        Engine(ProfileState("here")).run([Task("op/1", "op", 1.0, make)], 100.0)


def test_an_interrupted_profile_continues_and_measures_nothing_twice(tmp_path: Path) -> None:
    clock, calls = Clock(), count()
    interrupted = {"at": 3}

    def seconds() -> float:
        if next(calls) == interrupted["at"]:
            raise KeyboardInterrupt
        return 3.0

    tasks = [clock.task(f"a{k}", seconds) for k in range(5)]
    path = tmp_path / "c.json.partial"
    with pytest.raises(KeyboardInterrupt):
        Engine(ProfileState("here"), clock=clock, save=lambda state: state.save(path)).run(tasks, 100.0, visits=1)
    state = ProfileState.load(path)
    assert set(state.records) == {"a0/1", "a1/1", "a2/1"}
    interrupted["at"], before = -1, next(calls)
    Engine(state, clock=clock).run(tasks, 100.0, visits=1)
    assert next(calls) - before - 1 == 2
    assert set(state.records) == {f"a{k}/1" for k in range(5)}
    assert ProfileState.from_json(state.to_json()) == state


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "meshwright-cluster", "schema": 1}'])
def test_a_foreign_state_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.partial").write_text(text)
    with pytest.raises(ValueError, match=r"x\.partial: a profile that was interrupted"):
        ProfileState.load(tmp_path / "x.partial")


# ---- ops


def test_an_op_is_timed_with_all_forwards_before_all_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log, numbers = Clock(), [], count()
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(op_timing, name, clock)

    class Fake:
        def __init__(self) -> None:
            self.number = next(numbers)

        def forward(self) -> None:
            log.append(("F", self.number))
            clock.now += 1e-4

        def backward(self) -> None:
            log.append(("B", self.number))
            clock.now += 3e-4

    monkeypatch.setattr(op_timing, "_entry_seconds", lambda device: 5e-5)
    visit = timed([lambda device: Fake()], torch.device("cpu"), 1e9, nbytes=1 << 24)
    del log[:]
    (forward, backward), samples = visit()
    assert (forward, backward) == (pytest.approx(1e-4), pytest.approx(2.5e-4))  # entering the engine costs 50 us
    sweep = [("F", 0), ("F", 1), ("F", 2), ("F", 3), ("B", 3), ("B", 2), ("B", 1), ("B", 0)]
    assert log == sweep * 3  # four instances of 16 MiB are beyond the cache
    assert samples == 12


def test_exact_ops_split_by_what_their_gradients_are_of() -> None:
    state = ProfileState("here")
    for signature, visit in {
        "aten.linear.default(f32[2,3]*, f32[4,3]^)": [1.0, 12.0, 5.0],
        "aten.embedding.default(f32[9,3]^, i64[2])": [1.0, 12.0, 0.0],
        "aten.relu.default(f32[2,3]*)": [1.0, 12.0, 0.0],
        "aten.eq.Tensor(f32[2,3])": [1.0, 12.0, 0.0],
    }.items():
        state.records[f"probe/{signature}"] = TaskRecord([visit], 3)
    found = [(t.forward_s, t.backward_input_s, t.backward_weight_s) for t in op_times_of(state, 2.0)]
    assert found == [(2.0, 10.0, 14.0), (2.0, 0.0, 24.0), (2.0, 24.0, 0.0), (2.0, 0.0, 0.0)]


def test_a_surface_is_the_full_grid_that_was_measured() -> None:
    ops, state = [op for op in grid("cpu") if op.sizes], ProfileState("here")
    for op in ops:
        state.records[op.key] = TaskRecord([[op.work, 2 * op.work]], 1)
    sizes = {surface.direction: len(surface.seconds) for surface in surfaces_of(ops, state)}
    assert sizes == {"forward": 27, "backward": 27}
    largest = max(ops, key=lambda op: op.work)
    del state.records[largest.key]
    forward, backward = surfaces_of(ops, state)
    assert len(forward.seconds) == 18
    assert all(a * 2 == b for a, b in zip(forward.seconds, backward.seconds))


def test_every_op_of_the_grid_runs_forward_and_backward() -> None:
    device, state = torch.device("cpu"), ProfileState("here")
    seen: dict[str, Task] = {}
    for op in grid("cpu"):
        seen.setdefault(op.name, op_task(op, device, 1e6))
    engine = Engine(state)
    engine.run([*seen.values(), *fact_tasks(device)], 60.0, visits=1)
    assert not state.skipped
    assert all(min(record.visits[0]) > 0 for record in state.records.values())


# ---- forms of groups


@pytest.mark.parametrize("hosts", [["a"] * 4, ["a"] * 2 + ["b"] * 2, ["a"] * 6, ["a"] * 4 + ["b"] * 4])
def test_every_axis_of_every_mesh_has_its_form(hosts: list[str]) -> None:
    known = {(form.size, form.members, form.groups) for form in group_forms(hosts)}
    assert len(known) == len(group_forms(hosts))
    cluster = Cluster.local(len(hosts))
    for size in range(2, len(hosts) + 1):
        for offset in range(0, len(hosts) - size + 1, size):
            for rows in (r for r in range(1, size + 1) if size % r == 0):
                mesh = Mesh.of(cluster, offset, (rows, size // rows))
                for axis, extent in enumerate(mesh.shape):
                    if extent > 1:
                        groups = mesh.groups(axis)
                        members = max(max([hosts[d] for d in g].count(h) for h in hosts) for g in groups)
                        assert (extent, members, len(groups)) in known


def test_transfers_are_told_apart_by_hosts_and_by_how_many_go_at_once() -> None:
    found = {(form.members, form.groups): form.sets for form in send_forms(["a", "a", "b", "b"])}
    assert found == {(2, 1): ((0, 1),), (1, 1): ((1, 2),), (1, 2): ((0, 2), (1, 3))}


# ---- real ranks


def profiled(
    folder: str, hosts: list[str] | None, budget_s: float = 60.0, pace_s: float | None = None
) -> tuple[str, bool]:
    """A profile of few sizes on this rank. pace_s: that each collective takes longer."""
    import torch.distributed as dist
    from meshwright.runtime.profiling import cluster_profile

    names = {
        "_COARSE_SIZES": (1024, 65536), "_FINE_SIZES": (8192,), "_VISITS": 1, "_REPEAT_VISITS": 0, "PACE_S": 5e-4,
        "grid": lambda kind: [op for op in coarse(grid(kind)) if op.kind in ("matmul", "pointwise")],
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:  # other tests have these ranks next
        for name, value in names.items():
            patch.setattr(cluster_profile, name, value)
        patch.setattr(cluster_profile.over_ranks, "OPTIMIZER_SIZES", ((4, 64), (2, 4096)))
        patch.setattr(cluster_profile.over_ranks, "CODED_LENGTHS", (1 << 10, 1 << 12))
        patch.setenv("MESHWRIGHT_CACHE_DIR", str(Path(folder) / "cache"))
        if hosts is not None:
            patch.setenv("MESHWRIGHT_HOST", hosts[dist.get_rank()])
        path = Path(folder) / "c.json"
        pace = None if pace_s is None else partial(time.sleep, pace_s)
        cluster = cluster_profile.profile(budget_s=budget_s, path=path, pace=pace)
        return cluster.to_json(), path.is_file() and not Path(f"{path}.partial").exists()


def alone(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> probes.Ranks:
    """A world of one rank without process groups, whose time is ``clock[0]``."""
    for module in (probes, message_probes):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    ranks = probes.Ranks.__new__(probes.Ranks)
    ranks.device, ranks.world, ranks.pace = torch.device("cpu"), 1, lambda: None
    return ranks


def test_one_slow_sample_does_not_make_a_collective_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seconds = [0.0], iter([0.25])

    def call() -> None:
        clock[0] += next(seconds, 0.002)

    ranks = alone(monkeypatch, clock)
    assert ranks._paced(call)[0] == pytest.approx([0.002])  # slow to connect
    seconds = iter([0.002, 0.25])
    (measured,), samples = ranks._paced(call)
    assert (measured, samples > 1) == (pytest.approx(0.002), True)


@pytest.mark.parametrize(("seconds", "most"), [(0.25, 3), (0.0, 20)])
def test_what_takes_long_is_measured_once(monkeypatch: pytest.MonkeyPatch, seconds: float, most: int) -> None:
    """32 MB over 100 Mbit/s take seconds: a dozen of them would leave no time for anything else."""
    clock = [0.0]
    ranks = alone(monkeypatch, clock)
    calls = []

    def call() -> None:
        calls.append(None)
        clock[0] += seconds

    class Pair:
        open = close = staticmethod(lambda: None)

        def turn(self, beside: Any, between: Any) -> float:
            call()
            between()
            return 0.0

        def exchange(self, beside: Any) -> None:
            call()
            beside()

    ((measured,), samples) = ranks._paced(call)
    assert measured == pytest.approx(seconds)
    assert (samples == 1, len(calls) <= most) == (seconds > 0, True)
    calls.clear()
    (measured, _), samples = message_probes.time_messages(ranks, Pair())
    assert measured == pytest.approx(seconds / 2, abs=1e-6)
    assert (samples == 1, len(calls) <= most) == (seconds > 0, True)


@pytest.mark.ranks
def test_slow_collectives_leave_time_for_ops(ranks: RankPool, tmp_path: Path) -> None:
    """The first takes more than the whole budget, and one size makes no price."""
    (text, _), _ = ranks.run(2, profiled, str(tmp_path), None, 0.5, 0.2)
    cluster = Cluster.from_json(text)
    assert not cluster.wires
    assert {dtype for dtype, _ in cluster.device(0).flops_per_s} >= {"float32"}


@pytest.mark.ranks
def test_two_ranks_make_one_cluster(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(2, profiled, str(tmp_path), None)
    assert results[0] == results[1]
    text, written = results[0]
    cluster = Cluster.from_json(text)
    assert written
    assert Cluster.load(tmp_path / "c.json") == cluster
    assert cluster.fingerprint() == Cluster.local(2).fingerprint()
    assert {wire.kind for wire in cluster.wires} >= {"send", "all_reduce", "all_gather", "all_to_all", "reduce_scatter"}
    assert all((wire.size, wire.members, wire.groups) == (2, 2, 1) for wire in cluster.wires)
    algorithms = {wire.algorithm for wire in cluster.wires if wire.kind == "all_reduce"}
    assert algorithms >= {"backend", "ring", "recursive_doubling", "two_step"}
    assert {wire.algorithm for wire in cluster.wires if wire.kind != "all_reduce"} == {"backend"}
    device = cluster.device(0)
    assert {"matmul", "pointwise"} <= {curve.kind for curve in device.curves}
    assert {(rate.name, rate.dtype) for rate in device.optimizers} >= {("AdamW", "float32"), ("AdamW", "bfloat16")}
    assert 0 <= device.overlap <= 1
    assert dict(cluster.provenance)["ranks"] == "2"
    assert not any("another" in warning for warning in cluster.validate())  # it is of this machine


@pytest.mark.ranks
def test_ranks_of_several_hosts_make_a_cluster_with_a_network(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(4, profiled, str(tmp_path), ["a", "a", "b", "b"])
    assert len({text for text, _ in results}) == 1
    cluster = Cluster.from_json(results[0][0])
    assert [host.num_devices for host in cluster.hosts] == [2, 2]
    assert cluster.link.name == "network"
    assert cluster.link.source.startswith("measured: send")
    assert {(wire.size, wire.members) for wire in cluster.wires} >= {(4, 2), (2, 1)}


def absent(timeout_s: float) -> str:
    """Rank 1 does not come to the roll call."""
    import torch.distributed as dist
    from meshwright.runtime.errors import MissingRankError
    from meshwright.runtime.transport.launch import await_all_ranks

    if dist.get_rank() == 1:
        return ""
    try:
        await_all_ranks("profiling", timeout_s)
    except MissingRankError as error:
        return str(error)
    return "nobody was missed"


@pytest.mark.ranks
def test_a_rank_that_does_not_answer_is_named(ranks: RankPool) -> None:
    first, _, third = ranks.run(3, absent, 0.5)
    assert first == third
    assert "no answer from rank 1 of 3 within 0.5 s" in first
