"""Replicas that step by themselves: delayed gradient averaging and local SGD equal sequential simulations of the
replicas; nothing waits that need not; replicas are alike after a flush; what is refused."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import current_thread
from time import monotonic, sleep
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.runtime.collectives.worker import LANES
from meshwright.runtime.execution import replicas
from torch import nn

from tests.oracles.local_sgd import expected
from tests.support.clusters import fast_links
from tests.support.parity import case
from tests.support.replicas import ASKED, CASES, INNER, LR, OUTER, STEPS, Model, data, loss_of


def planned(delay: int) -> list[float]:
    """Two losses, means over ranks, of a model whose fastest plan has no loose axis."""
    model, (tokens, _), _ = case("gpt")
    args = tokens, tokens  # a label for every token, so that all replicas' means count alike
    parallel = mw.parallelize(
        model, fast_links(2), example_inputs=args, strategy="dp2", microbatches=1, delay=delay, optimizer=INNER["sgd"]
    )
    return [float(parallel.mean_loss(parallel.train_step(*args))) for _ in range(2)]


def test_a_delay_is_planned_for(ranks):
    model, (tokens, _), _ = case("gpt")
    losses = ranks.run(2, planned, 1)[0]
    assert losses[0] == pytest.approx(model(tokens, tokens).item(), rel=1e-5) != losses[1]


# ---- on ranks
def start(case: str, model: nn.Module | None = None, plan: Any = None, **options: Any) -> Any:
    strategy, m, _, inner, delay, every, outer = CASES[case]
    x, y = data(0)
    decided = {"strategy": strategy, "microbatches": m} if plan is None else {"plan": plan}
    return mw.parallelize(
        model or Model().double(), fast_links(dist.get_world_size()), example_inputs=(x,), targets=(y,),
        loss_fn=loss_of,
        **{"optimizer": INNER[inner], "delay": delay, "local_steps": every, "outer_optimizer": OUTER[outer], **decided,
           **({} if plan else ASKED.get(case, {})), **options},
    )  # fmt: skip


def uncorrected(parallel: Any) -> None:
    """Means arrive, and are left out."""
    parallel.session.independent_replicas.means.delay = STEPS + 1


def unaveraged(parallel: Any) -> None:
    """The mean does not replace the replica's own stale gradient, it comes on top."""
    means = parallel.session.independent_replicas.means
    start = means._start

    def planted(bucket: Any) -> Any:
        flight = start(bucket)
        flight.own = torch.zeros_like(flight.own)
        return flight

    means._start = planted


def synchronous(parallel: Any) -> None:
    """Every step averages."""
    parallel.session.independent_replicas.means.every = 1


PLANTED = {"uncorrected": uncorrected, "unaveraged": unaveraged, "synchronous": synchronous}


def train(case: str, flushes: Sequence[int], bug: str = "") -> tuple[Any, ...]:
    parallel = start(case)
    if bug:
        PLANTED[bug](parallel)
    session = parallel.session
    losses, norms = [], []
    for step in range(STEPS):
        x, y = data(step)
        loss = parallel.train_step(x, targets=y)
        losses.append((session.independent_replicas.replicas.index, float(loss)))
        norms.append(float(parallel.grad_norm))
        if step in flushes:
            parallel.flush()
    mean = float(parallel.mean_loss(loss))
    spoken = {key: n for key, n in session.counts.items() if key[1] == "all_reduce"}
    mine = [x.detach().clone() for x in session.owned_parameters.values()]
    mine += [x for s in parallel.optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
    return losses, parallel.full_state_dict(), mine, session.independent_replicas.replicas.first, mean, spoken, norms


def check(case: str, results: Sequence[tuple[Any, ...]], flushes: Sequence[int]) -> None:
    losses, state = expected(case, flushes)
    for own, _, _, _, mean, _, norms in results:
        assert [loss for _, loss in own] == pytest.approx([losses[s][r] for s, (r, _) in enumerate(own)], rel=1e-9)
        assert mean == pytest.approx(sum(losses[-1]) / len(losses[-1]), rel=1e-9)
        assert all(math.isfinite(norm) and norm > 0 for norm in norms)
    for rank, result in enumerate(results):  # bit-identical to the same place of the first replica
        twin = results[result[3][rank]]
        assert len(result[2]) == len(twin[2])
        assert all(torch.equal(a, b) for a, b in zip(result[2], twin[2], strict=True))
    found = results[0][1]
    assert found.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_equals_replicas_one_after_the_other(ranks: Any, case: str) -> None:
    flushes = (4, STEPS - 1)
    strategy = CASES[case][0]
    results = ranks.run(2 if strategy == "dp2" else 4, train, case, flushes, timeout_s=180.0)
    check(case, results, flushes)
    if strategy.startswith("dp"):
        assert not results[0][5]  # no program sums anything: means go by a group of their own


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "bug"), [("dga, 1 late", "uncorrected"), ("dga, 1 late", "unaveraged"), ("local", "synchronous")]
)
def test_faults_are_noticed(ranks: Any, case: str, bug: str) -> None:
    results = ranks.run(2, train, case, (STEPS - 1,), bug)
    with pytest.raises(AssertionError):
        check(case, results, (STEPS - 1,))


