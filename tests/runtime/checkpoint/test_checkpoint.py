"""A checkpoint that was written under one plan is read under another."""

from __future__ import annotations

import random
import resource
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx
from meshwright.compiler.plan.plan import Plan
from meshwright.models import GPT
from meshwright.runtime.checkpoint import load_checkpoint, save_checkpoint
from meshwright.runtime.checkpoint.storage import Checkpoint

from tests.support.clusters import fast_links
from tests.support.toy_model import CASES, Part, batch_of, reference, session_of


def state_round_trip(parts: list[Part], folder: str) -> bool:

    session = session_of(parts, optimizer="adamw")
    for step in range(2):
        session.forward_backward(batch_of(step))
        session.optimizer_step()
    timings = session.timings
    labels = sorted(label for label, _ in timings["actions"])
    assert labels == (["B0", "B1", "F0", "F1"] if session.stage is not None else [])
    assert 0 < timings["optimizer_s"] < 10
    assert sum(seconds for _, seconds in timings["actions"]) <= timings["forward_backward_s"]
    assert timings["peak_bytes"] > 2**20
    local = session.state_dict()
    if session.stage is not None and 0 in parts[session.stage][3]:
        assert local["w0"] is local["tied"]
        assert tuple(local["w0"].shape) == (16, 8)
    assert "shift" not in local
    assert save_checkpoint(session, folder).name == "step-00000002"
    fresh = session_of(parts, optimizer="adamw")
    fresh.load_state_dict(session.state_dict())
    for name, leaf in fresh.state.parameters.items():
        assert torch.equal(leaf, session.state.parameters[name])
    return session.stage is None or "seen" not in session.state.buffers or int(session.state.buffers["seen"]) == 4


def resume(parts: list[Part], folder: str) -> tuple[list[float], int]:
    session = session_of(parts, optimizer="adamw")
    load_checkpoint(session, folder)
    losses = []
    for step in range(2, 5):
        losses.append(float(session.forward_backward(batch_of(step))))
        session.optimizer_step()
    return losses, session.step


@pytest.mark.ranks
def test_checkpoints_cross_plans(ranks: Any, tmp_path: Any) -> None:
    world, parts, _, _ = CASES["mixed"]
    assert all(ranks.run(world, state_round_trip, parts, str(tmp_path)))
    expected = reference("adamw", 5, 2)["losses"][2:]
    for case in ("mixed", "one", "dp2tp2", "pp3-idle"):
        world, parts, _, _ = CASES[case]
        for losses, step in ranks.run(world, resume, parts, str(tmp_path)):
            assert losses == pytest.approx(expected, rel=1e-4)
            assert step == 5


# ---- through the public calls


def prepared(strategy: str) -> Any:
    """A small GPT on all ranks under this plan, its scheduler, and a batch."""
    import meshwright as mw

    torch.manual_seed(torch.distributed.get_rank())
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    parallel = mw.parallelize(
        GPT(vocab=64, layers=2, hidden=32, heads=4, sequence=16),
        fast_links(torch.distributed.get_world_size()),
        example_inputs=(tokens[:, :-1], tokens[:, 1:]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        strategy=strategy,
        microbatches=2,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(parallel.optimizer, lambda step: 1 / (step + 1))
    return parallel, schedule, (tokens[:, :-1], tokens[:, 1:])


def trained(parallel: Any, schedule: Any, batch: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(float(parallel.train_step(*batch)))
        schedule.step()
    return losses


def passed_on(strategy: str, source: str | None, run: str) -> None:
    """Load from ``source``, or train a step; and save."""
    parallel, schedule, batch = prepared(strategy)
    if source is None:
        trained(parallel, schedule, batch, 1)
    else:
        parallel.load_checkpoint(source, extra={"schedule": schedule})
        assert schedule.get_last_lr() == [5e-3]
    parallel.save_checkpoint(run, extra={"schedule": schedule})


@pytest.mark.ranks
def test_eight_ranks_two_and_one_have_the_same_bits(ranks: Any, tmp_path: Any) -> None:
    runs = [str(tmp_path / name) for name in ("8", "2", "1")]
    for world, strategy, source, run in zip((8, 2, 1), ("pp2,dp2,tp2", "dp2", "dp1"), (None, *runs), runs):
        ranks.run(world, passed_on, strategy, source, run)
    first, *others = [Checkpoint(run) for run in runs]
    names = {name for name in first.tensors if name.startswith(("model.", "optimizer."))}
    assert len(names) > 60
    for other in others:
        assert names == {name for name in other.tensors if name.startswith(("model.", "optimizer."))}
        for name in names:
            assert torch.equal(first.whole(name), other.whole(name)), name
    written = sum(path.stat().st_size for path in first.path.glob("*.safetensors"))
    assert written < sum(first.whole(name).nbytes for name in first.tensors) + 80_000  # replicas are written once
    assert Plan.load(first.path / "plan.json").num_devices == 8


def resumed(run: str) -> tuple[list[float], list[float]]:
    """Losses of three steps after an asynchronous save that later ones overlap; the same of a new job; draws."""
    parallel, schedule, batch = prepared("dp2")
    trained(parallel, schedule, batch, 1)
    extra = {"schedule": schedule, "place": {"batch": (3, 4), 5: torch.arange(3)}, "best": float("inf")}
    folder = parallel.save_checkpoint(run, extra=extra, keep=1, asynchronous=True)
    before = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    unbroken = trained(parallel, schedule, batch, 3)
    parallel.save_checkpoint(run + "-other", asynchronous=True)
    parallel.wait_for_checkpoint()
    parallel, schedule, batch = prepared("dp2")
    values = parallel.load_checkpoint(folder, extra={"schedule": schedule})
    assert values["place"]["batch"] == (3, 4)
    assert values["place"][5].tolist() == [0, 1, 2]
    assert values["best"] == float("inf")
    after = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    assert after == before
    with pytest.raises(ValueError, match=r"nothing was saved as 'loader'; it has 'schedule', 'place', 'best'"):
        parallel.load_checkpoint(run, extra={"loader": schedule})
    with pytest.raises(ValueError, match=r"extra.rate.* is builtins.function"):
        parallel.save_checkpoint(run, extra={"rate": lambda: 0})
    return unbroken, trained(parallel, schedule, batch, 3)


@pytest.mark.ranks
def test_a_run_goes_on_bit_by_bit_from_what_was_written_beside_it(ranks: Any, tmp_path: Any) -> None:
    for unbroken, again in ranks.run(2, resumed, str(tmp_path / "run")):
        assert unbroken == again


def overfull(run: str, asynchronous: bool) -> str:
    """The error of a save for which rank 1 has no room."""
    parallel, schedule, batch = prepared("dp2")
    parallel.save_checkpoint(run)
    trained(parallel, schedule, batch, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        if asynchronous:
            parallel.save_checkpoint(run, asynchronous=True)
        with pytest.raises(ValueError, match="cannot be written") as caught:
            parallel.wait_for_checkpoint() if asynchronous else parallel.save_checkpoint(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    parallel.load_checkpoint(run)
    assert parallel.session.step == 0
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_before(
    ranks: Any, tmp_path: Any, asynchronous: bool
) -> None:
    for error in ranks.run(2, overfull, str(tmp_path), asynchronous):
        assert "File too large" in error or "could not write its part" in error
        assert "step-00000000 is complete)" in error
        assert "\n" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
