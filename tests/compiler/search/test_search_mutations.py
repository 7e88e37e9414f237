"""Bugs of the search, planted one at a time, are caught by a small check of what each part promises. The same checks
pass where nothing is planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from meshwright.compiler.intra_op.solver import presolve
from meshwright.compiler.intra_op.solver.presolve import simplify_links
from meshwright.compiler.pipeline import simulate as clock
from meshwright.compiler.pipeline.families import generate

Patch = pytest.MonkeyPatch


def choices_that_are_best_somewhere_stay() -> None:
    """A choice that another beats in 95 of 100 cases, and no other in the rest, survives presolve."""
    cost = np.ones((2, 100))
    cost[1] = 2.0
    cost[1, ::20] = 0.5
    alive, _ = simplify_links([cost], [])
    assert alive[0].tolist() == [0, 1]


def gradients_take_as_long_as_values() -> None:
    """One microbatch takes the work of all stages and each edge's message twice, in every family of whole stages."""
    for name in ("gpipe", "1f1b", "zb-h1"):
        run = clock.simulate(generate(name, 3, 1), [1, 2, 3], [4, 5, 6], {(0, 1): 0.5, (1, 2): 0.25},
                             backward_weight_s=[0, 0, 0])  # fmt: skip
        assert run.makespan_s == 21 + 2 * 0.75
        given = clock.simulate(generate(name, 2, 1), [1, 1], [1, 1], {(0, 1): 0.5}, backward_transfers_s={(0, 1): 3.0},
                               backward_weight_s=[0, 0])  # fmt: skip
        assert given.makespan_s == 4 + 3.5


def beaten_in_most_cases_goes(patch: Patch) -> None:
    def undominated(states: Sequence[np.ndarray], cost: np.ndarray) -> np.ndarray:
        mask = original(states, cost)
        for c in range(len(cost)):
            others = [k for k in range(len(cost)) if k != c and all(s[k] == s[c] for s in states)]
            mask[c] &= not any((cost[k] <= cost[c]).mean() > 0.9 for k in others)
        return mask

    original = presolve._undominated
    patch.setattr(presolve, "_undominated", undominated)


def free_gradient_messages(patch: Patch) -> None:
    def works(schedule: Any, seconds: Any, forward: Any, backward: Any) -> Any:
        return original(schedule, seconds, forward, dict.fromkeys(backward, 0.0))

    original = clock._works
    patch.setattr(clock, "_works", works)


BUGS: dict[str, tuple[Callable[[Patch], None], Callable[[], None]]] = {
    "a choice dropped that another beats in most cases": (
        beaten_in_most_cases_goes,
        choices_that_are_best_somewhere_stay,
    ),
    "gradient messages between stages at no price": (free_gradient_messages, gradients_take_as_long_as_values),
}


@pytest.mark.parametrize("bug", list(BUGS))
def test_a_check_catches(monkeypatch: Patch, bug: str) -> None:
    plant, check = BUGS[bug]
    check()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
