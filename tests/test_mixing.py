"""Which mixtures of levels are worth composing: those that stages near the memory limit gain by."""

import numpy as np
from meshwright.compiler.mixing import Mixture, Points, promising, stages_that_count

SECONDS = np.array([[1.0], [2.0], [9.0]])  # of levels 5, 6, 7, for one stage
KEPT = np.array([[30.0], [10.0], [5.0]])


def points(seconds=SECONDS, saved=KEPT, flights=1.0):
    return Points(seconds, np.zeros_like(saved), saved, np.zeros_like(saved), np.array([flights]))


def test_the_mixture_that_fills_memory_comes_first():
    assert promising([5, 6, 7], points(), 20.0, 100.0, 1) == [Mixture(5, 6, 2)]
    assert promising([5, 6, 7], points(), 25.0, 100.0, 1) == [Mixture(5, 6, 3)]
    assert promising([5, 6, 7], points(), 14.9, 100.0, 1) in ([Mixture(5, 7, 1)], [])


def test_nothing_is_mixed_where_the_fastest_fits_or_all_is_too_slow():
    assert promising([5, 6, 7], points(), 30.0, 100.0, 4) == []
    assert promising([5, 6, 7], points(), 20.0, 1.2, 4) == []
    assert promising([5], Points(*(a[:1] for a in (SECONDS, KEPT, KEPT, KEPT)), np.ones(1)), 1.0, 9.0, 4) == []


def test_microbatches_in_flight_count():
    assert promising([5, 6, 7], points(flights=2.0), 40.0, 100.0, 1) == [Mixture(5, 6, 2)]


def test_an_impossible_level_is_in_no_mixture():
    seconds = np.where(np.arange(3)[:, None] == 0, np.inf, SECONDS)
    found = promising([5, 6, 7], points(seconds), 8.0, 100.0, 9)
    assert found
    assert all(5 not in (one.level, one.other) for one in found)


def test_stages_hold_about_their_share_of_the_work_and_several_equal_layers():
    classes = ["a", *["b", "c"] * 4, "d"]
    count = len(classes)
    work = np.array([[float(max(j - i, 0)) for j in range(count + 1)] for i in range(count)])
    first, end, flights = stages_that_count(work, classes, 0.4, 8)
    share = (end - first) / count
    assert len(first) == len(end) == len(flights) > 0
    assert ((share >= 0.3) & (share <= 0.61)).all()
    assert all(len(set(classes[i:j])) < j - i for i, j in zip(first, end))
    assert flights.min() >= 1
    assert flights.max() <= 8
    assert flights[(first == 2) & (end == 6)].tolist() == [1, 2, 2]
    assert not len(stages_that_count(work, classes, 0.05, 8)[0])
