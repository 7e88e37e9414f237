"""Forked work: its answers are those of this process, whatever becomes of the child, and so are plans."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import meshwright as mw
import numpy as np
import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.intra_op.vectorised import interval_tables
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search import driver
from meshwright.compiler.search.driver import make_plans
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.state import PurePlan, SearchState
from meshwright.compiler.workers import ForkedTask, run_all
from meshwright.costmodel.cluster import Cluster
from meshwright.models import GPT

from tests.support.planning import request_of


def squares(number: int) -> tuple[int, np.ndarray]:
    return os.getpid(), np.arange(number) ** 2


def test_a_child_answers_what_this_process_would() -> None:
    child, found = ForkedTask(partial(squares, 300_000), True).result()  # more than a pipe holds
    here, expected = ForkedTask(partial(squares, 300_000), False).result()
    assert child != here == os.getpid()
    assert (found == expected).all()


def test_works_are_shared_and_keep_their_order() -> None:
    works = [partial(squares, number) for number in (2, 3, 4)]
    assert [pid == os.getpid() for pid, _ in run_all(works)] == [True, False, False]
    assert [len(found) for _, found in run_all(works)] == [2, 3, 4]


def test_what_both_processes_have_is_not_copied() -> None:
    table, other = np.zeros(3), np.ones(3)
    _, (same, copy) = run_all([partial(list, ()), lambda: [table, other]], common=[table])
    assert same is table
    assert copy is not other
    assert (copy == other).all()


def test_what_a_child_cannot_say_is_made_here() -> None:
    def work() -> int:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    parent = os.getpid()
    assert ForkedTask(work, True).result() == parent


def test_where_a_child_cannot_compute_gradients_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor) -> None:  # as torch does where an accelerator is present
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    assert ForkedTask(os.getpid, True).result() == os.getpid()


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """TimeoutError after so many seconds, wherever this process is then."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def test_a_child_may_run_what_this_process_ran_on_several_threads(alarm: Callable[[float], None]) -> None:
    def work() -> int:
        return int(torch.repeat_interleave(torch.full((200_000,), 3)).sum())

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = work()  # starts the threads
        forked = ForkedTask(work, True)
        alarm(30.0)
        try:
            assert forked.result() == expected
        finally:
            forked.drop()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_who_was_interrupted_while_waiting_may_drop_the_child_or_wait_again(alarm: Callable[[float], None]) -> None:
    def work() -> tuple[int, np.ndarray]:
        time.sleep(1.0)
        return squares(300_000)

    for go_on in ("drop", "result"):
        forked = ForkedTask(work, True)
        alarm(0.2)
        with pytest.raises(TimeoutError):
            forked.result()
        found = getattr(forked, go_on)()
        assert found is None or found[0] != os.getpid()
        forked.drop()  # of nobody


@pytest.mark.skipif(sys.platform != "linux", reason="where a parent's end kills its children")
def test_children_of_a_child_end_with_it(alarm: Callable[[float], None]) -> None:
    def inner() -> None:
        os.write(ends[1], b"x")
        time.sleep(60)

    ends = os.pipe()
    task = ForkedTask(lambda: run_all([partial(time.sleep, 60), inner]), True)
    os.close(ends[1])
    alarm(30.0)
    assert os.read(ends[0], 1) == b"x"
    task.drop()
    assert os.read(ends[0], 1) == b""  # nobody is left to write
    os.close(ends[0])


def test_an_answer_is_awaited_no_longer_than_one_says() -> None:
    def work() -> int:
        os.read(ends[0], 1)
        return os.getpid()

    ends = os.pipe()
    task = ForkedTask(work, True)
    assert not task.ready(0.05)
    os.write(ends[1], b"x")
    assert task.ready(inf)
    assert task.result() != os.getpid()
    assert task.ready(0.0)
    for end in ends:
        os.close(end)


