"""What presolve of many cases may drop: nothing that is the best of some case."""

import numpy as np
import pytest
from meshwright.compiler.intra_op.solver.presolve import TensorEdges, simplify_links


def test_a_choice_that_is_best_in_one_case_of_a_hundred_stays():
    cost = np.ones((3, 100))
    cost[1] = 2.0
    cost[1, 7] = 0.5  # beaten in 99 cases of 100
    cost[2] = 1.5  # beaten in every case
    alive, _ = simplify_links([cost], [])
    assert alive[0].tolist() == [0, 1]


@pytest.mark.parametrize("case", [0, 50, 99])
def test_a_choice_that_is_possible_in_one_case_alone_stays(case):
    costs = [np.zeros((2, 100)), np.zeros((2, 100))]
    table = np.zeros((2, 2, 100))
    table[1] = np.inf
    table[1, :, case] = 0.0
    link = TensorEdges.of(0, np.arange(2), ((1, np.arange(2)),), [table])
    costs[0][0] = 1.0  # so that the other choice is better where it is possible
    alive, _ = simplify_links(costs, [link])
    assert alive[0].tolist() == [0, 1]


def test_states_that_differ_in_one_case_stay_apart():
    costs = [np.zeros((2, 100)), np.zeros((2, 100))]
    table = np.ones((2, 2, 100))
    table[1, 1, 42] = 3.0
    (link,) = simplify_links(costs, [TensorEdges.of(0, np.arange(2), ((1, np.arange(2)),), [table])], (0, 1))[1]
    assert (len(link.rows), len(link.columns)) == (2, 2)


def test_equal_tables_merge_by_the_states_in_use_and_by_who_shares():
    table = np.array([[[1.0], [1.0], [2.0]], [[1.0], [1.0], [3.0]]])  # targets 0 and 1 are equal; sources but for 2
    all_targets = (2, np.arange(3))
    links = [
        TensorEdges.of(0, np.arange(2), (all_targets,), [table]),
        TensorEdges.of(0, np.arange(2), (all_targets, (3, np.arange(3))), [table]),
        TensorEdges.of(0, np.arange(2), ((4, np.arange(2)),), [table]),
        TensorEdges.of(1, np.zeros(1, dtype=int), (all_targets,), [table]),
    ]
    costs = [np.zeros((size, 1)) for size in (2, 1, 3, 3, 2)]
    together = simplify_links(costs, links, range(5))[1]
    assert [(len(link.rows), len(link.columns)) for link in together] == [(2, 2), (2, 3), (1, 1), (1, 2)]
    for link, found in zip(links, together):
        (alone,) = simplify_links(costs, [link], range(5))[1]
        assert (alone.rows.tolist(), alone.columns.tolist()) == (found.rows.tolist(), found.columns.tolist())
