"""Brute force against the ILP against elimination, on random small problems; then limits, answers and time."""

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from meshwright.compiler.errors import TooWide
from meshwright.compiler.intra_op.solver import elimination_order
from meshwright.compiler.intra_op.solver.elimination import eliminate
from meshwright.compiler.intra_op.solver.ilp import solve_ilp
from meshwright.compiler.intra_op.solver.k_best import fastest_choices
from meshwright.compiler.intra_op.solver.lagrange import solve
from meshwright.compiler.intra_op.solver.presolve import simplify, without_fixed
from meshwright.compiler.intra_op.solver.problem import (
    Edge,
    InfeasibleAssignment,
    Operator,
    Problem,
    Solution,
    evaluate,
    improve,
    minimum_bytes_problem,
    restrict,
)
from ortools.math_opt.python import mathopt

from tests.oracles.assignment import brute_force_assignment


def labels(num_choices):
    return tuple(map(str, range(num_choices)))


def random_problem(seed):
    """2–6 operators of 1–4 choices; tensors with 0–3 consumers (repeats too), impossible entries, zeros and ties."""
    rng = np.random.default_rng(seed)
    num_operators = int(rng.integers(2, 7))
    whole = rng.random() < 0.3  # whole seconds make ties

    def seconds(shape):
        values = rng.integers(0, 4, shape).astype(float) if whole else rng.random(shape)
        return values * (rng.random(shape) > 0.2)

    operators = []
    for i in range(num_operators):
        num_choices = int(rng.integers(1, 5))
        cost, num_bytes = seconds(num_choices), np.floor(rng.random(num_choices) * 10)
        cost[rng.random(num_choices) < 0.03] = np.inf
        num_bytes[rng.random(num_choices) < 0.03] = np.inf
        operators.append(Operator(f"o{i}", labels(num_choices), cost, num_bytes))
    edges = []
    for i in range(num_operators - 1):
        sources, targets = rng.integers(1, 5, 2)
        consumers = rng.integers(i + 1, num_operators, rng.integers(0, 4))
        cost = seconds((sources, targets))
        cost[rng.random(cost.shape) < 0.15] = np.inf
        num_bytes = np.floor(rng.random(cost.shape) * 6) * (rng.random(cost.shape) > 0.2)
        num_bytes[rng.random(cost.shape) < 0.03] = np.inf
        wants = tuple((int(k), rng.integers(0, targets, len(operators[k].labels))) for k in consumers)
        edges.append(Edge(f"e{i}", i, rng.integers(0, sources, len(operators[i].labels)), wants, cost, num_bytes))
    problem = Problem(tuple(operators), tuple(edges))
    problem.check()
    return problem


def block(seed, num_operators, num_choices, fan_out=4):
    """A chain with branches and residual edges, the size of a transformer layer; identity reshards are free."""
    rng = np.random.default_rng(seed)
    operators = tuple(
        Operator(f"o{i}", labels(num_choices), rng.random(num_choices), np.floor(rng.random(num_choices) * 1e6))
        for i in range(num_operators)
    )
    edges = []
    for i in range(num_operators - 1):
        reach = [1, 5, 2, 3][:fan_out] if i % 6 == 0 and i + 5 < num_operators else [1]
        cost = rng.random((9, 8))
        cost[rng.random(cost.shape) < 0.1] = np.inf
        np.fill_diagonal(cost, 0.0)
        wants = tuple((i + r, rng.integers(0, 8, num_choices)) for r in reach)
        num_bytes = np.floor(rng.random(cost.shape) * 1e5)
        edges.append(Edge(f"e{i}", i, rng.integers(0, 9, num_choices), wants, cost, num_bytes))
    return Problem(operators, tuple(edges))


def limits_of(problem):
    """No limit; one that binds, if any can; the least bytes; one byte less."""
    free, lean = brute_force_assignment(problem), brute_force_assignment(minimum_bytes_problem(problem))
    if isinstance(free, InfeasibleAssignment):
        return [math.inf]
    return [math.inf, (free.bytes + lean.seconds) // 2, lean.seconds, lean.seconds - 1]


def assert_same(expected, found, problem, limit):
    assert type(found) is type(expected), (limit, expected, found)
    if isinstance(expected, InfeasibleAssignment):
        assert found.minimum_bytes == expected.minimum_bytes
        assert found.proven
        if found.choice is not None:
            assert evaluate(problem, found.choice) == (found.seconds, found.minimum_bytes)
            assert found.missing_bytes == expected.missing_bytes > 0
        return
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-9, abs=0)
    assert evaluate(problem, found.choice) == (found.seconds, found.bytes)
    assert found.bytes <= limit
    assert found.stop_reason == "optimal"
    assert found.gap == 0
    assert found.bound == found.seconds


