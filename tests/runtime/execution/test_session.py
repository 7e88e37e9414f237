"""Sessions on real ranks: hand-lowered programs of a small model against the same model in eager PyTorch on one
device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
import torch.nn.functional as F
from meshwright.compiler.ir.spec import S
from meshwright.runtime.errors import NonFiniteLoss
from meshwright.runtime.execution.session import Session

from tests.support.toy_model import (
    BATCH,
    CASES,
    INFO,
    OPTIMIZERS,
    Part,
    Toy,
    batch_of,
    build,
    check,
    reference,
    session_of,
    train,
)


@pytest.mark.ranks
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", CASES)
def test_five_steps_equal_one_device(ranks: Any, case: str, optimizer: str) -> None:
    world, parts, microbatches, schedule = CASES[case]
    results = ranks.run(world, train, parts, microbatches, schedule, optimizer, 5)
    check(results, reference(optimizer, 5, microbatches))
    copies = [
        result["copies"]["w0"] for result in results if result["copies"].get("w0", torch.empty(0)).shape == (16, 8)
    ]
    assert all(torch.equal(copies[0], copy) for copy in copies)


@pytest.mark.ranks
def test_clipping_counts_each_element_once(ranks: Any) -> None:
    world, parts, microbatches, schedule = CASES["mixed"]
    results = ranks.run(world, train_clipped, parts, microbatches, schedule)
    check(results, reference("sgd", 3, microbatches, clip=0.1))


def train_clipped(parts: list[Part], microbatches: int, schedule: str) -> dict[str, Any]:
    return train(parts, microbatches, schedule, "sgd", 3, clip_grad_norm=0.1)


@pytest.mark.ranks
def test_collectives_are_those_of_the_program(ranks: Any) -> None:
    world, parts, microbatches, schedule = CASES["tp2"]
    counts = ranks.run(world, train, parts, microbatches, schedule, "sgd", 1)[0]["counts"]
    # per microbatch: h1 and out summed forward; the gradient of h1 summed where it enters the column-parallel product,
    # and that of x
    # not, because nothing asks for it
    assert counts == {("forward", "all_reduce"): 2 * microbatches, ("backward", "all_reduce"): microbatches}
    world, parts, microbatches, schedule = CASES["dp2-micro"]
    counts = ranks.run(world, train, parts, microbatches, schedule, "sgd", 1)[0]["counts"]
    assert counts == {("forward", "all_reduce"): microbatches, ("step", "all_reduce"): 1}


def train_bucketed(parts: list[Part], bucket_bytes: int) -> dict[str, Any]:
    return train(parts, 2, "1f1b", "adamw", 3, bucket_bytes=bucket_bytes)


@pytest.mark.ranks
@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 5), (600, 3)])
def test_gradients_travel_in_buckets(ranks: Any, bucket_bytes: int, buckets: int) -> None:
    # 512 bytes each but for the biases: 64 (b0) and 32 (b1); filled from the last used parameter backwards
    world, parts, _, _ = CASES["dp2"]
    results = ranks.run(world, train_bucketed, parts, bucket_bytes)
    check(results, reference("adamw", 3, 2))
    assert results[0]["counts"]["step", "all_reduce"] == 3 * buckets


def refuse(parts: list[Part]) -> str:
    plan, programs = build(parts, 2, "1f1b", dist.get_world_size())
    chunk = plan.stages[0].chunks[0]
    sharded = {name: replace(home, optimizer=(S(0),)) for name, home in chunk.parameters.items()}
    stage = replace(plan.stages[0], chunks=(replace(chunk, parameters=sharded),))
    with pytest.raises(ValueError, match="parameters in a custom sharding") as caught:
        Session(replace(plan, stages=(stage,)), programs, INFO, Toy())
    with pytest.raises(ValueError, match="not divisible by microbatches"):
        Session(replace(plan, global_batch=7), programs, INFO, Toy())
    return str(caught.value)


@pytest.mark.ranks
def test_plans_that_the_runtime_cannot_follow_are_refused(ranks: Any) -> None:
    world, parts, _, _ = CASES["dp2"]
    assert all("w0" in message or "b0" in message for message in ranks.run(world, refuse, parts))


def accumulate(parts: list[Part]) -> list[torch.Tensor]:
    session = session_of(parts)
    for step in range(3):
        session.forward_backward(batch_of(step))
    norm = session.grad_norm
    session.optimizer_step()
    session.forward_backward(batch_of(3))
    return [norm, session.grad_norm, *session.full_state_dict().values()]


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["dp2", "dp2tp2", "mixed"])
def test_repeated_forward_backward_accumulates(ranks: Any, case: str) -> None:
    world, parts, _, _ = CASES[case]
    result = ranks.run(world, accumulate, parts)[0]
    model = Toy()
    optim = OPTIMIZERS["sgd"](model.parameters())
    for step in range(3):
        (model(*batch_of(step).values())).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    optim.step()
    optim.zero_grad()
    model(*batch_of(3).values()).backward()
    torch.testing.assert_close(result[0], norm, rtol=1e-4, atol=0)
    torch.testing.assert_close(
        result[1], torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")), rtol=1e-4, atol=0
    )


def not_finite(parts: list[Part]) -> tuple[str, int, int]:
    session = session_of(parts)
    session.forward_backward(batch_of(0))
    session.optimizer_step()
    data = batch_of(1)
    data["args.x"][3] = float("nan")
    with pytest.raises(NonFiniteLoss) as caught:
        session.forward_backward(data)
    good = session.forward_backward(batch_of(2))  # the session goes on
    assert torch.isfinite(good)
    return str(caught.value), caught.value.rank, caught.value.step


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["dp2", "pp3-idle"])
def test_nan_loss_is_an_error_on_all_ranks(ranks: Any, case: str) -> None:
    world, parts, _, _ = CASES[case]
    for message, rank, step in ranks.run(world, not_finite, parts):
        assert rank == parts[-1][0][0]
        assert step == 1
        assert "nan" in message
        assert "step 1" in message


def bad_inputs(parts: list[Part]) -> list[str]:
    session = session_of(parts)
    messages = []
    good = batch_of(0)
    short = {name: x[:7] for name, x in good.items()}
    wide = {**good, "args.x": torch.zeros(BATCH, 9)}
    double = {**good, "args.x": good["args.x"].double()}
    for data in (short, wide, double, {"args.x": good["args.x"]}):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are checked by the caller
            session.forward_backward(data)
        messages.append(str(caught.value))
    assert torch.isfinite(session.forward_backward(good))
    for name, expected in (("lbfgs", "all of them"), ("adafactor", "whole parameters")):
        with pytest.raises(ValueError, match=expected):
            session_of(parts, optimizer=name)
    with pytest.raises(ValueError, match="real weights"):
        session_of(parts, weights=Toy().to("meta"))
    plan, _ = build(parts, 2, "1f1b", 4)
    with pytest.raises(ValueError, match="4 devices"):
        Session(plan, [], INFO, Toy())
    return messages


@pytest.mark.ranks
def test_bad_input_is_one_clear_error_on_every_rank(ranks: Any) -> None:
    world, parts, _, _ = CASES["uneven"]
    results = ranks.run(world, bad_inputs, parts)
    assert all(result == results[0] for result in results)
    batch, shape, dtype, missing = results[0]
    assert "must be 8" in batch
    assert "got 7" in batch
    assert "[8, 8]" in shape
    assert "float64" in dtype
    assert "args.target" in missing


def local_data(parts: list[Part], equal: bool) -> tuple[int, int, float]:
    session = session_of(parts, microbatches=1, data="local")
    data = {name: x.chunk(session.data_count)[session.data_index] for name, x in batch_of(0).items()}
    if not equal and dist.get_rank() == dist.get_world_size() - 1:
        data = {name: x + 1 for name, x in data.items()}
    return session.data_index, session.data_count, float(session.forward_backward(data))


@pytest.mark.ranks
def test_local_data(ranks: Any) -> None:
    world, parts, _, _ = CASES["dp2tp2"]
    results = ranks.run(world, local_data, parts, True)
    assert [result[:2] for result in results] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    expected = reference("sgd", 1, 1)["losses"][0]
    assert [result[2] for result in results] == pytest.approx([expected] * 4, rel=1e-5)
    with pytest.raises(
        AssertionError,
        match="ranks that share a data_index must pass equal data, but got different data on ranks 2 and 3",
    ):
        ranks.run(world, local_data, parts, False)
    world, parts, _, _ = CASES["mixed"]
    with pytest.raises(
        AssertionError, match=r"data='local' needs one split of the batch on all stages, but got 1 parts"
    ):
        ranks.run(world, local_data, parts, True)


def evaluate(parts: list[Part], layers: list[tuple[int, ...]] | None) -> tuple[torch.Tensor, torch.Tensor]:
    session = session_of(parts)
    if layers is not None:  # an evaluation that runs other layers on a stage than training does
        parts = [(*part[:3], own) for part, own in zip(parts, layers, strict=True)]
    plan, programs = build(parts, 1, "1f1b", dist.get_world_size(), batch=4, output=True)
    stage = plan.stage_of(dist.get_rank())
    mine = [] if stage is None else [programs[stage]]
    first = session.forward(batch_of(0, 4), plan, mine)["out"]
    session.forward_backward(batch_of(0))
    session.optimizer_step()
    second = session.forward(batch_of(0, 4), plan, mine)["out"]
    return first, second


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["dp2tp2", "pp3-idle", "mixed-back"])
def test_evaluation_gives_the_whole_output_everywhere(ranks: Any, case: str) -> None:
    world, parts, _, _ = CASES[case]
    layers = [(0, 1, 2), (3,)] if case == "mixed-back" else None
    results = ranks.run(world, evaluate, parts, layers)
    model, x = Toy(), batch_of(0, 4)["args.x"]
    with torch.no_grad():
        h0 = F.relu(F.linear(x, model.w0, model.b0))
        h1 = torch.tanh(F.linear(h0, model.w1, model.b1))
        expected = ((F.linear(h1, model.w2) + h0) @ model.w0) * (0.5 + (x > 0))
    for first, second in results:
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(first, second)
        assert torch.equal(second, results[0][1])
