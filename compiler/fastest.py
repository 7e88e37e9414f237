"""The fastest of several searches of one request: in each precision that is open, and, where gradients may travel in
other ways than the backend's own, also without these.

The second is in the space of the first, and a search may miss what a narrower one finds; so more freedom never makes a
plan slower. The least bound of all searches holds for what is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .graph import Graph
from .plan import Plan
from .precision import in_precision
from .space import Space
from .strategy import InfeasibleError

__all__ = ["alike", "fastest", "searched"]


def searched(
    make: Callable[..., list[Plan]], arguments: Mapping[str, Any], precisions: Sequence[str] = ("model",)
) -> list[list[Plan]]:
    """What ``make(**arguments)`` (``make_plans`` or ``make_front``) finds, once for each search; those in which nothing
    fits are left out, and plans that the runtime cannot run where only others are asked for. A time limit is shared
    evenly. Raises InfeasibleError if nothing fits in any of them, ValueError if nothing that fits can run."""
    graph: Graph = arguments["graph"]
    space: Space = arguments["space"]
    graphs = list({id(one): one for one in (in_precision(graph, name) for name in precisions)}.values())
    exactly = space.communication.exactly()
    spaces = [space] if exactly == space.communication else [replace(space, communication=exactly), space]
    limit, number = arguments.get("time_limit_s"), len(graphs) * len(spaces)
    found, error = [], None
    refused: Plan | None = None
    for one in graphs:
        for narrow in spaces:
            asked = {"graph": one, "space": narrow, "time_limit_s": limit / number if limit else limit}
            try:
                plans = make(**{**arguments, **asked})
            except InfeasibleError as missed:
                error = missed
                continue
            if runs := [plan for plan in plans if not (space.executable_only and plan.not_executable())]:
                found.append(runs)
            else:
                refused = plans[0]
    if not found:
        if error is not None:
            raise error
        assert refused is not None
        refused.require_executable()
    return found


def fastest(found: Sequence[Sequence[Plan]], count: int) -> list[Plan]:
    """The ``count`` fastest distinct plans of several searches, fastest first, with the bound of all of them."""
    if len(found) == 1:
        return list(found[0])[:count]
    bound_s = min(plan.prediction.bound_s for plans in found for plan in plans)
    passes = Counter[str]()
    for plans in found:
        passes.update(plans[0].provenance["passes"])
    kept: list[Plan] = []
    for plan in sorted((plan for plans in found for plan in plans), key=lambda plan: plan.prediction.step_s):
        if not any(alike(plan, other) for other in kept):
            prediction = replace(plan.prediction, bound_s=min(bound_s, plan.prediction.step_s))
            provenance = {**plan.provenance, "passes": {name: round(s, 4) for name, s in passes.items()}}
            kept.append(replace(plan, prediction=prediction, provenance=provenance))
    return kept[:count]


def alike(plan: Plan, other: Plan) -> bool:
    """Whether two plans of a model make the same decisions."""
    names = ("stages", "microbatches", "schedule", "precision")
    return all(getattr(plan, name) == getattr(other, name) for name in names)