# ---- what waits, and what is in flight


def ahead(folder: str) -> tuple[int, int]:
    """Rank 1 begins its steps only once rank 0 has made ``delay`` of them. Sums that rank 0 waited for by then, and
    after one more."""
    case = "dga, 4 late"
    parallel = start(case, strategy="dp2")
    parallel.train_step(*data(0)[:1], targets=data(0)[1])  # compares the data of all ranks
    parallel.flush()
    means, mark = parallel.session.independent_replicas.means, Path(folder) / "done"
    before, waits = means.waits, 0
    deadline = monotonic() + 30
    while dist.get_rank() == 1 and not mark.exists():
        assert monotonic() < deadline, "rank 0 waited for rank 1 in its first steps"
        sleep(0.005)
    for step in range(means.delay + 1):
        if step == means.delay:
            waits = means.waits - before
            mark.touch()
        x, y = data(step)
        parallel.train_step(x, targets=y)
    return waits, means.waits - before


@pytest.mark.ranks
def test_the_first_steps_wait_for_nobody(ranks: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for first, then in ranks.run(2, ahead, folder):
            assert first == 0 < then


def prefixes(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This replica's parameters, and the same without its last D gradients, in one vector."""
    parallel = start(case)
    for step in range(STEPS):
        x, y = data(step)
        parallel.train_step(x, targets=y)
    means = parallel.session.independent_replicas.means
    assert len(means.flying) == CASES[case][4]
    here = [bucket.gather([leaf.detach() for leaf in bucket.leaves]) for bucket in means.buckets]
    local = [sum(step[k].own for step in means.flying) for k in range(len(means.buckets))]
    return torch.cat(here), torch.cat([x + LR * g for x, g in zip(here, local, strict=True)])


@pytest.mark.ranks
def test_replicas_differ_by_their_last_gradients_only(ranks: Any) -> None:
    results = ranks.run(4, prefixes, "dga, 4 late")
    for own, shared in results[1:]:
        torch.testing.assert_close(shared, results[0][1], rtol=1e-12, atol=1e-13)
        assert not torch.allclose(own, results[0][0], rtol=1e-6)


# ---- codes


def wired(code: str) -> Any:
    """A plan whose gradients travel in a code."""
    x, y = data(0)
    made = mw.plan(
        Model(), fast_links(dist.get_world_size()), example_inputs=(x,), targets=(y,), loss_fn=loss_of, zero=0,
        strategy="dp2", microbatches=1, executable=True, cache=False,
    )  # fmt: skip
    (stage,) = made.stages
    return replace(made, stages=(replace(stage, wire=(replace(stage.wire[0], compressor=code),)),))


def owing(code: str, lanes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Under SGD: how far replicas have moved, and the sum of the true means less what the code owes, in its residuals
    and in what the last flush puts into the next step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_MIN_BUCKET_BYTES", 1 if lanes > 1 else 2**20)
        parallel = start("dga, 1 late", model=Model(), delay=2, plan=wired(code))
    session = parallel.session
    buckets = session.independent_replicas.means.buckets
    assert len(buckets) == lanes
    assert [bucket.sum.exchange.group for bucket in buckets] == [one for (one,) in session.comm.own_groups[0,]][:lanes]
    threads: list[str] = []
    for bucket in buckets:
        bucket.sum._submit(lambda: threads.append(current_thread().name)).wait()
    assert len(set(threads)) == lanes

    def everything() -> torch.Tensor:
        return torch.cat([bucket.gather([leaf.detach() for leaf in bucket.leaves]) for bucket in buckets])

    first = everything()
    true = torch.zeros_like(first)
    for step in range(STEPS):
        x, y = data(step)
        parallel.train_step(x, targets=y)
        true += torch.cat([flight.own for flight in session.independent_replicas.means.flying[-1]]) / 2
        if step in (4, STEPS - 1):
            parallel.flush()
    for bucket, part in zip(buckets, true.split([sum(bucket.sizes) for bucket in buckets]), strict=True):
        part -= next(x for x in bucket.sum.residuals().values() if x.numel() == len(part)).view(-1)
    dist.all_reduce(true)
    true -= torch.cat(session.independent_replicas.means._owed)
    return (first - everything()) / LR, true


@pytest.mark.ranks
@pytest.mark.parametrize("lanes", [1, LANES])
@pytest.mark.parametrize("code", ["topk1%", "powersgd1"])
def test_a_code_owes_what_it_has_not_sent_once(ranks: Any, code: str, lanes: int) -> None:
    (moved, meant), (other, _) = ranks.run(2, owing, code, lanes)
    assert torch.equal(moved, other)
    torch.testing.assert_close(moved, meant, rtol=1e-4, atol=1e-4)


# ---- state, and what cannot be


def stored(case: str, folder: str) -> tuple[list[str], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What refuses before a flush; the state after some more steps, and of a run that took them from a checkpoint."""
    parallel = start(case)
    x, y = data(0)
    for _ in range(5):
        parallel.train_step(x, targets=y)
    told = []
    for call in (
        lambda: parallel.eval()(x), parallel.state_dict, parallel.full_state_dict,
        lambda: parallel.save_checkpoint(folder), lambda: parallel.load_checkpoint(folder),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="flush") as caught:
            call()
        told.append(str(caught.value))
    parallel.flush()
    parallel.save_checkpoint(folder)
    assert parallel.eval()(x).isfinite().all()
    again = start(case)
    again.load_checkpoint(folder)
    for step in range(5):
        x, y = data(step)
        for one in (parallel, again):
            one.train_step(x, targets=y)
    for one in (parallel, again):
        one.flush()
    return told, parallel.full_state_dict(), again.full_state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["dga of cut weights", "diloco of stages"])
def test_state_is_read_after_a_flush_and_goes_on(ranks: Any, case: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = ranks.run(4, stored, case, folder)
    told, state, again = results[0]
    assert len(told) == 5
    assert state
    for name, value in state.items():
        torch.testing.assert_close(again[name], value, rtol=1e-12, atol=0.0, msg=lambda text, n=name: f"{n}: {text}")


class Normed(nn.Module):
    """Batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def refused() -> list[str]:
    x = torch.randn(8, 8)
    told = []
    tall = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    for model, options in (
        (Normed(), {"strategy": "dp2", "delay": 1}),
        (tall, {"strategy": "tp2", "delay": 1}),
        (tall, {"strategy": "dp2", "zero": 1, "delay": 1}),
        (tall, {"strategy": "pp2", "local_steps": 4}),
        (tall, {"strategy": "dp2", "delay": -1}),
        (tall, {"strategy": "dp2", "delay": 5, "local_steps": 4}),
        (tall, {"strategy": "dp2", "outer_optimizer": INNER["sgd"]}),
        (tall, {"strategy": "dp2", "precision": "fp16", "delay": 1}),
    ):
        with pytest.raises(ValueError, match="but") as caught:
            mw.parallelize(
                model, fast_links(2), example_inputs=(x,), targets=(x,), loss_fn=nn.functional.mse_loss,
                optimizer=INNER["sgd"], microbatches=1, **options,
            )  # fmt: skip
        told.append(str(caught.value))
    return told


@pytest.mark.ranks
def test_what_replicas_cannot_do_is_refused_with_its_name(ranks: Any) -> None:
    for told in ranks.run(2, refused):
        words = ["norm", "first|0.weight", "is updated as S", "one device", "delay=-1", "delay <= local_steps",
                 "without local_steps", "fp16"]  # fmt: skip
        for text, word in zip(told, words, strict=True):
            assert any(one in text for one in word.split("|")), (word, text)


def descend(case: str, steps: int) -> tuple[float, float]:
    """The mean loss over replicas at the first step and after some."""
    parallel = start(case)
    x, y = data(0)
    first = float(parallel.mean_loss(parallel.train_step(x, targets=y)))
    for _ in range(steps):
        loss = parallel.train_step(x, targets=y)
    return first, float(parallel.mean_loss(loss))


@pytest.mark.ranks
def test_diloco_converges(ranks: Any) -> None:
    for first, last in ranks.run(4, descend, "diloco of stages", 60):
        assert last < 0.3 * first
