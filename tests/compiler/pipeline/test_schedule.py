"""Schedules: what holds for every family, broken ones, the clock, text and picture."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.compiler.errors import ScheduleError
from meshwright.compiler.pipeline.families import generate, in_flight_formula, known_schedules
from meshwright.compiler.pipeline.schedule import Action, Schedule, in_flight, parse, parse_action, problems, validate
from meshwright.compiler.pipeline.simulate import grid, legend, longest_path, simulate

SIZES = {"p": st.integers(1, 8), "m": st.integers(1, 20), "name": st.sampled_from(known_schedules())}
WHOLE = {**SIZES, "name": st.sampled_from(("gpipe", "1f1b"))}  # one chunk per stage, whole backwards


def schedule_of(*rows: str, m: int) -> Schedule:
    return parse(f"made-by-hand stages={len(rows)} microbatches={m}\n" + "\n".join(rows))


@given(**SIZES, data=st.data())
def test_every_family_is_sound_over_any_stage_graph(p, m, name, data):
    schedule = generate(name, p, m)
    pairs = list(combinations(range(schedule.num_virtual), 2))
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    assert problems(schedule) == []
    assert problems(schedule, edges) == []
    assert parse(schedule.text()) == schedule
    full = generate(name, p, max(m, p)) if name == "pipedream" else schedule  # its next step's microbatches follow
    assert in_flight(full) == tuple(in_flight_formula(name, s, p, m) for s in range(p))


@pytest.mark.parametrize(
    ("name", "chunks"), [(name, None) for name in known_schedules()] + [("interleaved", 3), ("interleaved", 4)]
)
def test_no_family_deadlocks_with_1_to_8_stages_and_1_to_17_microbatches(name, chunks):
    for p in range(1, 9):
        for m in range(1, 18):
            schedule = generate(name, p, m, chunks)
            assert problems(schedule) == [], (p, m)
            last = schedule.num_virtual - 1  # and with a tensor from the first chunk to the last
            assert problems(schedule, [*pairwise(range(last + 1)), *([(0, last)] if last else [])]) == [], (p, m)


@given(**WHOLE, f=st.integers(1, 9), b=st.integers(1, 9))
def test_equal_stages_take_m_plus_p_minus_1_slots(p, m, name, f, b):
    run = simulate(generate(name, p, m), [f] * p, [b] * p)
    assert run.makespan_s == (m + p - 1) * (f + b)
    assert run.busy_s == (m * (f + b),) * p
    assert run.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@settings(max_examples=60)
@given(**WHOLE, data=st.data())
def test_the_clock_keeps_order_and_messages(p, m, name, data):
    seconds = st.lists(st.integers(0, 9), min_size=p, max_size=p)
    forward, backward, end = data.draw(seconds), data.draw(seconds), data.draw(seconds)
    hop, skip = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 30))
    transfers = {(s, s + 1): hop for s in range(p - 1)}
    if p > 2:
        transfers[0, p - 1] = skip
    back = {edge: 2 * cost for edge, cost in transfers.items()}
    run = simulate(generate(name, p, m), forward, backward, transfers, end, back)
    times = {action: (start, stop) for row in run.timeline for start, stop, action in row}
    assert len(times) == 2 * p * m
    for row in run.timeline:
        assert all(one[1] <= other[0] for one, other in pairwise(row))
    for (src, dst), cost in transfers.items():
        for k in range(m):
            assert times[Action(dst, "F", k)][0] >= times[Action(src, "F", k)][1] + cost
            assert times[Action(src, "B", k)][0] >= times[Action(dst, "B", k)][1] + 2 * cost
    # A critical path through any one stage bounds every schedule from below.
    for s in range(p):
        around = sum(forward[:s]) + sum(backward[:s]) + 3 * hop * s
        assert run.pipeline_s >= around + m * (forward[s] + backward[s])
    assert run.makespan_s == max(row[-1][1] + extra for row, extra in zip(run.timeline, end))
    assert run.step_end_s == tuple(row[-1][1] + extra for row, extra in zip(run.timeline, end))


def test_one_microbatch_takes_the_sum_of_all_stages_and_transfers():
    run = simulate(generate("1f1b", 3, 1), [1, 2, 3], [4, 5, 6], {(0, 1): 0.5, (1, 2): 0.25})
    assert run.makespan_s == 21 + 2 * 0.75


def test_a_slow_link_carries_one_message_at_a_time():
    run = simulate(generate("gpipe", 2, 4), [1, 1], [1, 1], {(0, 1): 10}, backward_transfers_s={(0, 1): 0})
    starts = [start for start, _, action in run.timeline[1] if action.kind == "F"]
    assert starts == [11, 21, 31, 41]


def test_a_skip_edge_delays_its_reader_alone():
    plain = simulate(generate("gpipe", 3, 1), [1] * 3, [1] * 3, {(0, 1): 0, (1, 2): 0})
    skipped = simulate(generate("gpipe", 3, 1), [1] * 3, [1] * 3, {(0, 1): 0, (1, 2): 0, (0, 2): 7})
    assert [row[0][0] for row in plain.timeline] == [0, 1, 2]
    assert [row[0][0] for row in skipped.timeline] == [0, 1, 8]


def test_an_empty_graph_of_edges_means_the_chain_only_where_none_is_given():
    # Stage 1 has no edge here: it starts at once, as in an encoder-decoder whose stages do not all feed each other.
    run = simulate(generate("gpipe", 3, 1), [1] * 3, [1] * 3, {(0, 2): 0})
    assert [row[0][0] for row in run.timeline] == [0, 0, 1]


def test_a_deadlock_is_found_and_told():
    # Stage 0 wants the gradient of microbatch 0 before it sends 1; stage 1 wants 1 first.
    broken = schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", m=2)
    assert problems(broken) == ["deadlock: 0B0 waits for 1B0, 1F1 waits for 0F1"]
    with pytest.raises(ScheduleError, match="0B0 waits for 1B0"):
        validate(broken)
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(broken, [1, 1], [1, 1])
    assert problems(broken, edges=[]) == []


def test_a_deadlock_through_a_skip_edge_only():
    rows = ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1")
    assert problems(schedule_of(*rows, m=2), edges=[(1, 2)]) == []
    assert "deadlock" in problems(schedule_of(*rows, m=2), edges=[(0, 2), (1, 2)])[0]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), "0B1 is missing"),
        (("0F0 0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), "0F0 twice"),
        (("0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1"), "0B0 before 0F0"),
        (("0F0 0F1 0F2 0B0 0B1", "1F0 1B0 1F1 1B1"), "but got 0F2"),
        (("1F0 1B0 1F1 1B1", "1F0 1B0 1F1 1B1"), "but got 1F0"),
        (("0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0"), "F number 0 is of microbatch 0 on stage 0 and of 1 on stage 1"),
        (("0F0 0F1 0I1 0W1 0B0", "1F0 1F1 1B0 1B1"), "B number 0 is of microbatch 1 on stage 0 and of 0 on stage 1"),
        (("0F0 0F1 0B0 0I0 0B1", "1F0 1B0 1F1 1B1"), "a backward is B, or I and W, but got 0B0 and 0I0"),
        (("0F0 0F1 0I0 0B1", "1F0 1B0 1F1 1B1"), "0W0 is missing"),
        (("0F0 0F1 0W0 0B1", "1F0 1B0 1F1 1B1"), "0I0 is missing"),
        (("0F0 0F1 0W0 0I0 0B1", "1F0 1B0 1F1 1B1"), "I comes before W, but stage 0 does 0W0 before 0I0"),
        (("0F0 0F1 0B0 0B1c1", "1F0 1B0 1F1 1B1"), "but got 0B1c1"),
    ],
)
def test_what_is_wrong_is_named(rows, sentence):
    assert any(sentence in problem for problem in problems(schedule_of(*rows, m=2)))


@given(p=st.integers(2, 5), m=st.integers(2, 6), data=st.data())
def test_swapping_a_backward_with_its_forward_is_never_sound(p, m, data):
    schedule = generate("1f1b", p, m)
    stage, k = data.draw(st.integers(0, p - 1)), data.draw(st.integers(0, m - 1))
    row = list(schedule.actions[stage])
    one, other = row.index(Action(stage, "F", k)), row.index(Action(stage, "B", k))
    row[one], row[other] = row[other], row[one]
    rows = (*schedule.actions[:stage], tuple(row), *schedule.actions[stage + 1 :])
    with pytest.raises(ScheduleError):
        validate(replace(schedule, actions=rows))


@pytest.mark.parametrize("text", ["2f0", "F0", "2F", "2F-1", "2X0", "2F0c", "2F0c0", "2F0c01", ""])
def test_bad_action_text(text):
    with pytest.raises(ValueError, match="an action is"):
        parse_action(text)


def test_bad_text_and_names_and_sizes():
    assert parse_action("12B34") == Action(12, "B", 34)
    assert parse_action("2I0c1") == Action(2, "I", 0, 1)
    with pytest.raises(ValueError, match="a placement is one of loop, vee, but got 'snake'"):
        parse("x stages=1 microbatches=1 chunks=2 placement=snake\n0F0")
    with pytest.raises(ValueError, match="starts with 'NAME stages=P"):
        parse("1f1b")
    with pytest.raises(ValueError, match="1 lines for 2 stages"):
        parse("1f1b stages=2 microbatches=1\n0F0 0B0")
    with pytest.raises(ValueError, match=r"gpipe, 1f1b, eager-1f1b, interleaved, zb-h1, zb-v, pipedream, but got 'zb'"):
        generate("zb", 2, 2)
    with pytest.raises(ValueError, match="at least one stage"):
        generate("1f1b", 0, 2)
    with pytest.raises(ValueError, match="'interleaved' has at least 2 chunks per stage, but got 1"):
        generate("interleaved", 2, 2, 1)
    with pytest.raises(ValueError, match="'zb-h1' has 1 chunk per stage, but got 2"):
        generate("zb-h1", 2, 2, 2)
    with pytest.raises(ValueError, match="to a later one"):
        problems(generate("1f1b", 2, 2), edges=[(1, 0)])
    with pytest.raises(ValueError, match="one entry per stage"):
        simulate(generate("1f1b", 2, 2), [1], [1, 1])
    with pytest.raises(ValueError, match="backward_s has one entry per stage and chunk, but got 2 for 4"):
        simulate(generate("zb-v", 2, 2), [1] * 4, [1] * 2)
    with pytest.raises(ValueError, match="end_of_step_s has one entry per stage, but got 4"):
        simulate(generate("zb-v", 2, 2), [1] * 4, [1] * 4, end_of_step_s=[0] * 4)


def test_picture_of_1f1b():
    assert grid(generate("1f1b", 2, 3), width=24).splitlines() == [
        "stage 0 01··₀₀2₁₁·₂₂",
        "stage 1 ·0₀₀1₁₁2₂₂··",
    ]


def test_picture_of_halves_and_chunks():
    assert grid(generate("zb-h1", 2, 3), width=30).splitlines() == [
        "stage 0 0011··⁰⁰₀₀22¹¹₁₁²²₂₂",
        "stage 1 ··00⁰⁰11¹¹₀₀22²²₁₁₂₂",
    ]
    schedule = generate("zb-v", 2, 3)
    clock = simulate(schedule, [1] * 4, [2] * 4, end_of_step_s=[1, 0])
    assert grid(schedule, clock, width=36).splitlines() == [
        "stage 0.0 012      ⁰₀   ¹₁²₂=",
        "stage 0.1    0⁰₀1¹₁  2²₂    =",
        "stage 1.0 ·0 1   2⁰₀   ¹ ²₁ ₂",
        "stage 1.1 · 0 1⁰₀   2¹₁ ²  ₂ ",
    ]


def test_the_legend_names_what_the_picture_shows():
    start, end = "large digits: forward of that microbatch (mod 10), ", "· idle, = end-of-step work"
    halves = "raised: backward of inputs, lowered: backward of weights, "
    assert legend(generate("1f1b", 2, 3)) == f"{start}small: backward, {end}"
    assert legend(generate("zb-h1", 2, 3)) == start + halves + end
    assert legend(generate("zb-v", 2, 3)) == f"{start}{halves}{end}, a row per chunk of the stage"


def test_picture_shows_end_of_step_work_and_modulo_ten():
    schedule = generate("gpipe", 2, 11)
    lines = grid(schedule, simulate(schedule, [1, 1], [1, 1], end_of_step_s=[2, 1]), width=40).splitlines()
    assert lines == ["stage 0 01234567890··₀₁₂₃₄₅₆₇₈₉₀==", "stage 1 ·01234567890₀₁₂₃₄₅₆₇₈₉₀=··"]


@given(**SIZES, width=st.integers(24, 140))
def test_a_picture_never_exceeds_its_width(p, m, name, width):
    schedule = generate(name, p, m)
    lines = grid(schedule, width=width).splitlines()
    assert len(lines) == schedule.num_virtual
    assert len({len(line) for line in lines}) == 1
    assert max(map(len, lines)) <= width


def test_a_long_schedule_keeps_both_ends():
    lines = grid(generate("1f1b", 4, 1000), width=60).splitlines()
    assert all("…" in line for line in lines)
    assert lines[0].startswith("stage 0 0123·")
    assert lines[0].endswith("·₉₉")


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)])
def test_the_longest_path_takes_the_makespan_and_bounds_others(name, chunks):
    draw, schedule = random.Random(name), generate(name, 3, 7, chunks if chunks > 1 else None)
    num = schedule.num_virtual

    def seconds():
        f, i, w = ([draw.uniform(0.1, 2.0) for _ in range(num)] for _ in range(3))
        ahead, back = ({edge: draw.uniform(0.0, 1.0) for edge in pairwise(range(num))} for _ in range(2))
        return (
            {"F": f, "B": [one + other for one, other in zip(i, w)], "I": i, "W": w},
            ahead,
            back,
            [draw.uniform(0.0, 6.0) for _ in range(3)],
        )

    def makespan(of, ahead, back, ends):
        return simulate(schedule, of["F"], of["B"], ahead, ends, back, of["W"]).makespan_s

    def along(path, of, ahead, back, ends):
        every = {(kind, q): t for kind, some in [*of.items(), ("end", ends)] for q, t in enumerate(some)}
        every |= {("forward", edge): t for edge, t in ahead.items()} | {
            ("backward", edge): t for edge, t in back.items()
        }
        return sum(number * every[what] for what, number in path.items())

    for _ in range(5):
        first, other = seconds(), seconds()
        path = longest_path(schedule, *first)
        assert along(path, *first) == pytest.approx(makespan(*first))
        assert along(path, *other) <= makespan(*other) * (1 + 1e-9)
