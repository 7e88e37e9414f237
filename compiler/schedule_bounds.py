"""What the makespan of no pipeline undercuts under the families that the search does not run on, by floors and fast.

A stage does all its actions one at a time and then its end of step: under every schedule the makespan is at least m t_k
+ σ_k. With several chunks per stage, and no more stages than microbatches, ``pipeline_chunks.quick_bound`` counts on
that; with one:

    work       Σ n_k (m t_k + σ_k) / N for stages on n_k of N devices. For p stages, a Lagrangian pair (λ, μ) of
               ``pipeline_bound`` and at least q microbatches in flight, n_k t_k ≥ n_k value_k − n_k M_k max(λ, μ/q);
               Σ n_k M_k is at most all devices' bytes. The least Σ n_k value_k of p runs of layers is a shortest path.
    slowest    for a limit on every m t_k + σ_k, each run of layers needs so many devices, by the fastest submesh of
               each size; where the shortest path through these needs more than N, no makespan is within the limit

Under GPipe, where no family with chunks is asked for beside it, what ``pipeline_bound`` proves is taken as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

import numpy as np

from .pipeline_chunks import at_most, least_sums, quick_bound, sums_by_count
from .pipeline_dp import bound_of
from .pipeline_table import Constraints, Floats, Floors
from .schedule import in_flight_formula
from .space import CHUNKED

__all__ = ["family_bounds"]

HALVINGS = 6  # of the range of a bound


def family_bounds(
    floors: Floors, m: int, schedules: Sequence[str], cuts: Constraints, usable: Floats, most: float = inf
) -> dict[str, float]:
    """Family → seconds that no pipeline with m microbatches undercuts, or that are at least ``most``. schedules: from
    simple to involved; usable [devices]: bytes of each."""
    alone = not any(name in CHUNKED for name in schedules)
    quick = inf if alone else quick_bound(floors, m, at_most(m, cuts))
    found = dict.fromkeys(schedules, quick)
    single = [name for name in schedules if name not in CHUNKED]
    for name in single if alone else single[-1:]:  # zb-h1 holds the least and comes last
        found[name] = work = _work(floors, m, name, cuts, usable)
        if work < quick and isfinite(most):
            found[name] = _slowest(floors, m, name, cuts, len(usable), work, most)
        if alone and name == "gpipe" and isfinite(most):
            found[name] = max(found[name], _exact(floors, m, name, cuts, len(usable), most))
    if not alone:
        found |= dict.fromkeys(single, found[single[-1]] if single else 0.0)
    return found


def _work(floors: Floors, m: int, schedule: str, cuts: Constraints, usable: Floats) -> float:
    """What all work takes where it lies evenly on the devices."""
    possible = min(floors.pace_s.shape[1], len(usable))
    devices = np.array([option.num_devices for option in floors.options])[:, None, None]
    values = [floors.pace_s, *(row.value for row in floors.rows)]
    sums = [sums_by_count((devices * value).min(axis=0), possible, cuts) for value in values]
    least, most = cuts.stages
    works = []
    for p in range(least, min(most or possible, possible) + 1):
        q = min(in_flight_formula(schedule, k, p, m) for k in range(p))
        prices = [0.0, *(max(row.byte, row.saved_byte / q) for row in floors.rows)]
        works.append(max(float(one[p]) - float(usable.sum()) * price for one, price in zip(sums, prices)))
    return m * max(min(works, default=inf), 0.0) / len(usable)


def _slowest(
    floors: Floors, m: int, schedule: str, cuts: Constraints, num_devices: int, low_s: float, high_s: float
) -> float:
    """The least that the slowest stage takes, by bisection from ``low_s``, which is proven, to ``high_s``."""
    sizes, heads = _by_size(floors, m, schedule, cuts)
    counts = np.array([*sizes, np.inf])

    def enough(limit_s: float) -> bool:
        fits = np.concatenate([heads <= limit_s, np.ones((1, *heads.shape[1:]), dtype=bool)])
        needed = counts[fits.argmax(axis=0)]
        return bool(least_sums(needed[None], cuts)[0] <= num_devices)

    if low_s >= high_s or not enough(high_s):
        return max(low_s, high_s)
    for _ in range(HALVINGS):
        middle = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle) if enough(middle) else (middle, high_s)
    return low_s


def _by_size(floors: Floors, m: int, schedule: str, cuts: Constraints) -> tuple[list[int], Floats]:
    """(numbers of devices, ascending; [numbers, L, L + 1] the least m t + σ of a stage on so many)."""
    layers = floors.pace_s.shape[1]
    allowed = cuts.allowed(*np.indices((layers, layers + 1)))
    alone, others = (min(in_flight_formula(schedule, k, p, m) for k in range(p)) for p in (1, 2))
    found: dict[int, Floats] = {}
    for o, option in enumerate(floors.options):
        one = floors.pace_s[o]
        for row in floors.rows:
            price = np.full(one.shape, max(row.byte, row.saved_byte / others))  # two stages or more
            price[0, layers] = max(row.byte, row.saved_byte / alone)
            one = np.maximum(one, row.value[o] - max(option.limit_bytes, default=0.0) * price)
        one = np.where(allowed, m * one, inf)
        found[option.num_devices] = np.minimum(found.get(option.num_devices, one), one)
    return sorted(found), np.stack([found[size] for size in sorted(found)])


def _exact(floors: Floors, m: int, schedule: str, cuts: Constraints, num_devices: int, most: float) -> float:
    return bound_of(floors.alone(num_devices), m, schedule, cuts, most, 2)
