"""The published figures of the schedule families: bubbles, memory, order; each by the clock or by counting."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.compiler.pipeline.families import generate, in_flight_formula, known_schedules, virtual_order
from meshwright.compiler.pipeline.schedule import Action, Schedule, in_flight, problems
from meshwright.compiler.pipeline.simulate import Simulation, simulate

P, M, V = st.integers(1, 8), st.integers(1, 24), st.integers(2, 4)


def clock(schedule: Schedule, forward: int = 1, inputs: int = 1, weights: int = 1) -> Simulation:
    """Equal actions per chunk, free messages."""
    num = schedule.num_virtual
    return simulate(schedule, [forward] * num, [inputs + weights] * num, backward_weight_s=[weights] * num)


def bubble(run: Simulation) -> Fraction:
    """Idle seconds of the slowest stage over its work."""
    return Fraction(run.makespan_s) / max(run.busy_s) - 1


@pytest.mark.parametrize(
    ("name", "p", "m", "chunks", "published"),
    [
        ("gpipe", 4, 8, 1, Fraction(3, 8)),
        ("1f1b", 4, 8, 1, Fraction(3, 8)),
        ("interleaved", 4, 8, 2, Fraction(3, 2 * 8)),
        ("interleaved", 4, 8, 4, Fraction(3, 4 * 8)),
        ("zb-h1", 4, 8, 1, Fraction(3, 3 * 8)),
        ("zb-v", 4, 8, 2, Fraction(3, 6 * 8)),
        ("zb-v", 8, 64, 2, Fraction(7, 6 * 64)),
    ],
)
def test_the_published_bubbles(name, p, m, chunks, published):
    assert bubble(clock(generate(name, p, m, chunks))) == published


@given(p=P, more=M, v=V, f=st.integers(1, 5), b=st.integers(1, 5))
def test_interleaved_waits_for_a_chunk_of_the_other_stages_whatever_the_microbatches(p, more, v, f, b):
    m = p + more - 1
    run = clock(generate("interleaved", p, m, v), f, 0, b)
    assert run.makespan_s == (m * v + p - 1) * (f + b)


@given(p=P, m=M, v=V)
def test_interleaved_with_fewer_microbatches_than_stages(p, m, v):
    m = min(m, p)
    assert clock(generate("interleaved", p, m, v)).makespan_s == (p * v + m - 1) * 3  # p stages, v times, one behind


@given(p=P, groups=st.integers(1, 4), v=V)
def test_interleaved_is_the_order_of_megatron_for_multiples_of_the_stages(p, groups, v):
    m = p * groups
    schedule = generate("interleaved", p, m, v)
    for s, row in enumerate(schedule.actions):
        forwards = [a for a in row if a.kind == "F"]
        backwards = [a for a in row if a.kind == "B"]
        turns = [(n // (p * v) * p + n % p, n % (p * v) // p) for n in range(m * v)]
        assert [(a.microbatch, a.chunk) for a in forwards] == turns
        assert [(a.microbatch, a.chunk) for a in backwards] == [(k, v - 1 - c) for k, c in turns]
        warm = min(m * v, 2 * (p - s - 1) + (v - 1) * p)
        kinds = "".join(a.kind for a in row)
        assert kinds == "F" * warm + "FB" * (m * v - warm) + "B" * warm


@given(p=P, more=M)
def test_zero_bubble_reaches_its_bound(p, more):
    m = p + more - 1
    # Every stage has 3m slots of work; the last one begins at p − 1.
    assert clock(generate("zb-h1", p, m)).makespan_s == 3 * m + p - 1
    assert clock(generate("zb-v", p, m)).makespan_s == 6 * m + p - 1


@given(p=P, more=M)
def test_zb_v_has_no_pause_between_first_and_last_action(p, more):
    run = clock(generate("zb-v", p, 2 * p - 2 + more))
    assert all(one[1] == other[0] for row in run.timeline for one, other in pairwise(row))


@given(p=P, m=M)
def test_zero_bubble_holds_what_1f1b_holds_on_its_first_stage(p, m):
    most = max(in_flight(generate("1f1b", p, m)))
    assert in_flight(generate("zb-h1", p, m)) == (most,) * p
    assert in_flight(generate("zb-v", p, m)) == (2 * most,) * p  # chunks, half a stage each


@given(p=P, m=M, v=V, name=st.sampled_from(known_schedules()))
def test_sound_and_held_as_the_formula_says(p, m, v, name):
    schedule = generate(name, p, m, v if name == "interleaved" else None)
    assert problems(schedule) == []
    v = schedule.chunks
    full = generate(name, p, max(m, p)) if name == "pipedream" else schedule  # its next step's microbatches follow
    assert in_flight(full) == tuple(in_flight_formula(name, s, p, m, v) for s in range(p))
    assert virtual_order(name, p, v) == schedule.places()


@given(p=P, m=M, name=st.sampled_from(known_schedules()))
def test_no_order_beats_its_bounds(p, m, name):
    """One microbatch through the whole model and back; all the work of one stage behind the way to it."""
    schedule = generate(name, p, m)
    run, num = clock(schedule), schedule.num_virtual
    split = any(a.kind == "I" for a in schedule.actions[0])
    assert run.makespan_s >= num + num * (1 if split else 2)
    assert run.makespan_s >= 3 * m * schedule.chunks + p - 1
    assert run.busy_s == (3 * m * schedule.chunks,) * p


@given(p=P, m=M, f=st.integers(1, 6), i=st.integers(1, 6), w=st.integers(1, 6))
def test_splitting_the_backward_never_hurts(p, m, f, i, w):
    whole = clock(generate("1f1b", p, m), f, i, w).makespan_s
    assert clock(generate("zb-h1", p, m), f, i, w).makespan_s <= whole


def test_where_the_chunks_lie():
    assert virtual_order("1f1b", 3) == ((0, 0), (1, 0), (2, 0))
    assert virtual_order("interleaved", 2, 3) == ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    assert virtual_order("zb-v", 3) == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))


def test_the_loss_of_a_vee_is_on_the_first_stage():
    row = generate("zb-v", 4, 8).actions[0]
    assert row[row.index(Action(0, "F", 0, 1)) + 1] == Action(0, "I", 0, 1)


def test_messages_between_chunks_cost_and_one_inside_a_stage_is_free():
    schedule = generate("zb-v", 2, 1)
    free = simulate(schedule, [1] * 4, [2] * 4, {(0, 1): 0, (1, 2): 0, (2, 3): 0})
    slow = simulate(schedule, [1] * 4, [2] * 4, {(0, 1): 5, (1, 2): 0, (2, 3): 7}, backward_transfers_s={
        (0, 1): 1, (1, 2): 0, (2, 3): 2,
    })  # fmt: skip
    assert slow.makespan_s == free.makespan_s + 5 + 7 + 1 + 2


def test_unlike_chunks_and_halves_on_the_clock():
    # Two chunks on one stage, forwards 1 and 2, I 3 and 4, W 5 and 6: all the work, one after another.
    run = simulate(generate("zb-v", 1, 1), [1, 2], [8, 10], backward_weight_s=[5, 6], end_of_step_s=[0.5])
    order = {str(action): (start, end) for start, end, action in run.timeline[0]}
    assert order["0F0"] == (0, 1)
    assert order["0F0c1"] == (1, 3)
    assert order["0I0c1"] == (3, 7)
    assert (run.pipeline_s, run.makespan_s, run.busy_s) == (21, 21.5, (21,))