@pytest.mark.parametrize("chunk", range(10))
def test_brute_force_equals_ilp_equals_elimination(chunk):
    seen = {Solution: 0, InfeasibleAssignment: 0}
    for seed in range(chunk * 25, chunk * 25 + 25):
        problem = random_problem(seed)
        for limit in limits_of(problem):
            expected = brute_force_assignment(problem, limit)
            seen[type(expected)] += 1
            assert_same(expected, solve_ilp(problem, limit), problem, limit)
            assert_same(expected, solve(problem, limit), problem, limit)
    assert seen[Solution] > 20
    assert seen[InfeasibleAssignment] > 5


@pytest.mark.parametrize("joint_cells", [4096, 3])
def test_tables_equal_brute_force_with_the_kept_operators_fixed(joint_cells, monkeypatch):
    # with 3 cells every shared tensor takes the form with a set of paid targets
    monkeypatch.setattr(elimination_order, "_JOINT_CELLS", joint_cells)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        problem = random_problem(seed)
        keep = tuple(rng.permutation(len(problem.operators))[: seed % 4].tolist())
        byte_weight = (0.0, 0.1, 1.0)[seed % 3]
        table = eliminate(problem, keep, byte_weight)
        expected = np.full([len(problem.operators[i].labels) for i in keep], np.inf)
        for choice in itertools.product(*(range(len(op.labels)) for op in problem.operators)):
            seconds, num_bytes = evaluate(problem, choice)
            if math.isfinite(seconds):
                cell = tuple(choice[i] for i in keep)
                expected[cell] = min(expected[cell], seconds + byte_weight * num_bytes)
        np.testing.assert_allclose(table.cost, expected, rtol=1e-12)
        for cell in itertools.product(*map(range, expected.shape)):
            if np.isinf(expected[cell]):
                with pytest.raises(ValueError, match="possible"):
                    table.assignment(cell)
                continue
            choice = table.assignment(cell)
            seconds, num_bytes = evaluate(problem, choice)
            assert tuple(choice[i] for i in keep) == cell
            assert seconds + byte_weight * num_bytes == pytest.approx(expected[cell], rel=1e-12)


def test_a_reshard_is_paid_once_per_target():
    producer = Operator("p", ("a",), np.zeros(1), np.zeros(1))
    consumer = Operator("c", ("same", "other"), np.array([0.0, 0.5]), np.zeros(2))
    want = np.array([0, 1])
    edge = Edge(
        "t", 0, np.array([0]), ((1, want), (2, want), (2, want)), np.array([[2.0, 3.0]]), np.array([[7.0, 9.0]])
    )
    problem = Problem((producer, consumer, consumer), (edge,))
    assert evaluate(problem, (0, 0, 0)) == (2.0, 7.0)
    assert evaluate(problem, (0, 1, 0)) == (5.5, 16.0)
    for found in (brute_force_assignment(problem), solve_ilp(problem), solve(problem)):
        assert found.choice == (0, 0, 0)


def test_simplify_keeps_the_optimum_of_every_limit_and_all_frozen_choices():
    for seed in range(60):
        problem = random_problem(seed)
        small, original = simplify(problem)
        assert sum(map(len, original)) <= sum(len(op.labels) for op in problem.operators)
        for limit in limits_of(problem):
            expected, found = brute_force_assignment(problem, limit), brute_force_assignment(small, limit)
            assert type(found) is type(expected)
            if isinstance(expected, Solution):
                assert found.seconds == pytest.approx(expected.seconds, rel=1e-12)
                whole = [idx[c] for idx, c in zip(original, found.choice)]
                assert evaluate(problem, whole) == pytest.approx((found.seconds, found.bytes))
        _, frozen = simplify(problem, {0})
        assert frozen[0].tolist() == list(range(len(problem.operators[0].labels)))


def test_what_is_fixed_is_taken_out_with_all_its_costs():
    taken = 0
    for seed in range(60):
        problem, rng = random_problem(seed), np.random.default_rng(seed)
        some = [np.arange(len(op.labels))[: 1 if rng.random() < 0.6 else None] for op in problem.operators]
        problem = restrict(problem, some)
        inner, left = without_fixed(problem, {1})
        assert 1 in left
        taken += len(problem.operators) - len(left)
        for choice in itertools.product(*(range(len(op.labels)) for op in inner.operators)):
            whole = [0] * len(problem.operators)
            for i, chosen in zip(left, choice):
                whole[i] = chosen
            assert evaluate(inner, choice) == pytest.approx(evaluate(problem, whole), rel=1e-12)
    assert taken > 60


