"""Activations and weights that travel in a code: what arrives, what training makes of it, what plans say of it."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.report.reprice import reprice
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.codecs import CARRIERS, carried_bytes
from meshwright.runtime.compression import dither
from meshwright.runtime.compression.tensor_codec import tensor_codec
from meshwright.runtime.profiling.memory_meter import storages_alive
from meshwright.runtime.transport.cross_mesh import Port
from meshwright.runtime.transport.process_groups import bind

from tests.support.clusters import fast_links
from tests.support.parity import case
from tests.support.peak_memory import least_peak
from tests.support.ranks import RankPool

CPU = torch.device("cpu")
CODES = [code for code in CARRIERS if code != "none"]
WORST = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 254, "int4": 1 / 14, "int2": 1 / 3, "terngrad": 1 / 2}
"""Error of the nearest level, as a share of the largest magnitude of a block"""


# ---- one tensor


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("n", [9, 511, 513, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_arrives_within_its_levels(code, n, dtype):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    coder, size = tensor_codec(code, n, dtype, CPU), carried_bytes(code, n, dtype.itemsize)
    assert (coder is None) == (size == n * dtype.itemsize)
    if coder is None:
        return
    message = coder.encode(x)
    assert message.dtype is torch.uint8
    assert message.numel() == coder.nbytes == size
    assert torch.equal(message, coder.encode(x))
    arrived = coder.decode(message)
    assert arrived.dtype is dtype
    blocks = torch.nn.functional.pad((arrived.float() - x.float()).abs(), (0, -n % 128)).view(-1, 128)
    worst = WORST[code] * float(x.abs().max()) + 2**-8 * (dtype is torch.bfloat16) * float(x.abs().max())
    assert float(blocks.max()) <= worst * 1.01


@pytest.mark.parametrize("code", ["int8", "int4", "int2", "terngrad"])
def test_random_levels_have_no_bias_and_nearest_ones_have_less_error(code):
    x = torch.linspace(-1, 1, 257)
    coder = tensor_codec(code, 257, torch.float32, CPU)
    draws = torch.stack([coder.decode(coder.encode(x, key)) for key in range(4000)])
    spread = draws.std(0) / 4000**0.5
    assert float(((draws.mean(0) - x).abs() - 5 * spread).max()) < 1e-5
    assert (coder.decode(coder.encode(x)) - x).norm() < (draws[0] - x).norm()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(code, bad):
    x = torch.randn(3000)
    x[1000] = bad
    coder = tensor_codec(code, 3000, torch.float32, CPU)
    arrived = coder.decode(coder.encode(x))
    assert not arrived[1000].isfinite()
    assert arrived[:100].isfinite().all()


def gathered_and_scattered(code: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank: everybody's row, and its row of the sum."""
    world, rank = dist.get_world_size(), dist.get_rank()
    comm = bind((world,), range(world))
    rows = torch.stack([drawn(rank, to) for to in range(world)])
    return comm.start_all_gather(rows[0], (0,), code).wait(), comm.start_reduce_scatter(rows, (0,), code, (1,)).wait()


def drawn(source: int, target: int) -> torch.Tensor:
    return torch.randn(1500, generator=torch.Generator().manual_seed(10 * source + target))


@pytest.mark.parametrize("code", ["none", "bf16", "int8", "int4"])
def test_all_ranks_have_the_same_rows_and_exact_addends_within_levels(ranks: RankPool, code):
    found = ranks.run(3, gathered_and_scattered, code)
    coder = tensor_codec(code, 1500, torch.float32, CPU)
    for rank, (rows, total) in enumerate(found):
        assert torch.equal(rows, found[0][0])
        for source, row in enumerate(rows):
            x = drawn(source, 0)
            assert torch.equal(row, x if coder is None else coder.decode(coder.encode(x)))
        exact = sum(drawn(source, rank) for source in range(3))
        worst = 3 * 2 * WORST.get(code, 1e-6) * 5  # of three addends of magnitudes below 5, rounded either way
        assert float((total - exact).abs().max()) < worst


# ---- training


