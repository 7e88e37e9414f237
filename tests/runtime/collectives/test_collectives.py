import json
import multiprocessing
import re
import subprocess
import sys
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from meshwright.costmodel import algorithms
from meshwright.runtime.collectives.format_rounds import format_rounds
from meshwright.runtime.collectives.parameter_server import Server
from meshwright.runtime.collectives.rounds import ALGORITHMS, HIERARCHICAL, schedule_of, spans_of
from meshwright.runtime.collectives.worker import LANES

from tests.support.collective_checks import all_reduces, large, last_part, others, refusals, serve, without_one
from tests.support.message_rounds import played
from tests.support.paths import DOCS


# ---- the schedules as data
def outcome(kind, x, schedule, root):
    """(device, span) → what must stand there after the rounds, for inputs ``x``."""
    p, d = schedule.size, len(x[0])
    total = [sum(column) for column in zip(*x)]
    own = [spans_of(d, p)[schedule.place[i]] for i in range(p)]
    if kind in ("all_reduce", "reduce"):
        return {(i, (0, d)): total for i in (range(p) if kind == "all_reduce" else [root])}
    if kind == "broadcast":
        return {(i, (0, d)): x[root] for i in range(p)}
    if kind == "reduce_scatter":
        return {(i, own[i]): total[slice(*own[i])] for i in range(p)}
    if kind == "scatter":
        return {(i, own[i]): x[root][slice(*own[i])] for i in range(p)}
    if kind in ("all_gather", "gather"):
        ends = range(p) if kind == "all_gather" else [root]
        return {(i, own[j]): x[j][slice(*own[j])] for i in ends for j in range(p)}
    if kind == "send":
        return {((root + 1) % p, (0, d)): x[root]}
    assert kind == "all_to_all"
    return {(j, own[i]): x[i][slice(*own[j])] for i in range(p) for j in range(p)}


def check(schedule, length, root=0):
    x = [[(i + 1) * (k + 3) for k in range(length)] for i in range(schedule.size)]
    held = played(schedule, x)
    for (device, (a, b)), wanted in outcome(schedule.kind, x, schedule, root).items():
        assert held[device][a:b] == wanted


@pytest.mark.parametrize(("kind", "algorithm"), [(kind, name) for kind in ALGORITHMS for name in ALGORITHMS[kind]])
def test_rounds_give_the_result(kind, algorithm):
    for p in range(2 if kind == "send" else 1, 10):
        if not algorithms.is_defined(kind, algorithm, p):
            with pytest.raises(ValueError, match="powers of two"):
                schedule_of(kind, algorithm, p)
            continue
        rooted = kind in ("broadcast", "reduce", "scatter", "gather", "send")
        for root in range(p) if rooted else [0]:
            schedule = schedule_of(kind, algorithm, p, root=root)
            for length in (3 * p, *((0, 1, 2 * p + 1) if kind in ("all_reduce", "broadcast", "reduce") else ())):
                check(schedule, length, root)


@pytest.mark.parametrize(("kind", "between"), [(kind, name) for kind in HIERARCHICAL for name in HIERARCHICAL[kind]])
def test_hierarchical_rounds_give_the_result(kind, between):
    for hosts, members in [(1, 3), (2, 1), (2, 2), (3, 4), (4, 3), (5, 2)]:
        p = hosts * members
        schedule = schedule_of(kind, "hierarchical", p, members=members, between=between)
        check(schedule, 3 * p)
        if kind in ("all_reduce", "broadcast", "reduce"):
            check(schedule, p + 1)


def test_both_sides_have_the_same_names():
    assert ALGORITHMS == algorithms.ALGORITHMS
    assert HIERARCHICAL == algorithms.HIERARCHICAL


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("all_reduce", "rings", 4), {}, "all_reduce has ring.*but got 'rings'"),
        (("all_sum", "ring", 4), {}, "a collective is one of"),
        (("broadcast", "tree", 4), {"root": 4}, "the root is one of 4 devices, but got 4"),
        (("all_reduce", "hierarchical", 6), {"members": 4}, "hosts of equally many devices"),
        (("all_reduce", "hierarchical", 6), {"members": 3, "between": "tree"}, "ring or recursive_halving_doubling"),
        (("scatter", "hierarchical", 4), {}, "scatter has"),
    ],
)
def test_unknown_schedules(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        schedule_of(*arguments, **options)


# ---- on ranks


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 3, 4])
def test_every_algorithm_on_ranks(ranks, size):
    results = ranks.run(size, all_reduces)
    for wrong, bits in results:
        assert wrong == []
        assert bits == results[0][1]  # not only close: the same bits everywhere