def test_improve_never_worsens_an_assignment():
    for seed in range(60):
        problem = random_problem(seed)
        limit = limits_of(problem)[:3][-(seed % 2)]
        solution = brute_force_assignment(problem, limit)
        if isinstance(solution, InfeasibleAssignment):
            continue
        start = solve(minimum_bytes_problem(problem)).choice
        seconds, num_bytes = evaluate(problem, improve(problem, start, limit))
        assert num_bytes <= limit
        assert solution.seconds * (1 - 1e-12) <= seconds <= evaluate(problem, start)[0]


def memory_bound(seed=1, fraction=0.4, num_operators=40, num_choices=25):
    problem = block(seed, num_operators, num_choices)
    free, lean = solve(problem), solve(minimum_bytes_problem(problem))
    return problem, lean.seconds + fraction * (free.bytes - lean.seconds)


def test_a_layer_under_a_memory_limit_is_solved_alike_with_and_without_elimination():
    problem, limit = memory_bound(num_operators=16, num_choices=10)
    narrow, wide = solve(problem, limit), solve_ilp(problem, limit)
    assert_same(wide, narrow, problem, limit)
    assert narrow.seconds > solve(problem).seconds


def test_a_time_limit_returns_the_best_found_and_what_is_proven():
    problem, limit = memory_bound()
    optimum = solve(problem, limit)
    assert optimum.stop_reason == "optimal"
    hurried = solve(problem, limit, time_limit_s=0.0)
    assert hurried.stop_reason == "time limit"
    assert hurried.bytes <= limit
    assert 0 < hurried.gap < 0.2
    assert hurried.bound <= optimum.seconds * (1 + 1e-9) <= hurried.seconds * (1 + 1e-9)
    lean = solve(minimum_bytes_problem(problem)).choice
    hinted = solve_ilp(problem, limit, time_limit_s=0.0, hint=lean)
    assert hinted.stop_reason == "time limit"
    assert hinted.gap > 0
    assert hinted.bound <= optimum.seconds <= hinted.seconds * (1 + 1e-9)
    assert hinted.seconds <= evaluate(problem, lean)[0]


@pytest.mark.parametrize("gives_up", [("GLOP",), ("GLOP", "HIGHS")])
def test_a_solver_that_gives_up_is_no_error(monkeypatch, gives_up):
    problem, limit = memory_bound(num_operators=16, num_choices=10)
    optimum, lean = solve_ilp(problem, limit), solve(minimum_bytes_problem(problem)).choice
    original = mathopt.solve

    def attempt(model, solver, **rest):
        if solver.name in gives_up:  # what OR-tools 9.15 makes of ABNORMAL
            raise AttributeError("'StatusNotOk' object has no attribute 'canonical_code'")
        return original(model, solver, **rest)

    monkeypatch.setattr(mathopt, "solve", attempt)
    found = solve_ilp(problem, limit, hint=lean)
    if len(gives_up) == 1:
        assert found.seconds == pytest.approx(optimum.seconds)
        assert found.stop_reason == "optimal"
    else:
        assert found.stop_reason == "numerical trouble"
        assert found.bound <= optimum.seconds <= found.seconds <= evaluate(problem, lean)[0]


def test_no_answer_in_time_is_an_error_that_says_so():
    problem, _ = memory_bound(num_operators=16, num_choices=10)
    least = solve(minimum_bytes_problem(problem)).seconds
    with pytest.raises(TimeoutError, match="allow more"):
        solve_ilp(problem, least, time_limit_s=0.0)


def test_too_wide_is_raised_and_solve_falls_back_to_the_ilp():
    problem = block(3, 12, 6)
    with pytest.raises(TooWide):
        eliminate(problem, max_table=50)
    with pytest.raises(TooWide, match="kept"):
        eliminate(problem, keep=(0, 5, 11), max_table=100)
    assert_same(solve(problem), solve(problem, max_table=50), problem, math.inf)


def test_a_tensor_with_many_consumers_stays_narrow():
    rng = np.random.default_rng(0)
    operators = [Operator("mask", labels(6), rng.random(6), np.zeros(6))]
    operators += [Operator(f"c{i}", labels(6), rng.random(6), np.zeros(6)) for i in range(24)]
    wants = tuple((1 + i, rng.integers(0, 6, 6)) for i in range(24))
    edge = Edge("mask", 0, np.arange(6), wants, rng.random((6, 6)), np.zeros((6, 6)))
    problem = Problem(tuple(operators), (edge,))
    table = eliminate(problem)
    assert float(table.cost) == pytest.approx(solve_ilp(problem).seconds, rel=1e-9)
    assert evaluate(problem, table.assignment())[0] == pytest.approx(float(table.cost))