def train(
    strategy: str,
    communication: Any,
    m: int,
    schedule: str = "1f1b",
    zero: int = 0,
    steps: int = 5,
    poison: bool = False,
    recompute: str = "auto",
) -> Any:
    """This rank: losses, the whole state (rank 0), bytes that ports were given and sent, those of its collectives, the
    output of an evaluation."""
    sent = []
    original = Port._encoded

    def encoded(port: Port, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = original(port, x, *rest)
        if x.ndim == 3:  # not what tied weights exchange
            sent.append((x.nbytes, out.nbytes))
        return out

    Port._encoded = encoded
    try:
        model, args, kwargs = case("gpt", layers=4, tied=schedule != "pipedream")
        parallel = mw.parallelize(
            model, fast_links(torch.distributed.get_world_size()), example_inputs=args, example_kwargs=kwargs,
            strategy=strategy, microbatches=m, schedule=schedule, zero=zero, communication=communication, seed=3,
            recompute=recompute, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
        )  # fmt: skip
        if poison:
            next(iter(parallel.session.state.parameters.values())).data.fill_(float("nan"))
        losses = [float(parallel.train_step(*args, **kwargs)) for _ in range(steps)]
        losses += map(float, parallel.flush().values())
    finally:
        Port._encoded = original
    moved = {f"{phase} {kind}": n for (phase, kind), n in parallel.session.comm.bytes.items()}
    return losses, parallel.full_state_dict(), sent, moved, parallel(*args, **kwargs)


@pytest.mark.parametrize(("schedule", "strategy", "code"), [
    ("1f1b", "pp2", "int8"), ("zb-v", "pp2", "int8"), ("1f1b", "pp2,tp2", "int4"), ("pipedream", "pp2", "int8"),
    ("gpipe", "pp4", "bf16"), ("interleaved", "pp2", "fp16"),
])  # fmt: skip
def test_activations_in_a_code_train_nearly_alike(ranks: RankPool, schedule, strategy, code):
    count = {"pp2": 2, "pp2,tp2": 4, "pp4": 4}[strategy]
    exact = ranks.run(count, train, strategy, None, 4, schedule)
    coded = ranks.run(count, train, strategy, {"activations": code}, 4, schedule)
    known = [(a, b) for a, b in zip(exact[0][0], coded[0][0]) if a == a]
    assert known
    torch.testing.assert_close(*map(list, zip(*known)), rtol={"int4": 3e-2, "int8": 3e-3}.get(code, 1e-3), atol=0)
    assert any(a != b for a, b in known)
    sizes = [pair for one in coded for pair in one[2]]
    assert sum(one[1] for one in sizes) < {"int8": 0.27, "int4": 0.16}.get(code, 0.51) * sum(one[0] for one in sizes)


@pytest.mark.parametrize(("strategy", "code"), [("dp2", "int8"), ("dp2,tp2", "int4"), ("pp2,dp2", "bf16")])
def test_weights_in_a_code_train_nearly_alike_and_stay_equal_on_all_ranks(ranks: RankPool, strategy, code):
    count = 2 if strategy == "dp2" else 4
    exact = ranks.run(count, train, strategy, None, 2, "1f1b", 3)
    coded = ranks.run(count, train, strategy, {"weights": code}, 2, "1f1b", 3)
    rtol = {"int8": 3e-3, "int4": 6e-2}.get(code, 2e-3)
    torch.testing.assert_close(coded[0][0], exact[0][0], rtol=rtol, atol=0)
    assert coded[0][0] != exact[0][0]
    for one, other in zip(exact, coded):
        for kind in ("forward all_gather", "backward all_gather", "backward reduce_scatter"):
            share = other[3][kind] / one[3][kind]
            assert share < {"int8": 0.3, "int4": 0.3}.get(code, 0.51), (kind, share)


def test_all_codes_at_once_and_again_alike(ranks: RankPool):
    """Gradients, activations and weights in codes; two runs draw the same random numbers, one of which recomputes its
    layers and gathers their weights once more for that."""
    asked = {"gradients": "bf16", "activations": "int8", "weights": "int8"}
    one, two = (
        ranks.run(4, train, "pp2,dp2", asked, 2, "interleaved", 3, 5, False, recompute)
        for recompute in ("none", "full")
    )
    assert one[0][0] == two[0][0]
    for key, value in one[0][1].items():
        assert torch.equal(value, two[0][1][key]), key


def test_a_nan_is_not_hidden_by_a_code(ranks: RankPool):
    with pytest.raises(AssertionError, match="NonFiniteLoss"):
        ranks.run(2, train, "pp2", {"activations": "int8"}, 2, "1f1b", 0, 1, True)


# ---- plans


def planned(communication: Any = None, strategy: str = "pp2,dp2", **options: Any) -> Plan:
    model, args, kwargs = case("gpt", layers=4)
    return mw.plan(
        model, fast_links(4), example_inputs=args, example_kwargs=kwargs, strategy=strategy, microbatches=4,
        communication=communication, schedule="1f1b", executable=True, cache=False, **options,
    )  # fmt: skip


def test_a_plan_says_its_codes_and_their_price():
    plain, coded = planned(zero=3), planned({"activations": "int8", "weights": "int4"}, zero=3)
    assert coded.codes == {"activations": "int8", "weights": "int4"}
    assert Plan.from_json(coded.to_json()) == replace(coded, graph=None)
    assert not plain.codes
    assert "activations in int8, weights in int4" in coded.explain()
    assert "weights are compressed by int4, which is lossy" in " ".join(coded.prediction.notes)
    assert coded.prediction.bound_s <= coded.prediction.step_s
    assert sum(t.forward_s for t in coded.transfers) < sum(t.forward_s for t in plain.transfers)
    assert all(
        one.seconds["gather"] != other.seconds["gather"]
        for one, other in zip(coded.prediction.stages, plain.prediction.stages)
    )
    graph = capture(*case("gpt", layers=4))
    again = reprice(coded, graph, Cluster.from_json(json.dumps(coded.cluster)))
    assert again.prediction.step_s == pytest.approx(coded.prediction.step_s, rel=1e-9)
    older = coded.to_json()
    del older["codes"]
    assert Plan.from_json(older).codes == {}
    assert "codes are of activations and weights, but got 'tea'" in replace(coded, codes={"tea": "int8"}).check()[0]
    assert "activations travel in one of" in replace(coded, codes={"activations": "1bit"}).check()[0]


@pytest.mark.parametrize(("asked", "fault"), [
    ({"activations": "1bit"}, "activations travel in one of the codes"), ({"weigths": "int8"}, "weigths"),
    ({"gradients": "int9"}, "communication is exact"),
])  # fmt: skip
def test_an_unknown_code_is_one_clear_error(asked, fault):
    with pytest.raises(ValueError, match=fault):
        planned(asked)


def weigh(strategy: str, communication: Any, zero: int) -> tuple[float, int]:
    """(predicted, measured) bytes of this rank, as if no code had drawn in this process yet."""
    dither._table.cache_clear()
    gc.collect()
    before = sum(storages_alive().values())
    model, args, kwargs = case("gpt", layers=4)
    parallel = mw.parallelize(
        model, fast_links(torch.distributed.get_world_size()), example_inputs=args, example_kwargs=kwargs,
        strategy=strategy, microbatches=4, zero=zero, communication=communication, schedule="1f1b",
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    )  # fmt: skip
    del model
    parallel.train_step(*args, **kwargs)
    peak = least_peak(lambda: parallel.train_step(*args, **kwargs))
    memory = parallel.plan.prediction.stages[parallel.plan.stage_of(torch.distributed.get_rank())].memory_bytes
    return sum(memory.values()) - memory["framework"], peak - before


@pytest.mark.parametrize(
    ("strategy", "asked", "zero"), [("pp2", {"activations": "int8"}, 0), ("dp2", {"weights": "int8"}, 3)]
)
def test_bytes_are_those_predicted(ranks: RankPool, strategy, asked, zero):
    for predicted, measured in ranks.run(2, weigh, strategy, asked, zero):
        assert predicted == pytest.approx(measured, rel=0.08)