def test_alternatives_are_not_awaited_after_the_time_limit(small: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(search: SearchState, forks: bool) -> dict[str, PurePlan]:
        time.sleep(60)
        return {}

    def hurried(search: SearchState, plan: Plan) -> list[dict[str, Any]]:
        assert search.pure_task is not None
        search.deadline = time.perf_counter() + 0.1
        return compare(search, plan)

    compare = driver.compare_pure_plans
    monkeypatch.setattr(driver, "_pure_plans", slow)
    monkeypatch.setattr(driver, "compare_pure_plans", hurried)
    request = request_of(32, alternatives=True, workers=2, time_limit_s=3600.0)
    (plan,) = make_plans(small, Cluster.parse("p3.16xlarge:1"), request)
    assert plan.prediction.alternatives == ()
    assert any("the time limit passed while alternatives were looked for" in note for note in plan.prediction.notes)


def test_what_the_work_raises_is_raised_here() -> None:
    def work() -> None:
        raise ValueError("a rule, but got a fault")

    with pytest.raises(ValueError, match="but got a fault"):
        ForkedTask(work, True).result()


def test_a_dropped_child_is_gone() -> None:
    one = ForkedTask(partial(time.sleep, 100), True)
    child = one._child
    one.drop()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    one.drop()  # nobody is left


def test_a_child_outlives_an_interrupt() -> None:
    def work() -> str:
        time.sleep(0.2)
        return "done"

    one = ForkedTask(work, True)
    time.sleep(0.1)
    os.kill(one._child, signal.SIGINT)
    answer = one._receive()
    assert answer


@pytest.mark.parametrize("asked", [{}, {"schedule": "gpipe", "top_k": 2}], ids=["auto", "several"])
def test_plans_do_not_depend_on_the_workers(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval_tables, "FORKED_CELLS", 2**20)
    with torch.device("meta"):
        model = GPT(vocab=64, layers=4, hidden=32, heads=2, sequence=16)
        tokens = torch.zeros(64, 16, dtype=torch.int64)
    plans = [
        mw.plan(model, "p3.16xlarge:1", example_inputs=(tokens, tokens), cache=False, workers=workers, **asked)
        for workers in (1, 2)
    ]
    alone, shared = ([replace(p, provenance={}) for p in (found if "top_k" in asked else [found])] for found in plans)
    assert alone == shared
    assert alone[0].prediction.bound_s > 0


@pytest.fixture(scope="module")
def small() -> Graph:
    with torch.device("meta"):
        model = GPT(vocab=64, layers=4, hidden=32, heads=2, sequence=16)
        tokens = torch.zeros(64, 16, dtype=torch.int64)
    return capture(model, (tokens, tokens))


def test_pure_plans_far_behind_are_not_built(small: Graph) -> None:
    cluster = Cluster.parse("p3.16xlarge:1")
    (plan,) = make_plans(small, cluster, request_of(64, alternatives=True))
    data, tensor, _ = plan.prediction.alternatives
    assert tensor["step_s"] is None
    assert "too slow to be built" in tensor["why"]
    assert _step_s(small, cluster, None, "tp8") > 0.95 * driver.MAX_PURE_RATIO * data["step_s"]


def test_alternatives_are_the_plans_of_pure_strategies_at_their_simulated_seconds(
    small: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "MAX_PURE_RATIO", inf)
    graph, cluster = small, Cluster.parse("p3.16xlarge:1")
    (plan,) = make_plans(graph, cluster, request_of(64, alternatives=True))
    said = {one["name"]: one["step_s"] for one in plan.prediction.alternatives}
    assert {name for name, step_s in said.items() if step_s} >= {"data", "tensor"}
    for name, text in (("data", "dp8"), ("tensor", "tp8"), ("pipeline", "pp8")):
        if said[name]:
            asked = (None, *(m for m in (1, 2, 4, 8, 16, 32, 64) if name != "pipeline" or m >= 8))
            steps = {m: _step_s(graph, cluster, m, text) for m in asked}
            assert steps[None] == pytest.approx(said[name], rel=1e-9)
            assert said[name] <= min(steps.values()) * (1 + 1e-3), (name, steps)
            assert plan.prediction.step_s <= said[name] * (1 + 1e-9)


def _step_s(graph: Graph, cluster: Cluster, m: int | None, strategy: str) -> float:
    try:
        (plan,) = make_plans(graph, cluster, request_of(64, m, parse_strategy(strategy)))
    except ValueError:  # microbatches that it cannot cut
        return inf
    return plan.prediction.step_s
