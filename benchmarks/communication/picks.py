"""What every rank runs: a profile over these links, then every way beside what the planner's prices say of it.

A price is what a sum takes in a step, so every sum follows some compute here, as in the profile, and its time is the
mean over the ranks. A cell is hit if the way that "auto-lossy" takes by these prices needs at most ``NEAR`` times the
least median, or no longer than the upper quartile of the best way. Ways that the link's rate alone makes slower than
``_HOPELESS`` times the best so far are not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import meshwright as mw
import torch
import torch.distributed as dist
from meshwright.compiler.cost.gradient_communication import MIN_LOSSY_SPEEDUP, Communication
from meshwright.compiler.cost.gradient_reduction import fastest_route_index
from meshwright.compiler.cost.pricing import MeshPricer, gradient_routes
from meshwright.costmodel.collectives import REDUCTIONS
from meshwright.runtime.profiling.probes import matmuls

from .codes import DENSE, Bucket, formula_bytes, make_call, once_each, rounds_of, spread

__all__ = ["CODES", "NEAR", "picks"]

CODES = ("bf16", "int8", "1bit", "powersgd4", "topk1%")
NEAR = 1.1
_HOPELESS, _SLOW = 3.0, 2.0


def picks(
    sizes: Sequence[int], rounds: int, budget_s: float, profile_s: float, bits_per_s: float
) -> list[dict[str, Any]]:
    """Per size in bytes: price and times of every way. profile_s: of the profile; budget_s: of the rounds of a size.
    Collective."""
    cluster = mw.profile(budget_s=profile_s, resume=False, codes=CODES)
    prices = {}
    for nbytes in sizes:
        allowed = Communication(("backend", *REDUCTIONS), ("none", *CODES), shapes=Bucket(nbytes // 4).shapes)
        pricer = MeshPricer(cluster, 0, (dist.get_world_size(),), communication=allowed)
        ways = gradient_routes(pricer, (0,), 4)
        prices[nbytes] = {_name(way.algorithm, way.compressor): way.seconds(nbytes) for way in ways
                          if "none" in (way.compressor, way.algorithm) or way.algorithm == "backend"}  # fmt: skip
    return [_cell(nbytes, prices[nbytes], rounds, budget_s, bits_per_s) for nbytes in sizes]


def _name(algorithm: str, compressor: str) -> str:
    if compressor == "none":
        return DENSE if algorithm == "backend" else f"by {algorithm}"
    return compressor


def _cell(nbytes: int, prices: dict[str, float], rounds: int, budget_s: float, bits_per_s: float) -> dict[str, Any]:
    bucket, ranks, pace = Bucket(nbytes // 4), dist.get_world_size(), matmuls(torch.device("cpu"))
    first: dict[str, float] = {}
    calls, ends = {}, []
    for name in sorted(prices, key=prices.__getitem__):
        plain = DENSE if name.startswith("by ") else name
        least = 8 * formula_bytes(plain, bucket, ranks) / ranks / bits_per_s if bits_per_s else 0.0
        if first and least > _HOPELESS * min(first.values()):
            continue
        calls[name], end = make_call(name, bucket)
        ends.append(end)
        first[name] = once_each(calls[name], bucket, pace)
    pick = [*prices][fastest_route_index([*prices.values()], [name in CODES for name in prices], MIN_LOSSY_SPEEDUP)]
    near = {name: call for name, call in calls.items() if name == pick or first[name] < _SLOW * min(first.values())}
    times = {name: spread(found) for name, found in rounds_of(near, bucket, rounds, budget_s, pace).items()}
    for end in ends:
        end()
    best = min(times, key=lambda name: times[name][1])
    allowed = max(NEAR * times[best][1], times[best][2])
    return {
        "nbytes": nbytes, "ranks": ranks, "pick": pick, "best": best, "hit": times[pick][1] <= allowed,
        "ratio": times[pick][1] / times[best][1], "price_s": prices,
        "seconds": {name: times.get(name, (first[name],) * 3) for name in first},
    }  # fmt: skip
