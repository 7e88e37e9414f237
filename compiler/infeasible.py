"""When nothing fits: which stage, how many bytes are missing, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from .explore import Search, nearest_misses
from .pipeline_table import Infeasible
from .strategy import InfeasibleError

__all__ = ["infeasible", "nearest"]


def infeasible(search: Search) -> InfeasibleError:
    """The error that says what is missing where, from the nearest miss of the search."""
    misses = nearest_misses(search)
    if not misses:
        return InfeasibleError(
            f"no microbatch count of global_batch {search.global_batch} suits this model "
            "(its graph needs batch multiples that none of them gives); use another global_batch"
        )
    miss = nearest(misses)
    where = ""
    if miss.choice is not None:
        names = [layer.name for layer in search.layering.layers[miss.choice.first_layer : miss.choice.end_layer]]
        where = f" (stage {miss.stage} holds {names[0]}{' … ' + names[-1] if len(names) > 1 else ''})"
    fits = (
        f"; {miss.needed_bytes / 2**20:,.1f} MiB per device beside the framework would fit: "
        if isfinite(miss.needed_bytes)
        else "; "
    )
    remedy = "use more devices, devices with more memory, more microbatches or a smaller batch"
    return InfeasibleError(f"no plan fits {search.cluster.name}: {miss.reason}{where}{fits}{remedy}")


def nearest(misses: Sequence[Infeasible]) -> Infeasible:
    """The miss by least, among real pipelines where there are any."""
    return min(misses, key=lambda miss: (miss.choice is None, miss.missing_bytes))
