"""A checkpoint that was written under one plan is read under another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx
from meshwright.runtime.checkpoint import load_checkpoint, save_checkpoint

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
    save_checkpoint(session, folder)
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
