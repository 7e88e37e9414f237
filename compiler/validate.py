"""Does a plan belong to this model and cluster?"""

from __future__ import annotations

from .graph import Graph
from .plan import Plan

__all__ = ["require"]


def require(plan: Plan, graph: Graph) -> None:
    """ValueError with the difference unless ``plan`` is for the model that ``graph`` was captured from."""
    if plan.model != graph.fingerprint():
        raise ValueError(f"this plan is for another model: {plan.model} against {graph.fingerprint()}")
