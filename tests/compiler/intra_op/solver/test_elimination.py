"""Elimination of many problems at once against brute force and the integer program, row by row."""

import numpy as np
import pytest
from meshwright.compiler.errors import TooWide
from meshwright.compiler.intra_op.solver import elimination_order, vectorised_elimination
from meshwright.compiler.intra_op.solver.elimination_order import Limits
from meshwright.compiler.intra_op.solver.ilp import solve_ilp
from meshwright.compiler.intra_op.solver.presolve import TensorEdges, simplify_links

from tests.support.vectorised_elimination import (
    EdgeCosts,
    assert_attained,
    brute_force,
    eliminate_rows,
    random_batch,
    row_of,
)


@pytest.mark.parametrize("order", elimination_order._ORDERS)
@pytest.mark.parametrize(("joint_cells", "less_work"), [(4096, np.inf), (4096, 0), (3, 0)])
def test_every_row_equals_brute_force(joint_cells, less_work, order, monkeypatch):
    # 3 cells: every shared tensor takes the form with a set of paid targets; 0: every last consumer leaves apart
    monkeypatch.setattr(elimination_order, "_JOINT_CELLS", joint_cells)
    monkeypatch.setattr(elimination_order, "_LESS_WORK", less_work)
    monkeypatch.setattr(elimination_order, "_ORDERS", [order])
    monkeypatch.setattr(elimination_order, "_FEW", 1)  # every state is held, where any is
    finite = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        costs, edges = random_batch(seed, rows=3)
        keep = tuple(rng.permutation(len(costs))[: seed % 4].tolist())
        table = eliminate_rows(costs, edges, keep)
        for row in range(3):
            problem = row_of(costs, edges, row)
            np.testing.assert_allclose(table.cost[row], brute_force(problem, keep), rtol=1e-12)
            assert_attained(problem, table, row)
            finite += int(np.isfinite(table.cost[row]).sum())
    assert finite > 300


def test_a_tensor_of_many_cells_is_taken_apart_by_its_consumers(monkeypatch):
    monkeypatch.setattr(elimination_order, "_JOINT_CELLS", 0)
    monkeypatch.setattr(elimination_order, "_PAID_SETS", 0)
    monkeypatch.setattr(elimination_order, "_LARGEST_JOINT", 5_000)  # of 12⁴ cells
    rng = np.random.default_rng(0)
    costs, states = [rng.random((3, 12)) for _ in range(4)], np.arange(12)
    edges = [EdgeCosts(0, states, tuple((k, states) for k in (1, 2, 3)), rng.random((3, 12, 12)))]
    table = eliminate_rows(costs, edges, (0,))
    for row in range(3):
        np.testing.assert_allclose(table.cost[row], brute_force(row_of(costs, edges, row), (0,)), rtol=1e-12)
        assert_attained(row_of(costs, edges, row), table, row)
    with pytest.raises(TooWide, match="a tensor would have 20736 cells"):
        eliminate_rows(costs, edges, (1, 2, 3))  # nothing leaves that could take it apart
    monkeypatch.setattr(elimination_order, "_LARGEST_SPLIT", 20_000)
    with pytest.raises(TooWide, match="a tensor would have 20736 cells"):
        eliminate_rows(costs, edges, (0,))


def layer_like(seed, rows, num_operators=18, num_choices=7):
    """A chain with shared tensors and residual edges, the shape of a transformer layer."""
    rng = np.random.default_rng(seed)
    costs = [rng.random((rows, num_choices)) for _ in range(num_operators)]
    edges = []
    for i in range(num_operators - 1):
        reach = [1, 5, 2, 3] if i % 6 == 0 and i + 5 < num_operators else [1]
        cost = rng.random((rows, 6, 5))
        cost[:, rng.random((6, 5)) < 0.1] = np.inf
        cost[:, range(5), range(5)] = 0.0
        wants = tuple((i + r, rng.integers(0, 5, num_choices)) for r in reach)
        edges.append(EdgeCosts(i, rng.integers(0, 6, num_choices), wants, cost))
    return costs, edges


@pytest.mark.parametrize("seed", range(4))
def test_layers_equal_the_integer_program(seed):
    costs, edges = layer_like(seed, rows=5)
    keep = (0, len(costs) - 1)
    table = eliminate_rows(costs, edges, keep)
    for row in range(5):
        problem = row_of(costs, edges, row)
        assert table.cost[row].min() == pytest.approx(solve_ilp(problem).seconds, rel=1e-9)
        assert_attained(problem, table, row)


