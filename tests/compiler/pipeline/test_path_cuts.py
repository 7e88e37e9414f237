"""Cuts by the paths of their schedule, held against all cuts on the clock."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest
from meshwright.compiler.pipeline.families import generate, is_split
from meshwright.compiler.pipeline.path_cuts import CutCosts, cuts_by_paths
from meshwright.compiler.pipeline.simulate import simulate

SCHEDULES = ["gpipe", "1f1b", "eager-1f1b", "zb-h1"]


def step_s(schedule: str, m: int, costs: CutCosts, cuts: tuple[int, ...]) -> float:
    """Seconds of a step on the clock, with a third of each pace forward."""
    stages = range(len(cuts) - 1)
    pace = [float(costs.pace[k, i, j]) for k, (i, j) in enumerate(pairwise(cuts))]
    step = [float(costs.step[k, i, j] + costs.end[k]) for k, (i, j) in enumerate(pairwise(cuts))]
    if not np.isfinite(pace).all():
        return inf
    ahead, back = ({(k, k + 1): float(some[k, cuts[k + 1]]) for k in stages[:-1]} for some in (costs.ahead, costs.back))
    return simulate(
        generate(schedule, len(pace), m), [t / 3 for t in pace], [t * 2 / 3 for t in pace], ahead, step, back,
        [t / 3 for t in pace] if is_split(schedule) else None,
    ).makespan_s  # fmt: skip


def drawn(seed: int) -> tuple[CutCosts, int]:
    """Costs of 2 to 4 stages of up to 10 layers, and a number of microbatches."""
    rng = random.Random(seed)
    stages, layers = rng.randint(2, 4), rng.randint(5, 10)
    each = np.array([rng.choice([1.0, 1.0, 2.0, 0.3]) for _ in range(layers)])
    until = np.concatenate([[0.0], np.cumsum(each)])
    length = until[None] - until[:-1, None]
    pace = np.stack([np.where(length > 0, length + 0.1, inf)] * stages)
    if rng.random() < 0.3:  # a stage that has not the memory for many layers
        pace[rng.randrange(stages)][length > 0.6 * until[-1]] = inf
    slow = np.array([rng.choice([0.02, 0.02, 1.0, 2.0]) for _ in range(stages - 1)])
    message = slow[:, None] * np.array([rng.choice([1.0, 2.0]) for _ in range(layers + 1)])
    end = np.array([rng.choice([0.0, 3.0]) for _ in range(stages)])
    return CutCosts(pace, 0.3 * pace, message, message, end), rng.randint(stages, 8 * stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cuts_by_paths_are_nearly_the_best_of_all(schedule):
    ratios = []
    for seed in range(60):
        costs, m = drawn(seed)
        stages, layers = costs.pace.shape[:2]
        every = [(0, *some, layers) for some in combinations(range(1, layers), stages - 1)]
        seconds = {cuts: step_s(schedule, m, costs, cuts) for cuts in every}
        least = min(seconds.values())
        if not least < inf:
            continue
        starts = [cuts for cuts in every if seconds[cuts] < inf][:: max(1, len(every) // 2)]
        found = cuts_by_paths(schedule, m, costs, starts)
        assert seconds[found] <= min(seconds[cuts] for cuts in starts) * (1 + 1e-9)
        ratios.append(seconds[found] / least)
    assert len(ratios) >= 50
    assert float(np.median(ratios)) == pytest.approx(1.0, abs=1e-9)
    assert sum(ratio <= 1.01 for ratio in ratios) >= 0.8 * len(ratios), sorted(ratios)[-20:]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_beside_a_slow_message_hold_few_layers(schedule):
    layers, stages = 24, 4
    length = np.arange(layers + 1) - np.arange(layers)[:, None]
    pace = np.stack([np.where(length > 0, length * 1.0, inf)] * stages)
    message = np.repeat([[0.0], [6.0], [0.0]], layers + 1, axis=1)
    costs = CutCosts(
        pace, 0.0 * np.where(length > 0, 1.0, 0.0) + np.zeros_like(pace), message, message, np.zeros(stages)
    )
    even = (0, 6, 12, 18, 24)
    found = cuts_by_paths(schedule, 64, costs, [even])
    first, second, third, last = (end - begin for begin, end in pairwise(found))
    assert max(second, third) < min(first, last)
    assert step_s(schedule, 64, costs, found) < 0.95 * step_s(schedule, 64, costs, even)


def test_a_long_step_is_played_by_a_few_microbatches_and_what_more_add():
    costs, _ = drawn(3)
    stages, layers = costs.pace.shape[:2]
    every = [(0, *some, layers) for some in combinations(range(1, layers), stages - 1)]
    found = cuts_by_paths("1f1b", 300, costs, every[:1])
    assert step_s("1f1b", 300, costs, found) <= 1.01 * min(step_s("1f1b", 300, costs, cuts) for cuts in every)
