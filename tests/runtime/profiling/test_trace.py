"""The trace of a rank's steps: which steps are kept, outliers, and parts that make up the wall time."""

from __future__ import annotations

from time import perf_counter, sleep

import pytest
from meshwright.runtime.profiling.trace import Trace, middle_steps, rank_times


# ---- tracing
def step_of(trace: Trace, batches: int = 1, slow: bool = False) -> None:
    trace.begin()
    for _ in range(batches):
        with trace.call(batches=1):
            begin = trace.mark()
            if slow:
                sleep(0.02)
            arrived = trace.mark()
            trace.exchanged(arrived)
            done = trace.mark()
            trace.action("F0", begin, arrived, done, trace.mark())
            with trace.span("gradient"):
                pass
    with trace.call(), trace.span("optimizer"):
        pass
    trace.close()


def test_a_trace_keeps_the_last_steps_and_leaves_out_the_first() -> None:
    trace = Trace(keep=4)
    step_of(trace, slow=True)
    for _ in range(2):
        step_of(trace)
    times = rank_times(0, 0, trace.usable(), 1)
    assert times.steps == 2
    assert times.waiting_s < 0.02 < trace.steps()[0].actions[0].wait_s
    step_of(trace, batches=3, slow=True)  # accumulates: no step as the plan predicts it
    assert len(trace.usable()) == 2
    assert len(trace.steps()[-1].actions) == 3
    for _ in range(9):
        step_of(trace)
    assert trace.count == 13
    assert len(trace.steps()) == len(trace.usable()) == 4
    trace.enabled = False
    step_of(trace)
    assert trace.count == 13


def test_outliers_are_left_out_on_all_ranks_alike() -> None:
    walls = [[1.0, 1.1, 9.0, 1.2, 0.1, 1.3, 1.1], [1.0, 1.1, 1.2, 1.2, 0.1, 9.0, 1.0]]
    assert middle_steps(walls) == [1, 3, 6]
    assert middle_steps([[5.0, *rank] for rank in walls[:1]] + walls[1:]) == [
        1,
        3,
        6,
    ]  # one has a step more, at the front
    assert [len(middle_steps([[1.0] * n])) for n in range(9)] == [0, 1, 2, 1, 2, 3, 4, 3, 4]


def test_the_parts_of_a_step_make_up_its_wall_time() -> None:
    trace = Trace()
    started = perf_counter()
    step_of(trace, slow=True)
    (step,) = trace.steps()
    parts = [action.seconds for action in step.actions] + [step.gradient_s, step.peers_s, step.optimizer_s]
    assert sum(parts) + step.other_s == pytest.approx(step.wall_s)
    assert step.wall_s <= perf_counter() - started
    assert trace.usable() == [step]  # a single step stands for itself
    trace.begin()  # a step that fails is begun again and never closed
    with trace.call(batches=1):
        pass
    trace.begin()
    trace.close()
    assert trace.count == 1
