"""A session takes up the state of another one, under another plan, over the wire."""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.models import GPT
from meshwright.runtime.checkpoint import LiveState, load_state
from meshwright.runtime.checkpoint import live_state as module
from meshwright.runtime.checkpoint.training_state import box_of, checkpoint_tensors
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.toy_model import CASES, Part, batch_of, reference, session_of

BATCH = 8


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(64, (BATCH, 17), generator=torch.Generator().manual_seed(step))
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab=64, layers=2, hidden=32, heads=4, sequence=16)


def trained(strategy: str, steps: int, **options: Any) -> mw.Parallel:
    parallel = mw.parallelize(
        model(), mw.Cluster.local(4), example_inputs=tokens(0), strategy=strategy, microbatches=2,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1), **options,
    )  # fmt: skip
    for step in range(steps):
        parallel.train_step(*tokens(step))
    return parallel


def whole_state(session: Any) -> dict[str, torch.Tensor]:
    """All tensors of the state, whole, of this rank's stage. Collective."""
    found = {}
    for name, value in checkpoint_tensors(session):
        found[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


PLANS = {
    "pp2": ("pp2,dp2", {}),
    "tp4": ("pp1,tp4", {}),
    "zero3": ("pp1,dp4", {"zero": 3}),
    "zero1": ("pp1,dp2,tp2", {"zero": 1}),
    "pp4": ("pp4", {"schedule": "1f1b"}),
}


def moved(first: str, second: str, precision: str, round_bytes: int) -> tuple[float, list[str]]:
    """The bytes that were sent over those that differ, and the tensors that are not bit-equal afterwards."""
    module.ROUND_BYTES = round_bytes
    one = trained(PLANS[first][0], 2, precision=precision, **PLANS[first][1])
    other = trained(PLANS[second][0], 0, precision=precision, **PLANS[second][1])
    other.train_step(*tokens(7))  # other values, and a state of its optimizer
    held = {name: (box_of(x), x) for name, x in checkpoint_tensors(one.session)}
    before, live = whole_state(one.session), LiveState(one.session)
    load_state(other.session, live)
    missing = 0
    for name, value in checkpoint_tensors(other.session):
        want, (has, _) = box_of(value), held.get(name, ((), None))
        size = torch.tensor([stop - start for start, stop in want]).prod().item()
        common = [max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(want, has)] if name in held else [0]
        missing += (size - int(torch.tensor(common).prod())) * value.dtype.itemsize
    sums = torch.tensor([live.moved_bytes, missing], dtype=torch.float64)
    dist.all_reduce(sums)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, before)
    expected = {name: x for part in everyone for name, x in part.items()}
    after = whole_state(other.session)
    wrong = [name for name, x in after.items() if not torch.equal(x, expected[name])]
    assert other.session.step == 2
    module.ROUND_BYTES = 2**26
    return float(sums[0] / max(1, sums[1])), wrong


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("first", "second"), [("pp2", "tp4"), ("tp4", "zero3"), ("zero3", "pp2"), ("zero1", "pp4"), ("pp4", "zero1")]
)
@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_state_moves_bit_for_bit_and_only_what_differs(ranks: Any, first: str, second: str, precision: str) -> None:
    for ratio, wrong in ranks.run(4, moved, first, second, precision, 2**12 if precision == "bf16" else 2**26):
        assert not wrong
        assert ratio <= 1.1


def taken_over(first: list[Part], second: list[Part]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps by one session and two by the next, of a model with a tied weight and buffers."""
    session, losses = session_of(first, optimizer="adamw"), []
    for step in range(4):
        if step == 2:
            following = session_of(second, optimizer="adamw")
            load_state(following, LiveState(session))
            session = following
        losses.append(float(session.forward_backward(batch_of(step))))
        session.optimizer_step()
    return losses, {name: x.clone() for name, x in session.state.buffers.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("second", ["pp3-idle", "dp2tp2", "mixed-back"])
def test_tied_weights_and_buffers_go_along(ranks: Any, second: str) -> None:
    expected = reference("adamw", 4, CASES["mixed"][2])["losses"]
    seen = set()
    for losses, buffers in ranks.run(4, taken_over, CASES["mixed"][1], CASES[second][1]):
        assert losses == pytest.approx(expected, rel=1e-4)
        seen |= {int(x) for name, x in buffers.items() if name == "seen"}
    assert len(seen) == 1


def gone_on(first: str, second: str, global_batch: int | None) -> tuple[list[float], list[int], bool]:
    """Losses of three steps under one plan and three under the next; open files after each of four changes."""
    parallel = trained(PLANS[first][0], 0, **PLANS[first][1])
    optimizer = parallel.optimizer
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []
    for step in range(3):
        losses.append(float(parallel.train_step(*tokens(step))))
        schedule.step()
    other = trained(PLANS[second][0], 0, **PLANS[second][1]).plan
    plan = parallel.replan(plan=other) if global_batch is None else parallel.replan(global_batch=global_batch)
    assert plan is parallel.plan
    assert parallel.session.plan.global_batch == (global_batch or BATCH)
    for step in range(3, 6):
        batch = tokens(step)
        if global_batch is not None:
            batch = tuple(torch.cat([x] * (global_batch // BATCH)) for x in batch)
        losses.append(float(parallel.train_step(*batch)))
        schedule.step()
    files = []
    for _ in range(4):
        parallel.replan(plan=other)
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
    parallel.eval()
    parallel(*tokens(0))
    return losses, files, parallel.optimizer is optimizer


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("first", "second", "global_batch"), [("pp2", "tp4", None), ("zero3", "pp4", None), ("zero1", "pp2", 16)]
)
def test_training_goes_on_under_another_plan(ranks: Any, first: str, second: str, global_batch: int | None) -> None:
    one, expected = model(), []
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(6):  # a batch that is repeated has the loss of one
        loss = one(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        expected.append(float(loss.detach()))
    for losses, files, same in ranks.run(4, gone_on, first, second, global_batch):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert same
        assert files[-1] - files[0] < len(files) - 1  # else every change leaves a file open


def refused() -> list[str]:
    parallel = trained("pp2,dp2", 1)
    told = []

    def attempt(**wishes: Any) -> None:
        try:
            parallel.replan(**wishes)
        except ValueError as error:
            told.append(str(error))

    attempt(cluster=mw.Cluster.local(2))
    attempt(global_batch=7)
    parallel.forward_backward(*tokens(1))
    attempt()
    parallel.optimizer_step()
    assert torch.isfinite(parallel.train_step(*tokens(2)))
    x = torch.zeros(8, 16)
    layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    asked: dict[str, Any] = {"example_inputs": (x,), "targets": (x,), "loss_fn": nn.functional.mse_loss}
    one, other = (
        mw.parallelize(layers, mw.Cluster.local(4), strategy="pp2,dp2", schedule=schedule, **asked)
        for schedule in ("1f1b", "pipedream")
    )
    parallel = one
    attempt(plan=other.plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel = trained("pp1,dp4", 1, local_steps=2)
        attempt()
    return told


@pytest.mark.ranks
def test_what_cannot_be_taken_over_is_refused(ranks: Any) -> None:
    for told in ranks.run(4, refused):
        assert len(told) == 5, told
        assert "a plan for 2 and 4 ranks" in told[0]
        assert "7" in told[1]
        assert "gradients of a step that is not finished" in told[2]
        assert "synchronous steps, but got one of schedule 'pipedream'" in told[3]
        assert "local_steps" in told[4]
