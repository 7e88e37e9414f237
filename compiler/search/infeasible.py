"""Errors for requests that no plan satisfies: the constraints to blame, or the stage that misses memory and remedies.

1. *Constraints.* If something fits without them, the error names a set of which none can be left out: one constraint
   after the other is dropped for good if nothing fits without it (deletion filter, Chinneck and Dravnieks 1991). The
   set excludes every plan, and each part of it allows one.
2. *A tensor.* A weight that no mesh of the cluster cuts finely enough for its devices fits under no plan.
3. *Memory.* The nearest miss says the stage; its strategies say what takes most of its bytes.
4. *Relaxations.* Every kind of decision that is not open is opened, one at a time; the error lists those that help.

Every "fits" is a run of the lower bounds and the dynamic program on tables at the largest memory multiplier for a few
microbatch counts: an estimate as good as the search's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd, isfinite
from typing import Any

from ...costmodel.cluster import Cluster
from ...costmodel.memory import state_tensors, usable_bytes
from ..cost.parameter_sharding import PATTERNS, sharding_bytes, shardings_by_pattern
from ..cost.pricing import MeshPricer
from ..errors import InfeasibleError
from ..ir.spec import parse_pair
from ..plan.plan import RECOMPUTE_MODES
from ..text import bytes_text
from .parallel_shape import divisors_of
from .space import Space, microbatch_counts, submeshes
from .state import Miss, SearchState, prepare_search
from .tables import tables_of

__all__ = ["infeasible_error", "nearest_miss"]

PATIENCE_S = 5.0  # no further relaxation is tried after so many seconds
COUNTS_PER_QUESTION = 2  # microbatch counts that are tried per question
CAUSES = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer state"}


def infeasible_error(search: SearchState) -> InfeasibleError:
    """The error for a search without a plan: the constraints that exclude every plan, or what is missing at the nearest
    miss."""
    guilty = _guilty(search)
    if guilty:
        named = " and ".join(map(repr, guilty))
        each = "it" if len(guilty) == 1 else "any one of them"
        return InfeasibleError(
            f"no plan keeps the constraints on {search.cluster.name}, but got {named}: without {each} a plan fits; "
            f"drop {'it' if len(guilty) == 1 else 'one of them'}"
        )
    misses = tables_of(search).misses()
    if not misses:
        return InfeasibleError(
            f"no microbatch count of global_batch {search.global_batch} suits this model "
            "(its graph needs batch multiples that none of them gives); use another global_batch"
        )
    miss = nearest_miss(misses)
    return InfeasibleError(
        f"no plan fits {search.cluster.name}: {_short(search, miss)}; {_indivisible(search) or _remedies(search, miss)}"
    )


def nearest_miss(misses: Sequence[Miss]) -> Miss:
    """The miss with the fewest missing bytes, among real pipelines if there are any."""
    return min(misses, key=lambda miss: (miss.why.choice is None, miss.why.missing_bytes))


# ---- constraints


def _guilty(search: SearchState) -> list[str]:
    """Constraints that together exclude every plan, none of which can be left out; none if they are not to blame."""
    remaining = search.constraints.texts()
    if not remaining or not _fits(search, []):
        return []
    for text in list(remaining):
        fewer = [other for other in remaining if other is not text]
        if not _fits(search, fewer):
            remaining = fewer
    return remaining


def _fits(search: SearchState, texts: Sequence[str]) -> bool:
    return _possible(search, constraints=tuple(texts))


def _possible(search: SearchState, cluster: Cluster | None = None, **instead: Any) -> bool:
    """True if something fits on another cluster, or with these fields of the request replaced."""
    assert search.request is not None
    try:
        other = prepare_search(search.graph, cluster or search.cluster, replace(search.request, **instead))
        counts = microbatch_counts(other.global_batch, other.strategy)
        counts = [m for m in counts if m in other.constraints.microbatches]
        other.counts = tuple(counts[-1 :: -max(1, len(counts) // COUNTS_PER_QUESTION)][::-1])
        other.memory_share = search.memory_share
        if other.resolved == search.resolved:
            other.samples = search.samples  # what rules say of the ops of the same layers
        return tables_of(other).fits()
    except ValueError:
        return False


# ---- what is missing


def _short(search: SearchState, miss: Miss) -> str:
    """A sentence about the stage that misses memory: which layers, how much, and the largest cause."""
    why, choice = miss.why, miss.why.choice
    if choice is None:
        return why.reason
    names = [layer.name for layer in search.layering.layers[choice.first_layer : choice.end_layer]]
    held = f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0]
    where = f"stage {why.stage} of {len(why.nearest)} ({held} on {_devices(miss)})"
    causes = _causes(search, miss)
    largest = max(causes, key=lambda cause: causes[cause])
    return (
        f"the nearest has {miss.microbatches} microbatches, and its {where} needs {bytes_text(why.needed_bytes)} per "
        f"device beside the framework where {bytes_text(why.limit_bytes)} are: {bytes_text(why.missing_bytes)} are "
        f"missing; most of it is {largest} ({bytes_text(causes[largest])})"
    )


def _devices(miss: Miss) -> str:
    assert miss.row is not None
    number = miss.row.submesh.num_devices
    return f"{number} device{'s' if number > 1 else ''}"


def _causes(search: SearchState, miss: Miss) -> dict[str, float]:
    """Bytes per device of the stage that misses most, by cause."""
    assert miss.row is not None
    assert miss.why.choice is not None
    first, end, _, offset = miss.why.choice
    labels, _, _ = miss.row.choices(first, end)
    nodes = search.graph.by_name()
    pricer = MeshPricer(search.cluster, offset, miss.row.submesh.shape, search.optimizer, mixed=search.graph.mixed)
    bill = dict.fromkeys(CAUSES.values(), 0.0)
    for name, text in labels.items():
        node = nodes[name]
        if node.op != "placeholder" or node.meta["source"].kind != "parameter":
            continue
        pair, _, pattern = text.partition(" ")
        kind, trained = node.meta["type"], name in search.layering.needs_grad
        offers = dict(shardings_by_pattern(kind, parse_pair(pair), pricer.mesh_shape, trained))
        home = offers.get(pattern or "replicated", offers["replicated"])
        for cause, size in sharding_bytes(pricer, kind, home, node.meta["source"].requires_grad).items():
            bill[CAUSES[cause]] += size
    bill["activations"] = max(0.0, miss.why.needed_bytes - sum(bill.values()))
    return bill


def _indivisible(search: SearchState) -> str | None:
    """A sentence about a weight that is larger than every device even if a mesh cuts it as finely as it can; None if
    there is none."""
    limit = search.memory_share * max(usable_bytes(search.cluster))
    shapes = {sub.shape for sub in submeshes(search.cluster, search.space)} | {()}
    copies = 2 + state_tensors(search.optimizer)[0]
    worst: tuple[float, str, float] | None = None
    for node in search.graph.placeholders("parameter"):
        kind, source = node.meta["type"], node.meta["source"]
        whole = float(kind.nbytes) * (copies if source.requires_grad else 1)
        if whole <= limit:
            continue
        least = whole / max(_cuts(kind.shape, shape) for shape in shapes)
        if least > limit and (worst is None or least > worst[0]):
            worst = least, source.name, whole
    if worst is None:
        return None
    least, name, whole = worst
    return (
        f"the weight {name} alone takes {bytes_text(whole)} with its gradient and optimizer state, and no mesh of this "
        f"cluster cuts it below {bytes_text(least)} per device, which would fit in no less: use more devices, devices "
        "with more memory, or extents with more divisors"
    )


def _cuts(extents: Sequence[int], mesh: Sequence[int]) -> int:
    """The largest number of even parts into which a mesh can cut a tensor."""
    max_parts = 1
    for dims in product(range(-1, len(extents)), repeat=len(mesh)):
        left, parts = list(extents), 1
        for dim, size in zip(dims, mesh):
            if dim >= 0 and gcd(left[dim], size) == size:
                left[dim] //= size
                parts *= size
        max_parts = max(max_parts, parts)
    return max_parts


# ---- what would fit


def _remedies(search: SearchState, miss: Miss) -> str:
    stop, texts = time.perf_counter() + PATIENCE_S, []
    for text, possible in _relaxations(search):
        texts += [text] if possible else []
        if time.perf_counter() > stop:
            break
    more = f"{bytes_text(miss.why.needed_bytes)} per device beside the framework would fit; " if _known(miss) else ""
    if texts:
        return f"{more}a plan fits with {', or with '.join(texts)}"
    return f"{more}use more devices, devices with more memory, more microbatches or a smaller batch"


def _known(miss: Miss) -> bool:
    return isfinite(miss.why.needed_bytes) and miss.why.choice is not None


def _sharding(search: SearchState, wide: Space, later: str) -> Iterator[tuple[str, bool]]:
    """The lowest level of parameter sharding that fits; the highest if that does not either."""
    spaces = {level: replace(wide, residencies=PATTERNS[: level + 1]) for level in (3, 1, 2)}
    if not _possible(search, space=spaces.pop(3)):
        yield "zero=3", False
        return
    fit = next((level for level, space in spaces.items() if _possible(search, space=space)), 3)
    yield f"zero={fit}{later}", True


def _relaxations(search: SearchState) -> Iterator[tuple[str, bool]]:
    """Yield (a relaxation of the request, True if something fits with it), cheapest first."""
    space = search.unconstrained_space or search.space
    later = " (such a plan cannot be run yet)" if space.executable_only else ""
    wide = replace(space, executable_only=False)
    if search.microbatches is not None and search.microbatches < search.global_batch:
        yield "more microbatches", _possible(search, microbatches=None)
    if set(space.recompute) < set(RECOMPUTE_MODES):
        yield f'recompute="auto"{later}', _possible(search, space=replace(wide, recompute=RECOMPUTE_MODES))
    if set(space.residencies) < set(PATTERNS):
        yield from _sharding(search, wide, later)
    if search.strategy is not None:
        yield f"another strategy than {search.strategy}", _possible(search, strategy=None)
    else:
        doubled = replace(search.cluster, hosts=search.cluster.hosts * 2)
        yield f"twice the devices ({doubled.num_devices})", _possible(search, cluster=doubled)
    if search.global_batch > 1:
        half = next(number for number in divisors_of(search.global_batch)[::-1] if 2 * number <= search.global_batch)
        yield f"global_batch={half}", _possible(search, global_batch=half)
