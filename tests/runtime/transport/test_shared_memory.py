"""Memory that ranks of one machine share: sums and messages in it are those of the backend, and who shares it."""

from __future__ import annotations

import os
from datetime import timedelta
from time import monotonic
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.compiler.plan.cross_mesh import Tile
from meshwright.models import GPT
from meshwright.runtime.errors import PeerError
from meshwright.runtime.transport.cross_mesh import Port
from meshwright.runtime.transport.shared_memory import SharedMemory, SharedMemoryAllReduce, SharedMemoryMessages

from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def sums() -> list[tuple[bool, bool]]:
    """Per length and dtype (whether the sum is that of the ranks, whether all ranks have its bits), in a step and the
    next ones: in the buffer, in a tensor of one's own, and piece by piece; all sums under way at once."""
    near = SharedMemory.connect()
    assert near.spans_group
    cases = [(n, dtype) for n in (1, 63, 64, 65, 1003, 70000) for dtype in DTYPES]
    made = [SharedMemoryAllReduce(near, n, dtype) for n, dtype in cases]
    passage = SharedMemoryAllReduce(near, 400, torch.float32)
    found = []
    for step in range(3):
        rows = [
            torch.randn(near.size, n, generator=torch.Generator().manual_seed(step)).to(dtype) for n, dtype in cases
        ]
        given = [row[near.rank].clone() for row in rows]
        if step != 1:  # as gradients do, which are laid there
            for one, x in zip(made, given, strict=True):
                one.buffer.copy_(x)
            given = [one.buffer for one in made]
        elsewhere = [passage if step == 2 and x.dtype == torch.float32 else one for one, x in zip(made, given)]
        if step == 2:  # as large gradients do
            given = [x.clone() for x in given]
        works = [one.start(x) for one, x in zip(elsewhere, given, strict=True)]
        for work, x, row in zip(works, given, rows, strict=True):
            work.wait()
            every = [torch.empty_like(x) for _ in range(near.size)]
            dist.all_gather(every, x)
            loose = 1e-2 if x.dtype == torch.bfloat16 else 1e-6
            wanted = row.double().sum(0)
            right = torch.allclose(x.double(), wanted, rtol=loose, atol=loose * near.size)
            found.append((right, all(torch.equal(x, other) for other in every)))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums(ranks: RankPool, size: int) -> None:
    for found in ranks.run(size, sums):
        assert found == [(True, True)] * len(found)


def _ports(near: SharedMemory, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Port, SharedMemoryMessages]:
    """A port from rank 0 to rank 1."""
    messages = SharedMemoryMessages(near)
    box = tuple((0, extent) for extent in shape)
    return Port.make([Tile(0, 1, box, box)], near.rank, 100, shape, dtype, shared_memory=messages), messages


def messages(shape: tuple[int, ...], dtype: str, count: int) -> tuple[bool, int, int]:
    """Rank 0 sends ``count`` messages before rank 1 takes the first, twice; rank 1 takes them the other way round.
    Returns whether all arrived, how many messages the backend had, and how many rooms there are."""
    kind: torch.dtype = getattr(torch, dtype)
    port, near = _ports(SharedMemory.connect(), shape, kind)
    by_backend, right = 0, True
    for turn in range(2):
        wanted = [torch.full(shape, turn + i + 1, dtype=torch.int64).to(kind) for i in range(count)]
        if near.memory.rank == 0:
            works = []
            for i, x in enumerate(wanted):
                sent = x.clone()
                started = port.send(sent, i)
                if not started:
                    sent.zero_()  # it has left
                works += started
            by_backend += len(works)
            dist.barrier()
            for work, _ in works:
                work.wait()
        else:
            arriving = [port.receive(i) for i in range(count)]
            dist.barrier()
            for i in reversed(range(count)):
                right = right and torch.equal(arriving[i].wait(), wanted[i])
        dist.barrier()
    return right, by_backend, len(near._mine)


@pytest.mark.parametrize(
    ("shape", "dtype", "count", "by_backend"),
    [((3, 5), "float32", 4, 0), ((1000,), "bool", 2, 0), ((), "float64", 1, 0), ((257, 3), "bfloat16", 9, 2 * 5),
     ((0, 4), "float32", 2, 2 * 2)],
)  # fmt: skip
def test_messages(ranks: RankPool, shape: tuple[int, ...], dtype: str, count: int, by_backend: int) -> None:
    (_, sent, rooms), (right, _, _) = ranks.run(2, messages, shape, dtype, count)
    assert right
    assert sent == by_backend  # beyond four on their way, and what has no bytes
    assert rooms == (0 if 0 in shape else min(count, 4))  # that of the first turn serve the second


