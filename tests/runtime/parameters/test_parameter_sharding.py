"""Parameters of which ranks keep parts (ZeRO-1, 2 and 3) on real ranks: equal to one device, in the bytes that the plan
says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from meshwright.compiler.cost.layer_gathers import layer_gathers
from meshwright.compiler.cost.pricing import gradient_type
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.mixed_precision import in_precision
from meshwright.compiler.ir.graph import Graph, output_of
from meshwright.compiler.ir.ops.weight_gathers import GatherOrder, GatherPrefetcher
from meshwright.compiler.ir.spec import local_shape
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.plan.recompute import PlanLayers
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.memory import state_tensors
from meshwright.runtime.parameters.optimizer import optimizer_name

from tests.support.clusters import fast_links
from tests.support.parity import STEPS, case, chunks, make_optimizer
from tests.support.plan_documents import BATCH, PATTERNS, agree, forced, measure, sent, train
from tests.support.stage_memory import stage_memory
from tests.support.zoo import ZOO


def priced(graph: Graph, plan: Plan, stage: int) -> tuple[Counter[str], Counter[str]]:
    """The messages of weights that are gathered layer by layer as a stage's price has them, as ``sent``."""
    small = in_precision(graph, plan.precision).with_batch(plan.microbatch_size)
    layers, counts, nbytes = PlanLayers(small, plan), Counter(), Counter()
    mesh = plan.stages[stage].mesh_shape
    for chunk in plan.stages[stage].chunks:
        found = {key: home for key, home in chunk.parameters.items() if home.gather == "microbatch"}
        homes = {n.name: found[n.meta["source"].name] for n in small.placeholders("parameter")
                 if n.meta["source"].name in found}  # fmt: skip
        ops = [node for node in small if output_of(node)[0].name in chunk.ops]
        layering = layers.layering
        for one in layer_gathers(ops, layering.layer_of, homes, layering.needs_grad, layers.recompute):
            gathered, summed = (
                sum(prod(local_shape(kind.shape, home.compute.value, mesh)) * size(kind) for kind, home in some)
                for some, size in ((one.values, lambda k: k.dtype.itemsize),
                                   (one.sums, lambda k: gradient_type(k, small.mixed).dtype.itemsize))
            )  # fmt: skip
            for key, size, there in (
                ("forward all_gather", gathered, True),
                ("backward all_gather", gathered, one.again),
                ("backward reduce_scatter", summed, bool(one.sums)),
            ):
                counts[key] += plan.microbatches * there
                nbytes[key] += plan.microbatches * there * size
    return counts, nbytes


def require_priced(graph: Graph, plan: Plan, stage: int, found: Sequence[dict[str, float]]) -> None:
    """What was sent is what the price has, no more and no less. Where backwards come in halves, gradients of a layer go
    in several messages, which have its bytes together."""
    keys = {"forward all_gather", "backward all_gather", "backward reduce_scatter"}
    for what, wanted, some in zip(("counts", "bytes"), priced(graph, plan, stage), found, strict=True):
        halves = {"forward all_gather"} if what == "bytes" else {"forward all_gather", "backward reduce_scatter"}
        asked = keys - halves if plan.schedule == "zb-v" else keys  # whose plan gathers a cut position table, too
        assert {key: some.get(key, 0) for key in asked} == {key: wanted[key] for key in asked}


def patterns_of(document: dict[str, Any]) -> Counter[str]:
    plan = Plan.from_json(document)
    return Counter(home.pattern for stage in plan.stages for home in stage.chunks[0].parameters.values())


