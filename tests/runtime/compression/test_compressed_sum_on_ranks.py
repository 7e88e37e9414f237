"""Compressed sums over real process groups: all codes on 1 to 4 ranks, and torch's own hooks as oracles."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from meshwright.costmodel.codecs import CODECS
from meshwright.runtime.compression import BucketSpec, NonFiniteGradient, Rehearsal, make_sum
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

SHAPES = ((20, 30), (7,), (4, 3, 11))
N = 739


def gradient(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(N, generator=generator) * torch.rand(N, generator=generator)


def every_code(steps: int) -> dict[str, list[torch.Tensor]]:
    """What each code gives on this rank, two buckets of it at a time in flight."""
    group, rank, found = dist.new_group(), dist.get_rank(), {}
    for name in CODECS:
        sums = [make_sum(name, BucketSpec(N, shapes=SHAPES, seed=seed, chunk=500), group) for seed in (0, 1)]
        results = []
        for step in range(steps):
            xs = [gradient(rank, step), gradient(rank, step + 100)]
            pending = [one.start(x) for one, x in zip(sums, xs)]
            for one in pending:
                one.wait()
            results += xs
        for one in sums:
            one.close()
        found[name] = results
    return found


def rehearsed(name: str, size: int, steps: int) -> list[torch.Tensor]:
    """The same in one process."""
    results = []
    world = Rehearsal(size)
    sums = [
        [make_sum(name, BucketSpec(N, shapes=SHAPES, seed=s, chunk=500), e) for e in world.exchanges] for s in (0, 1)
    ]
    for step in range(steps):
        for alike, shift in zip(sums, (0, 100)):
            xs = [gradient(rank, step + shift) for rank in range(size)]
            world.run([one.run(x) for one, x in zip(alike, xs)])
            results.append(xs[0])
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_agree_to_the_bit_and_with_the_rehearsal(ranks, size):
    found = ranks.run(size, every_code, 2)
    for name, codec in CODECS.items():
        for results in zip(*(one[name] for one in found)):
            assert all(torch.equal(result, results[0]) for result in results), name
        tolerance = 2e-2 if codec.payload == CODECS["bf16"].payload else 1e-5  # halves are rounded at every hop
        for result, wanted in zip(found[0][name], rehearsed(name, size, 2)):
            torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance, msg=name)


def poisoned() -> list[str]:
    group, rank, found = dist.new_group(), dist.get_rank(), []
    for name in ("int8", "1bit", "topk1%", "powersgd2", "bf16"):
        made = make_sum(name, BucketSpec(N, shapes=SHAPES), group)
        x = gradient(rank, 0)
        if rank == 1:
            x[3] = torch.nan
        pending = made.start(x)
        try:
            pending.wait()
        except NonFiniteGradient as error:
            found.append(str(error))
        good = gradient(rank, 1)
        made.start(good).wait()
        assert good.isfinite().all()
    return found


@pytest.mark.ranks
def test_a_nan_is_reported_on_all_ranks_by_wait(ranks):
    for reports in ranks.run(2, poisoned):
        assert len(reports) == 5
        assert all("NaN or infinity in rank 1 of the group at step 0" in report for report in reports[:3])


def beside_hooks(steps: int) -> dict[str, float]:
    """The largest relative distance of ours to torch's hooks, whose results are means."""
    group, size, rank = dist.new_group(), dist.get_world_size(), dist.get_rank()
    rank_of_matrices, worst = 2, dict.fromkeys(("powersgd2", "bf16", "fp16"), 0.0)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank_of_matrices, start_powerSGD_iter=2, min_compression_rate=1, random_seed=0
    )
    state.iter = 2
    sums = {name: make_sum(name, BucketSpec(N, shapes=SHAPES), group) for name in worst}
    torch.manual_seed(np.random.RandomState(0).randint(10**9))
    right = torch.cat([torch.randn(columns, rank_of_matrices).T.reshape(-1) for columns in (30, 33)])
    start = sums["powersgd2"].state_dict()
    sums["powersgd2"].load_state_dict({**start, "right.0": right})
    for step in range(steps):
        for name, made in sums.items():
            mine, theirs = gradient(rank, step), gradient(rank, step)
            sizes = [torch.Size(shape).numel() for shape in SHAPES]
            bucket = SimpleNamespace(
                buffer=lambda x=theirs: x, index=lambda: 0, is_last=lambda: True,
                gradients=lambda x=theirs, sizes=sizes: [p.view(s) for p, s in zip(x.split(sizes), SHAPES)],
            )  # fmt: skip
            if name == "powersgd2":
                wanted = powerSGD_hook.powerSGD_hook(state, bucket).wait()
            else:
                hook = default_hooks.bf16_compress_hook if name == "bf16" else default_hooks.fp16_compress_hook
                wanted = hook(None, bucket).wait()
            wanted = wanted[0] if isinstance(wanted, list) else wanted
            made.start(mine).wait()
            distance = float((mine / size - wanted).norm() / wanted.norm())
            worst[name] = max(worst[name], distance)
    return worst


@pytest.mark.ranks
def test_torchs_hooks_give_the_same(ranks):
    for worst in ranks.run(2, beside_hooks, 5):
        assert worst["powersgd2"] < 1e-5
        assert worst["bf16"] < 1e-6
        assert worst["fp16"] < 1e-3  # theirs divides before rounding, which matters where halves are subnormal
