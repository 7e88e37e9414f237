"""Collectives as algorithms: rounds, bytes over a link, messages and incast.

With p devices, d the bytes that one device holds *whole along the axis* (all_gather, gather: the gathered result;
scatter: what the root deals out; others: the input):

    kind            algorithm                   rounds     bytes one device sends or takes, whichever is more
    all_reduce      sequential                  2(p−1)     2 d (p−1)        naive: to the root, and back, one by one
    all_reduce      ring                        2(p−1)     2 d (p−1)/p
    all_reduce      recursive_halving_doubling  2 log p    2 d (p−1)/p      p not a power of two: + 2 rounds, + 2 d
    all_reduce      recursive_doubling          log p      d log p          likewise
    all_reduce      all_to_all                  1          d (p−1)          p² messages, p−1 into each device
    all_reduce      two_step                    2          2 d (p−1)/p      all_to_all, local sum, direct all_gather
    all_reduce      parameter_server            2          2 d (p−1)        one of the p devices is the server
    all_reduce      tree                        2 ⌈log p⌉  2 d ⌈log p⌉      binomial reduce, then broadcast
    all_gather      ring                        p−1        d (p−1)/p
    all_gather      recursive_doubling          log p      d (p−1)/p        powers of two only
    all_gather      all_to_all                  1          d (p−1)/p        every block sent directly
    reduce_scatter  ring                        p−1        d (p−1)/p
    reduce_scatter  recursive_halving           log p      d (p−1)/p        powers of two only
    reduce_scatter  all_to_all                  1          d (p−1)/p        then a local sum
    all_to_all      all_to_all, pairwise        1, p−1     d (p−1)/p
    broadcast       tree                        ⌈log p⌉    d ⌈log p⌉
    broadcast       parameter_server            1          d (p−1)          the root sends to each
    broadcast       ring                        2(p−1)     2 d (p−1)/p      p segments down a chain
    reduce          tree, ring                  as broadcast, the other way round
    reduce          direct                      1          d (p−1)          p−1 into the root
    scatter, gather tree                        ⌈log p⌉    d (p−1)/p        binomial, half of what is left each round
    scatter, gather ring                        p−1        d (p−1)/p        one block a round, passed on
    scatter, gather direct                      1          d (p−1)/p        gather: p−1 into the root
    send            direct                      1          d

With a server of its own beside the p devices the parameter server's bytes are the literature's 2 p d.

*Hierarchical* over h hosts of m devices each (``levels_of``): all_reduce is a reduce_scatter by ring within hosts, an
all_reduce of d/m between hosts on each of the m devices at once, an all_gather by ring within hosts; all_gather and
reduce_scatter are halves of it; broadcast and reduce are a tree over one device of each host and a tree within hosts.
``tests/costmodel/test_memory.py`` runs every row message by message.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ALGORITHMS",
    "ALIASES",
    "BACKENDS",
    "HIERARCHICAL",
    "IN_PLACE",
    "HierarchicalCollective",
    "Steps",
    "is_defined",
    "levels_of",
    "steps_of",
]

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": (
        "ring",
        "recursive_halving_doubling",
        "recursive_doubling",
        "all_to_all",
        "two_step",
        "parameter_server",
        "tree",
        "sequential",
    ),
    "all_gather": ("ring", "recursive_doubling", "all_to_all"),
    "reduce_scatter": ("ring", "recursive_halving", "all_to_all"),
    "all_to_all": ("all_to_all", "pairwise"),
    "broadcast": ("tree", "parameter_server", "ring"),
    "reduce": ("tree", "direct", "ring"),
    "scatter": ("tree", "direct", "ring"),
    "gather": ("tree", "direct", "ring"),
    "send": ("direct",),
}
#: the sum of a buffer that stays where it is, as gradients are summed: nothing is allocated
IN_PLACE = "all_reduce_in_place"
#: kinds with the steps of another; a profile may have wires of their own for them
ALIASES = {"all_reduce_max": "all_reduce", IN_PLACE: "all_reduce"}

#: what goes between hosts in a hierarchical collective
HIERARCHICAL: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring", "recursive_halving_doubling"),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "broadcast": ("tree",),
    "reduce": ("tree",),
}

#: what the backends run by themselves; instead of Gloo's reduce_scatter, all_to_all and a local sum
BACKENDS: dict[str, dict[str, tuple[str, ...]]] = {
    "nccl": {
        "all_reduce": ("ring", "hierarchical"),
        "all_gather": ("ring", "hierarchical"),
        "reduce_scatter": ("ring", "hierarchical"),
        "all_to_all": ("all_to_all",),
        "broadcast": ("tree",),
        "reduce": ("tree",),
        "scatter": ("direct",),
        "gather": ("direct",),
        "send": ("direct",),
    },
    "gloo": {
        "all_reduce": ("ring",),
        "all_gather": ("ring",),
        "reduce_scatter": ("all_to_all",),
        "all_to_all": ("all_to_all",),
        "broadcast": ("tree",),
        "reduce": ("ring",),
        "scatter": ("direct",),
        "gather": ("direct",),
        "send": ("direct",),
    },
}


@dataclass(frozen=True, slots=True)
class Steps:
    """One collective on one group. ``sent``: what ``nbytes`` is multiplied by to get the bytes over one device's link
    (the busier direction, summed over rounds); ``messages``: messages that one device posts or takes, whichever is
    more, summed over rounds; ``incast``: the most it takes in one round."""

    rounds: int
    sent: float
    messages: int
    incast: int = 1


@dataclass(frozen=True, slots=True)
class HierarchicalCollective:
    """A hierarchical collective: steps on the links of a host and on the network, and how many devices of a host use
    its adapter at once, each for ``between.sent``."""

    within: Steps
    between: Steps
    flows: int


NOTHING = Steps(0, 0.0, 0, 0)


def steps_of(kind: str, algorithm: str, p: int) -> Steps:
    """The steps of one row of the table above for ``p`` devices; ValueError for an unknown row or a ``p`` it is not
    defined for."""
    kind = ALIASES.get(kind, kind)
    if kind not in ALGORITHMS:
        raise ValueError(f"a collective is one of {', '.join(ALGORITHMS)}, but got {kind!r}; use one of them")
    if algorithm not in ALGORITHMS[kind]:
        raise ValueError(
            f"{kind} has the algorithms {', '.join(ALGORITHMS[kind])}, but got {algorithm!r}; use one of them"
        )
    if p < 1:
        raise ValueError(f"a group has at least one device, but got {p}; pass its size")
    if not is_defined(kind, algorithm, p):
        raise ValueError(f"{kind} by {algorithm} is defined for powers of two, but got {p} devices; use ring")
    if p == 1:
        return NOTHING
    ceil_log, share = (p - 1).bit_length(), (p - 1) / p
    if kind in ("scatter", "gather"):
        if algorithm == "direct":
            return Steps(1, share, p - 1, p - 1 if kind == "gather" else 1)
        rounds = ceil_log if algorithm == "tree" else p - 1
        return Steps(rounds, share, rounds)
    if algorithm == "sequential":
        return Steps(2 * (p - 1), 2 * (p - 1), 2 * (p - 1))
    if algorithm == "ring":
        halves = 1 if kind in ("all_gather", "reduce_scatter") else 2
        return Steps(halves * (p - 1), halves * share, halves * (p - 1))
    if algorithm in ("recursive_halving_doubling", "recursive_doubling", "recursive_halving"):
        return _recursive(kind, algorithm, p)
    if algorithm == "all_to_all":
        return Steps(1, p - 1 if kind == "all_reduce" else share, p - 1, p - 1)
    if algorithm == "two_step":
        return Steps(2, 2 * share, 2 * (p - 1), p - 1)
    if algorithm == "pairwise":
        return Steps(p - 1, share, p - 1)
    if algorithm == "parameter_server":
        return Steps(1, p - 1, p - 1, 1) if kind == "broadcast" else Steps(2, 2 * (p - 1), 2 * (p - 1), p - 1)
    if algorithm == "tree":
        halves = 2 if kind == "all_reduce" else 1
        return Steps(halves * ceil_log, halves * ceil_log, halves * ceil_log)
    assert algorithm == "direct", algorithm
    return Steps(1, p - 1, p - 1, p - 1) if kind == "reduce" else Steps(1, 1.0, 1)


def _recursive(kind: str, algorithm: str, p: int) -> Steps:
    floor_log = p.bit_length() - 1
    if kind != "all_reduce":
        return Steps(floor_log, (p - 1) / p, floor_log)
    q = 1 << floor_log  # the other p − q fold into a partner before, and get the result after
    fold = 0 if q == p else 2
    if algorithm == "recursive_doubling":
        return Steps(floor_log + fold, floor_log + fold, floor_log + fold)
    return Steps(2 * floor_log + fold, 2 * (q - 1) / q + fold, 2 * floor_log + fold)


def is_defined(kind: str, algorithm: str, p: int) -> bool:
    """True if the row has a meaning for ``p`` devices."""
    return kind == "all_reduce" or p & (p - 1) == 0 or algorithm not in ("recursive_doubling", "recursive_halving")


def levels_of(kind: str, between: str, hosts: int, members: int) -> HierarchicalCollective:
    """The steps of a hierarchical collective over ``hosts`` hosts of ``members`` devices, with ``between`` (one of
    ``HIERARCHICAL[kind]``) on the network; ValueError for another."""
    kind = ALIASES.get(kind, kind)
    if between not in HIERARCHICAL.get(kind, ()):
        known = ", ".join(f"{k} with {' or '.join(names)}" for k, names in HIERARCHICAL.items())
        raise ValueError(f"hierarchical are {known}, but got {kind} with {between!r}; use one of them")
    outer = steps_of(kind, between, hosts)
    if kind in ("broadcast", "reduce"):
        return HierarchicalCollective(steps_of(kind, "tree", members), outer, 1)
    return HierarchicalCollective(
        steps_of(kind, "ring", members),
        Steps(outer.rounds, outer.sent / members, outer.messages, outer.incast),
        members,
    )
