"""The parallel run equals the single-device run: loss and every parameter after five steps, for forced shapes and
automatic plans.

fp32 at rtol 1e-4. AdamW divides a gradient by its own size, so where the true gradient is zero it amplifies rounding to
steps of lr: eps is 1e-6 (above the rounding of these gradients), and tensors whose gradient is zero throughout are
named below and compared in absolute terms. In float64 no such exception is needed, and the same runs agree to 1e-9.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from zoo import ZOO

STEPS, BATCH, LR = 5, 8, 1e-3
ZERO_GRADIENT = {
    "convnet": ("stem.bias", "bn.running_mean")
}  # the batch norm behind the bias subtracts it again, and remembers it


def make_optimizer(kind: str):
    if kind == "sgd":
        return lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9)
    return lambda ps: torch.optim.AdamW(ps, lr=LR, eps=1e-6)


def case(name: str, batch: int = BATCH, **options: Any):
    model, args, kwargs = ZOO[name](batch, **options)
    return model.train(), args, kwargs


def chunks(value: Any, m: int, i: int) -> Any:
    return value.chunk(m)[i] if isinstance(value, torch.Tensor) else value


def single_device(name: str, kind: str, m: int, options: dict[str, Any]):
    """Losses and the state dict of a plain PyTorch loop that accumulates the same microbatches."""
    options = dict(options)
    double = options.pop("double", False)
    model, args, kwargs = case(name, **options)
    if double:
        model = model.double()
        args = tuple(a.double() if a.is_floating_point() else a for a in args)
    optimizer = make_optimizer(kind)(list(model.parameters()))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for i in range(m):
            out = model(*(chunks(a, m, i) for a in args), **{k: chunks(v, m, i) for k, v in kwargs.items()})
            loss = out if isinstance(out, torch.Tensor) else out.loss
            (loss / m).backward()
            total += loss.item() / m
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def fast_links(devices: int):
    """V100s that compute a thousand times slower: on their prices even tiny models are worth parallelizing."""
    from meshwright.costmodel.cluster import Cluster

    eight = Cluster.preset("p3.16xlarge")
    device = eight.hosts[0].device
    slow = dataclasses.replace(
        device,
        flops_per_s=tuple((dtype, rate / 1000) for dtype, rate in device.flops_per_s),
        memory_bytes_per_s=device.memory_bytes_per_s / 1000,
    )
    return dataclasses.replace(eight, hosts=(dataclasses.replace(eight.hosts[0], device=slow, num_devices=devices),))


def run(name: str, kind: str, strategy: dict[str, int] | None, m: int | None, schedule: str, options: dict[str, Any]):
    """One rank of the parallel run: losses, the full state dict (rank 0), microbatches, counted and planned
    collectives."""
    import meshwright as mw

    options = dict(options)
    double = options.pop("double", False)
    model, args, kwargs = case(name, **options)
    if double:
        model = model.double()
        args = tuple(a.double() if a.is_floating_point() else a for a in args)
    parallel = mw.parallelize(
        model,
        fast_links(torch.distributed.get_world_size()),
        example_inputs=args,
        example_kwargs=kwargs,
        optimizer=make_optimizer(kind),
        strategy=strategy,
        microbatches=m,
        schedule=schedule,
    )
    losses = [float(parallel.train_step(*args, **kwargs)) for _ in range(STEPS)]
    plan = parallel.plan
    stage = plan.stage_of(torch.distributed.get_rank())
    counts = {f"{phase} {kind}": n for (phase, kind), n in parallel.session.counts.items() if phase != "step"}
    planned = (
        {}
        if stage is None
        else {k: v * plan.microbatches * STEPS for k, v in plan.prediction.stages[stage].collectives.items()}
    )
    return losses, parallel.full_state_dict(), plan.microbatches, Counter(counts), Counter(planned), plan.stages


def compare(results: Any, name: str, kind: str, options: dict[str, Any]) -> None:
    _, state, m, *_ = results[0]
    double = options.get("double", False)
    rtol = 1e-9 if double else 1e-4
    expected, reference = single_device(name, kind, m, options)
    for rank, (other, *_rest) in enumerate(results):
        torch.testing.assert_close(
            torch.tensor(other), torch.tensor(expected), rtol=rtol, atol=1e-6, msg=lambda t, r=rank: f"rank {r}: {t}"
        )
    assert set(state) == set(reference)
    for key, value in reference.items():
        zero = kind == "adamw" and not double and key in ZERO_GRADIENT.get(name, ())
        atol = 2 * LR * STEPS if zero else 1e-9 if double else 2e-5
        torch.testing.assert_close(state[key], value, rtol=rtol, atol=atol, msg=lambda t, k=key: f"{k}: {t}")
    for rank, (*_, counts, planned, _stages) in enumerate(results):
        assert counts == planned, f"rank {rank}: ran {dict(counts)}, planned {dict(planned)}"


SHAPES = {
    "dp4": ({"dp": 4}, 2),
    "tp4": ({"tp": 4}, 2),
    "pp4": ({"pp": 4}, 4),
    "dp2tp2": ({"dp": 2, "tp": 2}, 2),
    "pp2tp2": ({"pp": 2, "tp": 2}, 4),
    "pp2dp2": ({"pp": 2, "dp": 2}, 2),
    "pp2dp2tp2": ({"pp": 2, "dp": 2, "tp": 2}, 2),
}
OPTIONS: dict[str, dict[str, Any]] = {"llama": {"kv_heads": 4}, "mixtral": {"kv_heads": 4}}
MODELS = ["gpt", "llama", "t5", "convnet", "mixtral"]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("name", MODELS)
def test_forced_shape_equals_one_device(ranks, name, shape, kind):
    strategy, m = SHAPES[shape]
    size = strategy.get("pp", 1) * strategy.get("dp", 1) * strategy.get("tp", 1)
    options = OPTIONS.get(name, {})
    results = ranks.run(size, "test_parity:run", name, kind, strategy, m, "1f1b", options)
    assert [len(stage.devices) for stage in results[0][-1]] == [size // strategy.get("pp", 1)] * strategy.get("pp", 1)
    compare(results, name, kind, options)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("name", MODELS)
def test_automatic_plan_equals_one_device(ranks, name, kind):
    results = ranks.run(4, "test_parity:run", name, kind, None, None, "1f1b", OPTIONS.get(name, {}), timeout_s=120.0)
    assert sum(len(stage.devices) for stage in results[0][-1]) > 1
    compare(results, name, kind, OPTIONS.get(name, {}))


@pytest.mark.parametrize(
    ("name", "strategy"), [("gpt", {"pp": 2, "tp": 2}), ("t5", {"tp": 4}), ("convnet", {"dp": 2, "tp": 2})]
)
def test_in_float64_adamw_agrees_to_the_ninth_digit(ranks, name, strategy):
    options = {"double": True}
    results = ranks.run(4, "test_parity:run", name, "adamw", strategy, 2, "1f1b", options)
    compare(results, name, "adamw", options)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_other_models_equal_one_device(ranks, name):
    results = ranks.run(4, "test_parity:run", name, "sgd", {"pp": 2, "tp": 2}, 2, "1f1b", {})
    compare(results, name, "sgd", {})


def test_gpipe_equals_one_device(ranks):
    results = ranks.run(4, "test_parity:run", "gpt", "sgd", {"pp": 4}, 4, "gpipe", {})
    compare(results, "gpt", "sgd", {})


@pytest.mark.parametrize("size", [3, 6])
def test_odd_rank_counts_equal_one_device(ranks, size):
    results = ranks.run(
        size, "test_parity:run", "gpt", "sgd", None, None, "1f1b", {"batch": 12, "layers": 4}, timeout_s=120.0
    )
    compare(results, "gpt", "sgd", {"batch": 12, "layers": 4})
