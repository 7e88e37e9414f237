"""Formulas of collective algorithms against the rounds that really run, and against the literature."""

import pytest
from meshwright.costmodel.algorithms import ALGORITHMS, HIERARCHICAL, levels_of, steps_of
from meshwright.runtime.collectives.rounds import schedule_of

from tests.support.clusters import joined
from tests.support.message_rounds import counted

# ---- the formulas against the rounds that really run, as ``message_rounds`` counts them
ROWS = [(kind, algorithm) for kind, names in ALGORITHMS.items() if kind != "send" for algorithm in names]


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize(("kind", "algorithm"), ROWS)
def test_steps_against_the_rounds(kind, algorithm, p):
    if kind != "all_reduce" and algorithm in ("recursive_doubling", "recursive_halving") and p & (p - 1):
        with pytest.raises(ValueError, match="powers of two"):
            steps_of(kind, algorithm, p)
        return
    d = 8 * p
    wire = counted(schedule_of(kind, algorithm, p), d)
    steps = steps_of(kind, algorithm, p)
    assert steps.rounds == wire.rounds
    assert steps.sent * d == pytest.approx(wire.sent, rel=1e-12)
    assert steps.incast == wire.incast
    assert steps.messages == wire.messages


@pytest.mark.parametrize(("hosts", "members"), [(2, 1), (2, 2), (3, 4), (4, 3), (5, 2), (8, 8)])
@pytest.mark.parametrize(("kind", "between"), [(kind, name) for kind, names in HIERARCHICAL.items() for name in names])
def test_hierarchical_steps_against_the_rounds(kind, between, hosts, members):
    d = 8 * hosts * members
    schedule = schedule_of(kind, "hierarchical", hosts * members, members=members, between=between)
    inner = counted(schedule, d, lambda a, b: a // members == b // members)
    outer = counted(schedule, d, lambda a, b: a // members != b // members)
    adapter = counted(schedule, d, lambda a, b: a // members != b // members, per=members)
    levels = levels_of(kind, between, hosts, members)
    assert (levels.within.rounds, levels.within.messages) == (inner.rounds, inner.messages)
    assert (levels.between.rounds, levels.between.messages) == (outer.rounds, outer.messages)
    assert levels.within.sent * d == pytest.approx(inner.sent)
    assert levels.between.sent * d == pytest.approx(outer.sent)
    assert levels.flows * levels.between.sent * d == pytest.approx(adapter.sent)
    with pytest.raises(ValueError, match="hierarchical are"):
        levels_of("all_to_all", between, hosts, members)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_formulas_of_the_literature(p):
    """α·rounds + β·bytes as published: ring, all-to-all ("parallel"), recursive halving-doubling, parameter server."""
    log_p, share = p.bit_length() - 1, (p - 1) / p
    ring, halving_doubling = (steps_of("all_reduce", name, p) for name in ("ring", "recursive_halving_doubling"))
    assert (ring.rounds, ring.sent) == (2 * (p - 1), 2 * share)
    assert (halving_doubling.rounds, halving_doubling.sent) == (2 * log_p, 2 * share)
    wire = counted(schedule_of("all_reduce", "all_to_all", p), 8 * p)
    assert (wire.rounds, wire.total) == (1, p * p - p)  # p² with those to oneself
    # a server of its own: p devices and one more, whose link takes p·d and sends p·d
    d = 8 * (p + 1)
    served = counted(schedule_of("all_reduce", "parameter_server", p + 1), d)
    assert (served.rounds, served.sent) == (2, 2 * p * d)
    assert steps_of("all_reduce", "parameter_server", p + 1).incast == p
    naive = steps_of("all_reduce", "sequential", p)
    assert (naive.rounds, naive.sent, naive.incast) == (2 * (p - 1), 2 * (p - 1), 1)


def test_price_formula_and_cheapest():
    ring, _ = joined(4)
    assert ring.seconds("all_reduce", 8e6) == pytest.approx(6 * 10e-6 + 2 * 0.75 * 8e6 / 1e9)
    assert ring.seconds("all_reduce_max", 100) == ring.seconds("all_reduce", 100)
    _, cheapest = joined(6)
    for nbytes in (1, 1e8):
        rows = [steps_of("all_reduce", name, 6) for name in ALGORITHMS["all_reduce"]]
        each = [row.rounds * 10e-6 + row.sent * nbytes / 1e9 for row in rows]
        assert cheapest.seconds("all_reduce", nbytes) == pytest.approx(min(each))
    assert joined(1)[0].seconds("all_gather", 8e6) == 0.0
    # further messages into one device cost
    slow, _ = joined(5, message_s=5e-6)
    assert slow.seconds("all_to_all", 1) == pytest.approx(10e-6 + 3 * 5e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "algorithm", "size", "message"),
    [
        ("gossip", "ring", 4, "a collective is one of"),
        ("all_reduce", "magic", 4, "has the algorithms"),
        ("all_reduce", "ring", 0, "at least one"),
        ("all_gather", "recursive_doubling", 6, "powers of two"),
    ],
)
def test_collective_errors(kind, algorithm, size, message):
    with pytest.raises(ValueError, match=message):
        steps_of(kind, algorithm, size)
