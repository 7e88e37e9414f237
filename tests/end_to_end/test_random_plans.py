"""Random models under random plans compute what one device computes; ``benchmarks/equivalence.py`` runs many more."""

from __future__ import annotations

import meshwright as mw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.random_plans import random_plan

SEEDS = 100_000


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, SEEDS))
def test_a_random_plan_is_equal_to_one_device(seed: int) -> None:
    case = random_plan(seed)
    if case is not None:
        found = mw.verify(case.plan, case.model, example_inputs=case.inputs)
        assert found.ok, f"{case.text}\n{found}"