def test_a_tensor_may_have_more_consumers_than_arrays_have_axes():
    operators = [Operator("x", labels(2), np.zeros(2), np.zeros(2))]
    operators += [Operator("free", labels(2), np.array([0.0, 3.0]), np.zeros(2))]
    operators += [Operator(f"fixed {k}", labels(1), np.zeros(1), np.zeros(1)) for k in range(70)]
    wants = ((1, np.arange(2)), *((k, np.ones(1, dtype=int)) for k in range(2, 72)))
    edge = Edge("x", 0, np.arange(2), wants, np.array([[0.0, 1.0], [5.0, 0.0]]), np.zeros((2, 2)))
    table = eliminate(Problem(tuple(operators), (edge,)))
    assert float(table.cost) == 1.0  # the copy that all of the fixed ones read is paid once
    assert table.assignment() == (0,) * 72


def test_prices_of_a_byte_bound_every_completion_within_a_limit():
    weights = [0.0, 0.02, 0.1, 0.5]
    for seed in range(30):
        problem = random_problem(seed)
        keep = (0, len(problem.operators) - 1)
        tables = [eliminate(problem, keep, weight) for weight in weights]
        for limit in limits_of(problem)[:3]:
            for choice in itertools.product(*(range(len(op.labels)) for op in problem.operators)):
                seconds, num_bytes = evaluate(problem, choice)
                if num_bytes <= limit < math.inf:
                    cell = tuple(choice[i] for i in keep)
                    bound = max(t.cost[cell] - w * limit for t, w in zip(tables, weights))
                    assert bound <= seconds + 1e-9


def test_impossible_without_any_limit():
    operator = Operator("o", labels(2), np.ones(2), np.ones(2))
    never = Edge("t", 0, np.arange(2), ((1, np.zeros(2, dtype=int)),), np.full((2, 1), np.inf), np.zeros((2, 1)))
    problem = Problem((operator, operator), (never,))
    answers = [method(problem, 9.0) for method in (brute_force_assignment, solve_ilp, solve)]
    for found in (*answers, solve_ilp(problem)):
        assert isinstance(found, InfeasibleAssignment)
        assert found.minimum_bytes == math.inf
        assert found.choice is None


def test_costs_far_from_one_are_solved_as_exactly():
    for seed in range(40):
        problem = random_problem(seed)
        scaled = Problem(
            tuple(replace(op, seconds=op.seconds * 1e-7, bytes=op.bytes * 2.0**33) for op in problem.operators),
            tuple(replace(e, seconds=e.seconds * 1e-7, bytes=e.bytes * 2.0**33) for e in problem.edges),
        )
        for limit in limits_of(scaled):
            assert_same(brute_force_assignment(scaled, limit), solve_ilp(scaled, limit), scaled, limit)


def test_timing_of_large_problems(capsys):
    chain, layer = block(0, 200, 16, fan_out=1), block(0, 40, 25)
    lines = []
    for name, problem in (("200 operators × 16 choices, chain", chain), ("40 × 25, fan-out 4", layer)):
        for method in (solve, solve_ilp):
            start = time.perf_counter()
            found = method(problem)
            lines.append(f"{name}: {method.__name__} {(time.perf_counter() - start) * 1e3:.0f} ms, {found.seconds:.6f}")
        assert solve(problem).seconds == pytest.approx(found.seconds, rel=1e-9)
    with capsys.disabled():
        print("\n" + "\n".join(lines))


@pytest.mark.parametrize("seed", range(40))
def test_choices_come_in_the_order_of_their_seconds_and_none_is_left_out(seed):
    problem = random_problem(seed)
    every = itertools.product(*(range(len(one.labels)) for one in problem.operators))
    seconds = {choice: evaluate(problem, choice)[0] for choice in every}
    expected = sorted(value for value in seconds.values() if math.isfinite(value))
    found = list(itertools.islice(fastest_choices(problem), 60))
    assert len(set(found)) == len(found) == min(60, len(expected))
    np.testing.assert_allclose([seconds[choice] for choice in found], expected[: len(found)], rtol=1e-12)


def test_choices_end_where_the_rest_is_too_wide(monkeypatch):
    problem = block(0, 6, 3)

    def too_wide(problem):
        raise TooWide("all of it")

    found = fastest_choices(problem)
    next(found)
    monkeypatch.setattr("meshwright.compiler.intra_op.solver.k_best.eliminate", too_wide)
    assert list(found) == []