def peers(hosts: list[str], allowed: list[str]) -> tuple[tuple[int, ...], bool, bool]:
    """Who shares memory with this rank; whether a message and a sum that is made for it arrive all the same."""
    rank = dist.get_rank()
    os.environ |= {"MESHWRIGHT_HOST": hosts[rank], "MESHWRIGHT_SHARED_MEMORY": allowed[rank]}
    try:
        near = SharedMemory.connect()
    finally:
        del os.environ["MESHWRIGHT_HOST"], os.environ["MESHWRIGHT_SHARED_MEMORY"]
    port, _ = _ports(near, (4,), torch.float32)
    x = torch.arange(4.0)
    if rank == 0:
        started = port.send(x, 0)
        for work, _ in started:
            work.wait()
        return near.peers, near.spans_group, bool(started)
    return near.peers, near.spans_group, rank != 1 or torch.equal(port.receive(0).wait(), x)


def test_only_ranks_of_one_host_share(ranks: RankPool) -> None:
    found = ranks.run(4, peers, ["a", "a", "b", "b"], [""] * 4)
    assert [one[0] for one in found] == [(1,), (0,), (3,), (2,)]
    assert not any(spans_group for _, spans_group, _ in found)
    assert not found[0][2]  # through memory
    assert found[1][2]
    found = ranks.run(2, peers, ["a", "b"], [""] * 2)
    assert found == [((), False, True)] * 2  # through the backend


def test_it_can_be_turned_off_by_any_rank(ranks: RankPool) -> None:
    assert ranks.run(3, peers, [""] * 3, ["", "0", ""]) == [
        ((2,), False, True), ((), False, True), ((0,), False, True),
    ]  # fmt: skip


def gone() -> list[Any]:
    """Rank 0 tells two words and leaves with one unread; rank 1 hears both, then that there is nobody."""
    near = SharedMemory.connect()
    dist.barrier()
    if near.rank == 0:
        near.send_word(1, 7, 0, 11)
        near.send_word(1, 7, 0, 12)
        dist.barrier()
        del near
        dist.barrier()
        return []
    near.send_word(0, 8)
    dist.barrier()
    dist.barrier()
    heard: list[Any] = [near.receive_word(0, 7), near.receive_word(0, 7)]
    with pytest.raises(PeerError, match=r"nothing from or through to rank 0, which may have died .* start all ranks"):
        near.receive_word(0, 7)
    with pytest.raises(PeerError, match="rank 0"):
        near.send_word(0, 7)
    return heard


def test_what_was_told_arrives_after_who_told_it_has_left(ranks: RankPool) -> None:
    assert ranks.run(2, gone)[1] == [11, 12]


def late() -> float:
    """Rank 1 tells nothing; how long rank 0 waits for it in a group that waits for a second."""
    near = SharedMemory.connect(dist.new_group(timeout=timedelta(seconds=1)))
    waited = 0.0
    if near.rank == 0:
        started = monotonic()
        with pytest.raises(PeerError, match=r"rank 1, which may have died or stand still \(timed out\)"):
            near.receive_word(1, 7)
        waited = monotonic() - started
    dist.barrier()
    return waited


def test_a_rank_that_tells_nothing_is_waited_for_as_long_as_the_group_does(ranks: RankPool) -> None:
    assert 0.9 < ranks.run(2, late)[0] < 20


def trained(strategy: str, schedule: str | None, allowed: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses of three steps, the weights after them, and how many peers the pipeline's and the sums' memory has."""
    os.environ["MESHWRIGHT_SHARED_MEMORY"] = allowed
    try:
        torch.manual_seed(0)
        model = GPT(64, layers=4, hidden=32, heads=2, sequence=16)
        tokens = torch.randint(64, (2, 16, 16))
        asked: dict[str, Any] = {} if schedule is None else {"schedule": schedule, "microbatches": 8}
        parallel = mw.parallelize(
            model, mw.Cluster.local(dist.get_world_size()), example_inputs=tuple(tokens), strategy=strategy, zero=0,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **asked,
        )  # fmt: skip
        losses = [float(parallel.train_step(*tokens)) for _ in range(3)]
        near = parallel.session.executor.parts[0].incoming + parallel.session.executor.parts[0].outgoing
        shares = sum(way.forward.shared_memory is not None and bool(way.forward.shared_memory.peers) for way in near)
        assert parallel.session.reducer is not None
        shares += sum(getattr(bucket, "shared", None) is not None for bucket in parallel.session.reducer.buckets)
        return losses, parallel.full_state_dict(), shares
    finally:
        del os.environ["MESHWRIGHT_SHARED_MEMORY"]


@pytest.mark.parametrize(
    ("size", "strategy", "schedule"), [(2, "dp2", None), (4, "dp4", None), (2, "pp2", "gpipe"), (4, "pp2,dp2", "zb-v")]
)
def test_training_is_that_over_the_backend(ranks: RankPool, size: int, strategy: str, schedule: str | None) -> None:
    shared = ranks.run(size, trained, strategy, schedule, "")
    backend = ranks.run(size, trained, strategy, schedule, "0")
    assert all(shares > 0 for _, _, shares in shared)
    assert not any(shares for _, _, shares in backend)
    assert shared[0][0] == pytest.approx(backend[0][0], rel=1e-5)
    for name, value in shared[0][1].items():
        torch.testing.assert_close(value, backend[0][1][name], rtol=1e-4, atol=1e-6)