def test_of_several_orders_the_lightest_is_taken(monkeypatch):
    costs, edges = layer_like(1, rows=1)
    by_row = [cost.T for cost in costs]
    links = [TensorEdges.of(*edge[:3], [np.moveaxis(edge.cost, 0, -1)]) for edge in edges if edge.consumers]
    alive, reduced = simplify_links(by_row, links, frozenset())

    def work(orders):
        monkeypatch.setattr(elimination_order, "_ORDERS", orders)
        return elimination_order.plan_elimination(alive, reduced, (), Limits(10**7)).work

    orders = elimination_order._ORDERS
    each = [work([order]) for order in orders]
    assert len(set(each)) > 1
    assert work(orders) == each[0], "one light enough is not compared with others"
    monkeypatch.setattr(elimination_order, "_HEAVY", 0)
    assert work(orders[::-1]) == work(orders) == min(each)


@pytest.mark.parametrize("seed", range(4))
def test_the_last_consumer_of_a_tensor_leaves_by_less_work(seed, monkeypatch):
    # as queries, keys and values do: one tensor, three consumers, whose results meet
    rng, num = np.random.default_rng(seed), 9
    costs = [rng.random((3, num)) for _ in range(5)]
    prices = rng.random((4, 3, num, num))
    prices[rng.random(prices.shape) < 0.1] = np.inf
    prices[..., range(num), range(num)] = 0.0
    edges = [EdgeCosts(0, np.arange(num), tuple((k, rng.permutation(num)) for k in (1, 2, 3)), prices[0])]
    edges += [EdgeCosts(k, np.arange(num), ((4, rng.permutation(num)),), prices[k]) for k in (1, 2, 3)]
    apart = eliminate_rows(costs, edges, (0, 4))
    monkeypatch.setattr(elimination_order, "_LESS_WORK", np.inf)
    whole = eliminate_rows(costs, edges, (0, 4))
    assert apart._chunks[0].recipe.work < 0.7 * whole._chunks[0].recipe.work
    np.testing.assert_allclose(apart.cost, whole.cost, rtol=1e-12)
    for row in range(3):
        assert_attained(row_of(costs, edges, row), apart, row)


def test_chunks_and_threads_change_nothing(monkeypatch):
    costs, edges = layer_like(7, rows=23)
    whole = eliminate_rows(costs, edges, (0,))
    monkeypatch.setattr(vectorised_elimination, "_MOST_ROWS", 4)
    parts = eliminate_rows(costs, edges, (0,))
    assert len(parts._chunks) == 6
    np.testing.assert_array_equal(parts.cost, whole.cost)
    cells = [np.tile(np.arange(whole.cost.shape[1]), (23, 1))]
    for ours, theirs in zip(parts.assignments(cells), whole.assignments(cells)):
        np.testing.assert_array_equal(ours, theirs)


def test_blocks_change_nothing(monkeypatch):
    costs, edges = layer_like(8, rows=3)
    whole = eliminate_rows(costs, edges, (0, len(costs) - 1))
    for cells in (1, 7, 40):
        monkeypatch.setattr(vectorised_elimination, "_BLOCK_CELLS", cells)
        np.testing.assert_array_equal(eliminate_rows(costs, edges, (0, len(costs) - 1)).cost, whole.cost)


def test_more_choices_than_a_byte_counts():
    rng = np.random.default_rng(0)
    costs = [rng.random((2, 300)), rng.random((2, 3))]
    edges = [EdgeCosts(0, np.arange(300), ((1, np.arange(3)),), rng.random((2, 300, 3)))]
    table = eliminate_rows(costs, edges, (1,))
    for row in range(2):
        np.testing.assert_allclose(table.cost[row], brute_force(row_of(costs, edges, row), (1,)), rtol=1e-12)
        assert_attained(row_of(costs, edges, row), table, row)


def test_a_choice_goes_only_where_every_row_agrees():
    cost = np.array([[1.0, 2.0, 3.0, 2.0], [1.0, 0.5, 3.0, 2.0]])  # 0 or 1 is best by row; 2 and 3 never are
    alive, _ = simplify_links([np.ascontiguousarray(cost.T)], [])
    assert alive[0].tolist() == [0, 1]
    cost[0, 0] = cost[1, 0] = np.inf
    assert simplify_links([np.ascontiguousarray(cost.T)], [])[0][0].tolist() == [1]
    assert simplify_links([np.ascontiguousarray(cost.T)], [], frozen={0})[0][0].tolist() == [0, 1, 2, 3]


def test_states_merge_only_where_every_row_prices_them_alike():
    table = np.zeros((3, 2, 4))
    table[:, 1] = 1.0
    table[2, 1, 2] = 5.0  # the last source differs in one row
    link = TensorEdges.of(0, np.arange(3), ((1, np.arange(2)),), [table])
    _, (reduced,) = simplify_links([np.zeros((3, 4)), np.zeros((2, 4))], [link], frozen={0, 1})
    assert reduced.source.tolist() == [0, 0, 1]
    assert reduced.rows.tolist() == [0, 2]


def test_too_wide_is_an_answer():
    costs, edges = layer_like(1, rows=1)
    with pytest.raises(TooWide):
        eliminate_rows(costs, edges, limits=Limits(50))
    with pytest.raises(TooWide, match="kept"):
        eliminate_rows(costs, edges, (0, 5, 11), limits=Limits(100))
