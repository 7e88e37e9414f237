"""The loss that each device has a share of: summed over mesh axes once per step, not in every microbatch.

Where the loss is made as addends (P) and nothing else reads it, a program returns this device's addend. Its gradient is
that of the sum, since every addend gets the loss's whole cotangent (P|R). Sums commute with the mean over
microbatches, so who runs the program adds addends up and sums them over the axes when the step ends. A mean over a
count that is known only from the data is an addend divided by that count, which is summed in every microbatch, early
(``early_counts``).
"""

from __future__ import annotations

from .graph import Graph
from .spec import P, Pair, R

__all__ = ["ONCE", "leaving", "lone_losses"]

ONCE = 1 - 1e-6  # to the search: of two sums that cost the same, the one that nobody waits for in a forward is better


def lone_losses(graph: Graph) -> frozenset[str]:
    """The node of the loss, unless an op or another result reads it as well."""
    nodes, kinds = graph.by_name(), dict[str, list[str]]()
    for result in graph.results:
        kinds.setdefault(result.node, []).append(result.kind)
    alone = (name for name, found in kinds.items() if found == ["loss"])
    return frozenset(name for name in alone if all(user.op == "output" for user in nodes[name].users))


def leaving(pair: Pair) -> Pair:
    """In which pair a lone loss leaves a program that makes it in ``pair``: sums are left, all else is whole."""
    return Pair(tuple(P if placement == P else R for placement in pair.value), (R,) * len(pair.value))