@pytest.mark.parametrize(("strategy", "m"), [("dp2", 1), ("dp2,tp2", 2), ("pp2,dp2", 4)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_equals_one_device(ranks, pattern, strategy, m):
    document = forced("gpt", (pattern,), strategy, m)
    assert patterns_of(document)[pattern] > 10
    results = ranks.run(parse_strategy(strategy).num_devices, train, document, "gpt", "adamw", {})
    agree(results, "gpt", "adamw", m, {})
    if pattern == "zero3" and "tp" not in strategy:
        plan, graph = Plan.from_json(document), capture(*case("gpt"))
        for rank, found in enumerate(results):
            require_priced(graph, plan, plan.stage_of(rank), found[3:])
    counts = results[0][3]
    if strategy == "dp2" and pattern == "zero3":  # one message per layer, forth, back and for the gradients
        forth, back = counts["forward all_gather"], counts["backward all_gather"]
        assert 2 < back <= forth == counts["backward reduce_scatter"] < 10
    elif strategy == "dp2":  # one message for all
        assert counts["step reduce_scatter"] == counts["step all_gather"] == 1


def test_mixed_patterns_clipped_with_momentum(ranks):
    """Every parameter another pattern, a weight tied across stages among them; the norm counts each element once."""
    document = forced("gpt", ("replicated", *PATTERNS), "pp2,dp2", 2)
    assert len(patterns_of(document)) == 1 + len(PATTERNS)
    results = ranks.run(4, train, document, "gpt", "sgd", {}, 0.05)
    alone = ranks.run(1, train, forced("gpt", ("replicated",), "dp1", 2), "gpt", "sgd", {}, 0.05)
    torch.testing.assert_close(torch.tensor(results[3][1]), torch.tensor(alone[0][1]), rtol=1e-4, atol=0)
    for key, value in alone[0][2].items():
        torch.testing.assert_close(results[0][2][key], value, rtol=1e-4, atol=2e-5, msg=lambda t, k=key: f"{k}: {t}")


def test_an_optimizer_of_one_kernel_equals_one_device(ranks):
    results = ranks.run(2, train, forced("gpt", ("replicated", *PATTERNS), "dp2", 2), "gpt", "fused adamw", {})
    agree(results, "gpt", "adamw", 2, {})


def test_names_say_how_an_optimizer_updates():
    names = [
        optimizer_name(lambda ps, options=options: torch.optim.SGD(ps, **options))
        for options in ({}, {"fused": True}, {"momentum": 0.9, "fused": True})
    ]
    assert names == ["SGD", "SGD+fused", "SGD+momentum+fused"]
    assert [state_tensors(name) for name in (*names, "AdamW+fused+masters")] == [(n, "") for n in (0, 0, 1, 2)]


class Sent:
    """A gather that notes when it starts and arrives."""

    def __init__(self, log: list[str], number: int) -> None:
        self.log, self.number = log, number
        log.append(f"start {number}")

    def wait(self) -> torch.Tensor:
        self.log.append(f"wait {self.number}")
        return torch.empty(0)


def test_gathers_start_one_layer_ahead_from_the_second_pass_on():
    order, passes = GatherOrder(), []
    for _ in range(2):
        log: list[str] = []
        ahead = GatherPrefetcher(order, partial(Sent, log))
        for direction in ([0, 1, 2], [2, 0]):  # a layer may need no weight in the backward
            for number in direction:
                ahead.arrival(number).wait()
                ahead.follow(number)
                log.append(f"run {number}")
            ahead.turn()
        passes.append(" ".join(log))
    assert passes[0] == " ".join(f"start {k} wait {k} run {k}" for k in (0, 1, 2, 2, 0))
    assert passes[1] == (
        "start 0 wait 0 start 1 run 0 wait 1 start 2 run 1 wait 2 run 2 start 2 wait 2 start 0 run 2 wait 0 run 0"
    )


def test_a_gather_that_nobody_asked_for_is_awaited():
    order, log = GatherOrder({("forward", 0): 1}), []
    ahead = GatherPrefetcher(order, partial(Sent, log))
    ahead.arrival(0).wait()
    ahead.follow(0)
    ahead.turn()
    assert log == ["start 0", "wait 0", "start 1", "wait 1"]
    assert not ahead.flying


def accumulate_save_and_load(documents: list[dict[str, Any]], folder: str):
    """A step of two batches under one plan, saved, and two more steps under the other."""
    import meshwright as mw

    found = []
    for document in documents:
        model, args, _ = case("gpt")
        parallel = mw.parallelize(
            model, plan=Plan.from_json(document), example_inputs=args, optimizer=make_optimizer("adamw")
        )
        if found:
            parallel.load_checkpoint(folder)
        for step in range(1 if not found else 2):
            parallel.forward_backward(*args)
            if not step and not found:
                parallel.forward_backward(*(x.flip(0).roll(1, 1) for x in args))
            parallel.optimizer_step()
        parallel.save_checkpoint(folder)
        found.append(parallel.full_state_dict())
        parallel.load_state_dict(parallel.state_dict())
        parallel.eval()
        found.append(parallel(*args).float().mean().item())
    return found


def test_accumulated_saved_loaded_and_evaluated(ranks, tmp_path):
    mixed = forced("gpt", PATTERNS, "pp2,dp2", 2)
    other = forced("gpt", ("replicated",), "dp2,tp2", 2)
    plain = forced("gpt", ("replicated",), "dp1", 2)
    (expected,) = ranks.run(1, accumulate_save_and_load, [plain, plain], str(tmp_path / "0"))
    for index, documents in enumerate([[mixed, other], [other, mixed]]):
        found = ranks.run(4, accumulate_save_and_load, documents, str(tmp_path / f"{index + 1}"))
        for at in (0, 2):
            for key, value in expected[at].items():
                torch.testing.assert_close(found[0][at][key], value, rtol=1e-4, atol=2e-5)
        for rank in found:
            assert [rank[1], rank[3]] == pytest.approx([expected[1], expected[3]], rel=1e-4)


@pytest.mark.parametrize("m", [1, 4])
def test_bytes_are_those_predicted(ranks, m):
    graph = capture(*ZOO["gpt"](BATCH, device="meta"))
    errors = {}
    for pattern in PATTERNS:
        document = forced("gpt", (pattern,), "dp2", m, Cluster.local(2))
        predicted = sum(stage_memory(graph, Plan.from_json(document), 0).values())
        measured = min(ranks.run(2, measure, document, "gpt", {}))
        errors[pattern] = abs(predicted / measured - 1)
    assert max(errors.values()) < 0.05, errors


def scheduled(schedule: str, level: int, recompute: str):
    """A rank under another schedule, first and last losses, the state; every other weight of the model is frozen."""
    import meshwright as mw

    model, args, kwargs = case("gpt", layers=4)
    freeze(model)
    parallel = mw.parallelize(
        model, fast_links(4), example_inputs=args, example_kwargs=kwargs, strategy="pp2,dp2", microbatches=4,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, foreach=True), schedule=schedule, zero=level,
        recompute=recompute,
    )  # fmt: skip
    losses = [float(parallel.train_step(*args, **kwargs)) for _ in range(STEPS)]
    found = {home.pattern for stage in parallel.plan.stages for c in stage.chunks for home in c.parameters.values()}
    return losses, parallel.full_state_dict(), found, *sent(parallel), parallel.plan.to_json()


def freeze(model: torch.nn.Module) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 != 1)


@pytest.mark.parametrize(
    ("schedule", "level", "recompute"), [("zb-v", 3, "none"), ("zb-h1", 2, "none"), ("1f1b", 3, "selective")]
)
def test_other_schedules_and_frozen_weights(ranks, schedule, level, recompute):
    model, args, _ = case("gpt", layers=4)
    freeze(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    expected = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = [model(*(chunks(x, 4, i) for x in args)) / 4 for i in range(4)]
        sum(parts).backward()
        optimizer.step()
        expected.append(sum(float(part.detach()) for part in parts))
    results = ranks.run(4, scheduled, schedule, level, recompute)
    assert f"zero{level}" in results[0][2]
    plan, graph = Plan.from_json(results[0][5]), capture(model, args)
    for rank, one in enumerate(results if level == 3 else ()):  # once in the forward and at most once more, for I alone
        told = plan.prediction.stages[plan.stage_of(rank)].collectives
        for key in ("forward all_gather", "backward all_gather"):
            assert one[3][key] == 4 * told[key] > 4
        require_priced(graph, plan, plan.stage_of(rank), one[3:5])
    for losses, *_ in results:
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(results[0][1][key], value, rtol=1e-4, atol=2e-5, msg=lambda t, k=key: f"{k}: {t}")