@pytest.mark.ranks
def test_large_sums_in_chunks(ranks):
    assert ranks.run(3, large, 5 << 20) == [[]] * 3


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 3, 4])
def test_other_kinds_on_ranks(ranks, size):
    assert ranks.run(size, others) == [[]] * size


@pytest.mark.ranks
def test_refusals(ranks):
    (said, _) = ranks.run(2, refusals)
    wanted = [
        r"contiguous \[4\] torch.float32, but got \[5\]", r"but got \[4\] torch.float64", r"but got \['residual'\]",
        "but got 'rings'", "sum or max, but got 'mean'", r"a row for each of 2 ranks, but got \[3\]",
        "one from 0 to 0", r"the root scatters .*but got None",
    ]  # fmt: skip
    assert len(said) == len(wanted)
    for message, pattern in zip(said, wanted):
        assert re.search(pattern, message)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ring", "recursive_doubling"])
def test_what_has_arrived_is_a_result(ranks, name):
    for values, said in ranks.run(3, last_part, name):
        assert values == [6.0] * 8
        assert "got nothing from or through to rank" in said


@pytest.mark.parametrize("name", ["ring", "recursive_doubling"])
def test_a_rank_that_dies_is_named_by_the_others(name, tmp_path):
    seconds = 3.0
    fork = multiprocessing.get_context("fork")  # torch is imported already
    processes = [fork.Process(target=without_one, args=(rank, tmp_path, name, seconds)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        process.kill()
    told = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in (0, 2)]
    assert any("or through to rank 1, which may have died" in said[0] for _, said in told)
    for took, said in told:
        assert took < 2 * seconds
        assert len(said) == 2  # nor does the next sum wait
        assert said[0] == said[1]
        assert re.match(rf"all_reduce by {name} over 3 ranks, round|a message (to|from) it", said[0])


def test_pictures_in_the_docs_are_those_of_the_rounds():
    document = (DOCS / "collectives.md").read_text()
    drawn = [schedule_of("all_reduce", name, 4) for name in ALGORITHMS["all_reduce"]]
    drawn += [schedule_of("all_reduce", "recursive_doubling", 5)]
    drawn += [schedule_of("all_reduce", "hierarchical", 4, members=2)]
    for schedule in drawn:
        assert f"```text\n{format_rounds(schedule)}\n```" in document
    assert "0=1 ← 0" in format_rounds(schedule_of("all_to_all", "pairwise", 3))  # into another place than it comes from


# ---- the asynchronous parameter server


@pytest.mark.ranks
@pytest.mark.parametrize("staleness", [0, 3])
def test_parameter_server(ranks, staleness):
    (lead, final, steps), *workers = ranks.run(3, serve, staleness)
    assert lead <= staleness
    assert lead > 0 or staleness == 0  # the fast one does run ahead
    assert final == pytest.approx([1.0, 2.0, 3.0], abs=1e-3)
    assert steps == 80 + 40 + 60
    assert all(end == pytest.approx([1.0, 2.0, 3.0], abs=0.05) for end in workers)


def test_a_server_needs_workers():
    channel = SimpleNamespace(size=2, rank=0)
    for workers, staleness in [([], 0), ([2], 0), ([1], -1)]:
        with pytest.raises(ValueError, match="has workers among its channel's 2 ranks"):
            Server(channel, torch.zeros(1), torch.sub, workers, staleness)


def test_a_process_that_ends_waits_for_what_is_on_its_way() -> None:
    script = """
        import time
        from meshwright.runtime.collectives.worker import LANES, submit
        for lane in range(LANES):
            submit(lambda lane=lane: (time.sleep(0.3), print(f"{lane} ", end="", flush=True)), lane)
    """
    done = subprocess.run([sys.executable, "-P", "-c", dedent(script)], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == [str(lane) for lane in range(LANES)]
