"""Choices that other tests make one at a time, made together: precision, schedule, recompute, sharding, compiled
stages, dropout, clipping and scaled losses. Each run equals one device, at the tolerance of its precision.

Mixtures of PipeDream are in ``test_pipedream``, of delays in ``test_loose``, of codes in ``test_carried``, of padding
in ``test_padding``.
"""

from __future__ import annotations

import math
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist

from tests.support.clusters import fast_links
from tests.support.parity import TOLERANCE, case, make_optimizer
from tests.support.ranks import RankPool

STEPS, M = 5, 4
TIMEOUT_S = 180.0  # the first who compiles loads what compiles
LARGE = 2.0**21  # a loss scale under which the first gradients overflow

# precision, what is asked of the plan
CASES: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {"strategy": "pp2,dp2", "schedule": "zb-v", "zero": 3, "recompute": "selective", "compile": "eager"}),
    ("fp16", {"strategy": "pp2,dp2", "schedule": "interleaved", "zero": 1, "recompute": "full"}),
    ("fp64", {"strategy": "pp2", "schedule": "zb-v", "zero": 0, "recompute": "full", "compile": "eager"}),
]


def train(precision: str, asked: dict[str, Any]) -> tuple[Any, ...]:
    """One rank: losses, norms, the state before and after training (rank 0), steps left out, the schedule, modes and
    patterns of the plan, pieces that were compiled."""
    model, args, kwargs = case("gpt", layers=4, dropout=0.1)
    model = model.double() if precision == "fp64" else model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = mw.parallelize(
        model, fast_links(dist.get_world_size()), example_inputs=args, example_kwargs=kwargs, microbatches=M, seed=5,
        optimizer=make_optimizer("sgd"), clip_grad_norm=0.5, precision="model" if precision == "fp64" else precision,
        **asked,
    )  # fmt: skip
    if parallel.session.loss_scale is not None:
        parallel.session.loss_scale.scale = LARGE
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(parallel.train_step(*args, **kwargs)))
        norms.append(float(parallel.grad_norm))
    chunks = [chunk for stage in parallel.plan.stages for chunk in stage.chunks]
    modes = {mode for chunk in chunks for mode in chunk.recompute}
    patterns = {home.pattern for chunk in chunks for home in chunk.parameters.values()}
    compiler = parallel.session.compiler
    decided = parallel.plan.schedule, modes, patterns, 0 if compiler is None else compiler.pieces
    return losses, norms, before, parallel.full_state_dict(), parallel.skipped_steps, decided


@pytest.mark.ranks
@pytest.mark.parametrize(("precision", "asked"), CASES)
def test_a_mixture_equals_one_device(ranks: RankPool, precision: str, asked: dict[str, Any]) -> None:
    alone = {"strategy": "pp1", "recompute": "none"}
    losses, norms, before, expected, skipped, _ = ranks.run(1, train, precision, alone)[0]
    assert (skipped > 0) == (precision == "fp16")
    found = ranks.run(4 if "dp2" in asked["strategy"] else 2, train, precision, asked, timeout_s=TIMEOUT_S)
    exact = precision == "fp64"
    for own, its_norms, _, _, left_out, (schedule, modes, patterns, pieces) in found:
        assert own == pytest.approx(losses, rel=1e-9 if exact else 1e-3)
        assert its_norms[skipped:] == pytest.approx(norms[skipped:], rel=1e-9 if exact else 5e-3)
        assert left_out == skipped
        assert not any(map(math.isfinite, its_norms[:skipped]))
        assert (schedule, modes) == (asked["schedule"], {asked["recompute"]})
        assert asked["zero"] == 0 or f"zero{asked['zero']}" in patterns
        assert ("compile" in asked) == (pieces > 0)
    for name, value in expected.items():
        state = found[0][3][name]
        if exact:
            torch.testing.assert_close(state, value, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
        elif "key.bias" not in name:
            error = (state - value).norm() / (value - before[name]).norm()
            assert error < TOLERANCE[precision], f"{name}: {error}"
