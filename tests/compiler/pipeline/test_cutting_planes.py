"""The least makespan of a schedule over all seconds of its actions."""

from itertools import pairwise

import numpy as np
import pytest
from meshwright.compiler.pipeline import cutting_planes
from meshwright.compiler.pipeline.cutting_planes import least_makespan
from meshwright.compiler.pipeline.families import generate
from meshwright.compiler.pipeline.simulate import simulate
from ortools.math_opt.python import mathopt

CASES = [("1f1b", 3, 5, 1), ("interleaved", 2, 4, 3), ("zb-h1", 3, 6, 1), ("zb-v", 2, 5, 2), ("zb-v", 4, 6, 2)]


def clock(schedule, kinds, seconds, ahead, back):
    """Seconds of a step by ``simulate``."""
    actions, ends = np.split(seconds, [-schedule.num_stages])
    forward, *rest = actions.reshape(len(kinds), -1)
    edges = list(pairwise(range(len(forward))))
    weights = rest[1] if len(rest) > 1 else 0 * forward
    return simulate(
        schedule, forward, sum(rest), dict(zip(edges, ahead)), ends, dict(zip(edges, back)), weights
    ).makespan_s


def problem(name, p, m, v, seed):
    """(schedule, kinds, least seconds, seconds of messages ahead, back) with random seconds."""
    rng = np.random.default_rng(seed)
    kinds = "FIW" if name.startswith("zb") else "FB"
    return (
        generate(name, p, m, v),
        kinds,
        rng.uniform(0.5, 1.5, len(kinds) * p * v + p),
        *rng.uniform(0.0, 0.6, (2, p * v - 1)),
    )


def and_ends(schedule, rows):
    """These rows of the seconds of actions, and one of the end of the step of each stage."""
    ends = np.eye(schedule.num_stages)
    return np.block([[rows, np.zeros((len(rows), len(ends)))], [np.zeros((len(ends), rows.shape[1])), ends]])


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_clock_of_least_seconds_that_may_all_be_reached(case):
    schedule, kinds, least, ahead, back = problem(*case, seed=1)
    found = least_makespan(schedule, kinds, 2 * least, np.eye(len(least)), least, ahead, back, 60)
    seconds = clock(schedule, kinds, least, ahead, back)
    assert 0.999 * seconds <= found <= seconds


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_least_clock_where_only_sums_are_known(case):
    """Of the seconds of a virtual stage in all, and of two of its actions."""
    schedule, kinds, likely, ahead, back = problem(*case, seed=2)
    one = np.eye(schedule.num_virtual)
    rows = and_ends(schedule, np.concatenate([np.tile(one, len(kinds)), np.kron([[1, 1, 0][: len(kinds)]], one)]))
    least = rows @ likely
    found = least_makespan(schedule, kinds, likely, rows, least, ahead, back, 200)
    assert found <= clock(schedule, kinds, likely, ahead, back)
    rng = np.random.default_rng(3)
    best, best_s, virtual = likely, np.inf, schedule.num_virtual
    for turn in range(3000):  # a random walk: seconds go from one action of a virtual stage to another
        x, moved = best.copy(), rng.uniform(0, 1 / (1 + turn / 300))
        one, other = rng.choice(len(kinds), 2, replace=False)
        x[one * virtual + (q := rng.integers(virtual))] -= moved
        x[other * virtual + q] += moved
        if (x >= 0).all() and (rows @ x >= least - 1e-12).all():
            seconds = clock(schedule, kinds, x, ahead, back)
            best, best_s = (x, seconds) if seconds <= best_s else (best, best_s)
    assert found <= best_s
    assert found >= 0.995 * best_s


def test_every_round_gives_a_bound():
    schedule, kinds, likely, ahead, back = problem("zb-v", 4, 8, 2, seed=4)
    rows = and_ends(schedule, np.tile(np.eye(schedule.num_virtual), 3))
    found = [least_makespan(schedule, kinds, likely, rows, rows @ likely, ahead, back, n) for n in (1, 5, 20, 100)]
    assert found == sorted(found)
    assert found[0] < 0.99 * found[-1]


def test_no_more_rounds_are_played_than_what_is_asked_takes(monkeypatch):
    schedule, kinds, likely, ahead, back = problem("zb-v", 4, 8, 2, seed=4)
    rows = and_ends(schedule, np.tile(np.eye(schedule.num_virtual), 3))
    asked = schedule, kinds, likely, rows, rows @ likely, ahead, back, 100
    least_s, original, rounds = least_makespan(*asked), cutting_planes.longest_path, []
    monkeypatch.setattr(cutting_planes, "longest_path", lambda *of: rounds.append(of) or original(*of))
    played = []
    for share in (0.9, 0.97, 2.0):
        found = least_makespan(*asked, share * least_s)
        assert min(share, 1.0) * least_s <= found <= least_s
        played.append(len(rounds))
        rounds.clear()
    assert played[0] < played[1] < played[2]


def test_a_solver_that_gives_up_leaves_the_bound_of_the_rounds_before(monkeypatch):
    schedule, kinds, likely, ahead, back = problem("zb-v", 4, 8, 2, seed=4)
    rows = and_ends(schedule, np.tile(np.eye(schedule.num_virtual), 3))
    asked = schedule, kinds, likely, rows, rows @ likely, ahead, back
    expected, rounds = least_makespan(*asked, 5), []
    original = mathopt.IncrementalSolver.solve

    def solve(self):
        rounds.append(self)
        if len(rounds) > 5:  # what OR-tools 9.15 makes of ABNORMAL
            raise AttributeError("'StatusNotOk' object has no attribute 'canonical_code'")
        return original(self)

    monkeypatch.setattr(mathopt.IncrementalSolver, "solve", solve)
    assert least_makespan(*asked, 100) == expected > 0
    assert len(rounds) == 6
