"""Collectives along mesh axes, every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
from meshwright.runtime.transport.process_groups import bind


# ---- the parts
def collectives(shape: tuple[int, ...]) -> bool:
    world = dist.get_world_size()
    comm = bind(shape, range(world))
    assert comm is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64):
        for axis, size in enumerate(shape):
            place = list(comm.coordinates)
            peers = []  # what the devices along this axis hold
            for index in range(size):
                place[axis] = index
                flat = sum(c * int(torch.tensor(shape[i + 1 :]).prod()) for i, c in enumerate(place))
                peers.append((torch.arange(8 * 12, dtype=torch.float32).view(8, 12) % 7 + flat).to(dtype))
            mine, me = peers[comm.index(axis)], comm.index(axis)
            before = mine.clone()
            total = torch.stack(peers).sum(0, dtype=dtype)
            assert torch.equal(comm.all_reduce(mine, axis), total)
            assert torch.equal(comm.all_reduce(mine, axis, "max"), torch.stack(peers).amax(0))
            assert torch.equal(comm.all_reduce(mine.t(), axis), total.t())
            for dim in (0, 1):
                gathered = comm.all_gather(mine, axis, dim)
                assert gathered.is_contiguous()
                assert torch.equal(gathered, torch.cat(peers, dim))
                assert torch.equal(comm.reduce_scatter(mine, axis, dim), total.chunk(size, dim)[me])
                expected = torch.cat([peer.chunk(size, dim)[me] for peer in peers], 1 - dim)
                assert torch.equal(comm.all_to_all(mine, axis, dim, 1 - dim), expected)
            assert torch.equal(mine, before)
    assert comm.start_sum(torch.tensor(dist.get_rank()), range(len(shape))).wait() == sum(range(world))
    flags = torch.arange(4) == comm.index(0)
    assert int(comm.all_gather(flags, 0, 0).sum()) == shape[0]
    assert int(comm.all_reduce(flags, 0, "max").sum()) == shape[0]
    return True


@pytest.mark.ranks
@pytest.mark.parametrize("shape", [(2,), (2, 2), (1, 4)])
def test_collectives(ranks: Any, shape: tuple[int, ...]) -> None:
    assert all(ranks.run(torch.Size(shape).numel(), collectives, shape))
