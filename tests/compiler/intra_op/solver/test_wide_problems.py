"""What is too wide for exact elimination: lower bounds by mini-buckets and decisions among fewer choices, against brute
force and the integer program."""

import numpy as np
import pytest
from meshwright.compiler.intra_op.solver.choice_reduction import proposals, reduced_elimination
from meshwright.compiler.intra_op.solver.elimination_order import Limits, plan_relaxation
from meshwright.compiler.intra_op.solver.ilp import solve_ilp
from meshwright.compiler.intra_op.solver.vectorised_elimination import follow

from tests.support.vectorised_elimination import (
    EdgeCosts,
    assert_attained,
    brute_force,
    eliminate_rows,
    random_batch,
    row_of,
)


def relaxed(max_cells):
    return lambda alive, links, keep, limits: plan_relaxation(alive, links, keep, max_cells)


def reduced(costs, edges, max_cells):
    """The plan of an elimination of fewer choices, as ``layer_tables`` makes it: two operators are kept."""

    def plan(alive, links, keep, limits):
        recipe = plan_relaxation(alive, links, keep, max_cells)
        tables = [np.ascontiguousarray(np.moveaxis(e.cost, 0, -1), dtype=float) for e in edges if e.consumers]
        chunk = follow(recipe, [np.ascontiguousarray(cost.T, dtype=float) for cost in costs], tables)
        possible = [np.isfinite(cost.T[some]) for cost, some in zip(costs, alive)]
        return reduced_elimination(alive, links, keep, proposals(chunk), possible, Limits(max_cells))

    return plan


@pytest.mark.parametrize("max_cells", [1, 4, 16, 10**6])
def test_a_relaxation_is_never_above_the_optimum(max_cells):
    finite = loose = 0
    for seed in range(100):
        costs, edges = random_batch(seed, rows=3)
        keep = tuple(np.random.default_rng(seed).permutation(len(costs))[: seed % 4].tolist())
        table = eliminate_rows(costs, edges, keep, plan=relaxed(max_cells))
        for row in range(3):
            expected = brute_force(row_of(costs, edges, row), keep)
            assert (table.cost[row] <= expected * (1 + 1e-12)).all()
            finite += int(np.isfinite(expected).sum())
            loose += int((table.cost[row] < expected * (1 - 1e-9))[np.isfinite(expected)].sum())
    assert finite > 300
    assert loose if max_cells < 16 else not loose or max_cells < 10**6, "nothing is relaxed that is not too wide"


@pytest.mark.parametrize("max_cells", [1, 8, 64])
def test_fewer_choices_give_decisions_that_cost_what_the_tables_say(max_cells):
    ratios = []
    for seed in range(60):
        costs, edges = random_batch(seed, rows=3)
        keep = (0, len(costs) - 1)
        table = eliminate_rows(costs, edges, keep, plan=reduced(costs, edges, max_cells))
        for row in range(3):
            problem = row_of(costs, edges, row)
            expected = brute_force(problem, keep)
            assert (table.cost[row] >= expected * (1 - 1e-12)).all()
            assert_attained(problem, table, row)
            if 0 < expected.min() < np.inf:
                ratios.append(table.cost[row].min() / expected.min())
    assert np.median(ratios) <= 1.0 + 1e-9


def dense(seed, rows, num_operators=12, num_choices=6):
    """Every operator reads three or four others."""
    rng = np.random.default_rng(seed)
    costs = [rng.random((rows, num_choices)) for _ in range(num_operators)]
    edges = []
    for i in range(num_operators - 1):
        others = rng.permutation(np.arange(i + 1, num_operators))[:4].tolist()
        cost = rng.random((rows, num_choices, num_choices)) * 0.3
        cost[:, range(num_choices), range(num_choices)] = 0.0
        edges.append(EdgeCosts(i, np.arange(num_choices), tuple((k, np.arange(num_choices)) for k in others), cost))
    return costs, edges


@pytest.mark.parametrize("seed", range(3))
def test_both_bounds_lie_close_to_the_integer_program(seed):
    costs, edges = dense(seed, rows=2)
    below = eliminate_rows(costs, edges, (0, 11), plan=relaxed(2**15))
    above = eliminate_rows(costs, edges, (0, 11), plan=reduced(costs, edges, 2**15))
    for row in range(2):
        problem = row_of(costs, edges, row)
        best_s = solve_ilp(problem).seconds
        assert below.cost[row].min() <= best_s * (1 + 1e-9) <= above.cost[row].min() * (1 + 2e-9)
        assert below.cost[row].min() >= 0.7 * best_s  # random costs on a dense graph
        assert above.cost[row].min() <= 1.1 * best_s
        assert_attained(problem, above, row)


@pytest.mark.parametrize("consumers", [70, 300])
def test_a_tensor_may_have_more_consumers_than_numpy_has_dims(consumers):
    rng = np.random.default_rng(consumers)
    costs = [rng.random((2, 3)) for _ in range(consumers + 2)]
    hub = EdgeCosts(
        0, np.arange(3), tuple((1 + k, rng.permutation(3)) for k in range(consumers)), rng.random((2, 3, 3))
    )
    ends = [EdgeCosts(1 + k, np.arange(3), ((consumers + 1, np.arange(3)),), rng.random((2, 3, 3))) for k in range(70)]
    edges = [hub, *ends]
    keep = (0, consumers + 1)
    below = eliminate_rows(costs, edges, keep, plan=relaxed(2**12))
    above = eliminate_rows(costs, edges, keep, plan=reduced(costs, edges, 2**12))
    for row in range(2):
        problem = row_of(costs, edges, row)
        best_s = solve_ilp(problem).seconds
        assert below.cost[row].min() <= best_s * (1 + 1e-9) <= above.cost[row].min() * (1 + 2e-9)
        assert above.cost[row].min() <= 1.02 * best_s
        assert_attained(problem, above, row)


def test_one_choice_needs_no_axis():
    # 70 operators of one choice each read a tensor and are read by one operator
    rng = np.random.default_rng(0)
    costs = [rng.random((1, 3)), *(rng.random((1, 1)) for _ in range(70)), rng.random((1, 3))]
    hub = EdgeCosts(0, np.arange(3), tuple((1 + k, np.array([k % 3])) for k in range(70)), rng.random((1, 3, 3)))
    ends = [EdgeCosts(1 + k, np.zeros(1, int), ((71, np.arange(3)),), rng.random((1, 1, 3))) for k in range(70)]
    table = eliminate_rows(costs, [hub, *ends])
    problem = row_of(costs, [hub, *ends], 0)
    assert table.cost[0] == pytest.approx(brute_force(problem, ()), rel=1e-12)
    assert_attained(problem, table, 0)
