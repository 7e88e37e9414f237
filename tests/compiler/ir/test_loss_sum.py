"""The loss is summed over devices once per step wherever that is exact: in plans, in prices, and on ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.ops.loss import deferrable_losses, exit_pair
from meshwright.compiler.ir.spec import parse_pair
from meshwright.compiler.plan.lower import lower
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.search.local_sgd import worthwhile_delay
from meshwright.costmodel.cluster import Cluster, Mesh
from meshwright.costmodel.collectives import mesh_prices
from meshwright.costmodel.hardware import Link
from meshwright.runtime.errors import NonFiniteLoss
from meshwright.runtime.transport.process_groups import DistributedComm
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.clusters import fast_links
from tests.support.ranks import RankPool

BATCH, STEPS, LR = 8, 3, 0.1

LOSSES: dict[str, Any] = {
    "mean": F.mse_loss,
    "total": lambda out, y: F.mse_loss(out, y, reduction="sum"),
    "scaled": lambda out, y: 0.5 * F.mse_loss(out, y) / 3 + 0.01 * out.abs().mean(),
    "likelihood": lambda out, y: -(F.log_softmax(out, -1) * y).sum(-1).mean(),
    "classes": lambda out, y: F.cross_entropy(out, y.argmax(-1), reduction="sum"),
    "root": lambda out, y: F.mse_loss(out, y).sqrt(),
    "square": lambda out, y: F.mse_loss(out, y) * F.mse_loss(out, y),
    "counted": lambda out, y: F.cross_entropy(out, y.argmax(-1)),
}
NONLINEAR = ("root", "square")
SPOKEN = (*NONLINEAR, "counted")  # in every microbatch something is summed


class Model(nn.Module):
    """float64 [b, 16] -> [b, 8]. noting: the size of its output is kept in a buffer as well."""

    def __init__(self, noting: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.last = nn.Linear(32, 8)
        self.noting = noting
        self.register_buffer("note", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.last(self.second(self.first(x)))
        if not self.noting:
            return out
        assert y is not None
        loss = F.mse_loss(out, y)
        self.note.mul_(0.5).add_(loss.detach())
        return loss


def data(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.rand(BATCH, n, generator=generator, dtype=torch.float64) for n in (16, 8))


def planned(loss: str, strategy: str, m: int, cluster: Cluster | None = None, **wishes: Any) -> mw.Plan:
    x, y = data()
    return mw.plan(
        Model(), cluster or fast_links(4), example_inputs=(x,), targets=(y,), loss_fn=LOSSES[loss], strategy=strategy,
        microbatches=m, optimizer="SGD", executable=True, zero=0, cache=False, **wishes,
    )  # fmt: skip


# ---- plans


def test_what_leaves_a_program():
    assert exit_pair(parse_pair("P,R|R,R")) == parse_pair("P,R|R,R")
    assert exit_pair(parse_pair("Pmax,P|R,P")) == parse_pair("R,P|R,R")
    x, y = data()
    for noting in (False, True):  # another reader needs the whole loss of every microbatch
        model = Model(noting)
        graph = capture(model, (x, y)) if noting else capture(model, (x,), {}, (y,), F.mse_loss)
        (loss,) = (result.node for result in graph.results if result.kind == "loss")
        assert deferrable_losses(graph) == (frozenset() if noting else {loss})
    options = {"strategy": "dp4", "microbatches": 2, "executable": True, "zero": 0, "cache": False}
    plan = mw.plan(Model(True), fast_links(4), example_inputs=(x, y), **options)
    assert plan.prediction.stages[0].collectives["forward all_reduce"] == 1
    assert not plan.prediction.stages[0].seconds["loss"]
    assert mw.verify(plan, Model(True), example_inputs=(x, y)).ok


@pytest.mark.parametrize("loss", LOSSES)
def test_only_linear_losses_wait_for_the_end_of_the_step(loss: str):
    plan, once = planned(loss, "dp4", 2), loss not in NONLINEAR
    (stage,), (prices,) = plan.stages, plan.prediction.stages
    x, y = data()
    graph = capture(Model(), (x,), {}, (y,), LOSSES[loss]).with_batch(plan.microbatch_size)
    program = lower(graph, plan, 0)
    (exit,) = (exit for exit in program.exits if exit.kind == "loss")
    assert str(exit.pair) == ("P|R" if once else "R|R")
    assert dict(prices.collectives) == dict(program.collectives)
    assert ("forward all_reduce" in prices.collectives) == (loss in SPOKEN)
    axis = mesh_prices(fast_links(4), Mesh.of(fast_links(4), 0, (4,)))[0]
    assert prices.seconds["loss"] == pytest.approx(axis.seconds("all_reduce", 8) if once else 0.0)
    assert (prices.seconds["reshard"] > 0.0) == (loss in SPOKEN)
    assert mw.verify(plan, Model(), example_inputs=(x,), targets=(y,), loss_fn=LOSSES[loss]).ok, stage


COUNTED: dict[str, tuple[Any, Callable[[list[str]], bool]]] = {  # loss of (out, y), what its program's ops must be
    "targets of inputs": (
        lambda out, y: F.cross_entropy(out, y.argmax(-1)),
        lambda ops: ops[:2] == ["argmax", "start_count"] and ops.index("wait_count") > ops.index("cross_entropy"),
    ),
    "targets of activations": (
        lambda out, y: F.cross_entropy(out, out.detach().argmax(-1)) + F.mse_loss(out, y),
        lambda ops: ops.index("start_count") == ops.index("argmax") + 1 > ops.index("linear"),
    ),
    "smooth, some ignored": (
        lambda out, y: F.cross_entropy(out, y.argmax(-1), label_smoothing=0.1, ignore_index=2),
        lambda ops: ops[:2] == ["argmax", "start_count"],
    ),
    "read twice": (
        lambda out, y: F.cross_entropy(out, y.argmax(-1)) + F.cross_entropy(0.5 * out, y.argmax(-1)),
        lambda ops: ops.count("start_count") == ops.count("wait_count") == 2,
    ),
}


@pytest.mark.parametrize("case", COUNTED)
@pytest.mark.parametrize("strategy", ["dp4", "dp2,tp2", "dp2"])
def test_targets_are_counted_before_the_model_runs(case: str, strategy: str):
    loss, holds = COUNTED[case]
    x, y = data()
    options = {"example_inputs": (x,), "targets": (y,), "loss_fn": loss}
    cluster = fast_links(2 if strategy == "dp2" else 4)
    plan = mw.plan(Model(), cluster, strategy=strategy, microbatches=2, executable=True, cache=False, **options)
    graph = capture(Model(), (x,), {}, (y,), loss).with_batch(plan.microbatch_size)
    program = lower(graph, plan, 0)
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert holds([getattr(call, "_opname", call.__name__) for call in calls])
    assert dict(plan.prediction.stages[0].collectives) == dict(program.collectives)
    assert mw.verify(plan, Model(), **options).ok


def test_of_two_sums_at_one_price_the_one_at_the_end_of_the_step_is_taken():
    stage = planned("counted", "dp4", 1).prediction.stages[0]
    assert stage.collectives["forward all_reduce"] == 1  # of the count
    assert stage.seconds["loss"] > 0


def test_a_step_pays_for_one_sum():
    far = fast_links(4)
    far = replace(far, hosts=tuple(replace(h, link=replace(h.link, alpha_s=1e-2)) for h in far.hosts))
    plans = [planned("mean", "dp4", m, far) for m in (1, 2)]
    sums = [plan.prediction.stages[0].seconds["loss"] for plan in plans]
    assert sums[0] == sums[1] > 1e-2
    assert abs(plans[1].prediction.step_s - plans[0].prediction.step_s) < sums[0] / 2
    x, y = data()
    graph = capture(Model(), (x,), {}, (y,), F.mse_loss)
    for plan in (*plans, planned("mean", "pp2,dp2", 2), planned("mean", "dp2,tp2", 2)):
        prediction = plan.prediction
        assert prediction.bound_s <= prediction.step_s
        priced = reprice(plan, graph, far if plan in plans else fast_links(4)).prediction
        assert priced.step_s == pytest.approx(prediction.step_s, rel=1e-12)
        for stage, other in zip(priced.stages, prediction.stages):
            assert stage.seconds["loss"] == pytest.approx(other.seconds["loss"])
            assert stage.step_s == pytest.approx(other.step_s)
    stage = plans[0].prediction.stages[0]
    assert stage.step_s == pytest.approx(sum(stage.seconds[cause] for cause in ("gradient", "optimizer", "loss")))


def test_a_delay_waits_for_no_loss():
    near = fast_links(1)
    far = replace(near, hosts=near.hosts * 2, link=Link("far", 1e-5, 1e12, "assumed"))
    plan = planned("mean", "dp2", 1, far)
    seconds, found = plan.prediction.stages[0].seconds, worthwhile_delay(plan)
    rest = plan.prediction.step_s - seconds["gradient"] - seconds["loss"]
    assert seconds["loss"] > 2e-5
    assert found is not None
    assert found.step_s == pytest.approx(rest)


# ---- on ranks

CASES: dict[str, tuple[int, str, dict[str, Any], int]] = {  # ranks, loss, options, sums of the loss per step
    "data, 1": (4, "mean", {"strategy": "dp4", "microbatches": 1}, 1),
    "data, 2": (4, "scaled", {"strategy": "dp4", "microbatches": 2}, 1),
    "data and tensor": (4, "likelihood", {"strategy": "dp2,tp2", "microbatches": 4, "clip_grad_norm": 0.01}, 1),
    "stages": (4, "mean", {"strategy": "pp2,dp2", "microbatches": 4, "schedule": "1f1b"}, 1),
    "halves": (4, "total", {"strategy": "pp2,dp2", "microbatches": 4, "schedule": "zb-h1"}, 1),
    "recompute": (2, "mean", {"strategy": "dp2", "microbatches": 2, "recompute": "full", "zero": 2}, 1),
    "compiled": (2, "scaled", {"strategy": "dp2", "microbatches": 2, "compile": "aot_eager"}, 1),
    "alone": (2, "scaled", {"strategy": "dp2", "microbatches": 2}, 1),
    "root": (2, "root", {"strategy": "dp2", "microbatches": 4}, 0),
    "counted": (2, "counted", {"strategy": "dp2", "microbatches": 4}, 1),
    "counted on two axes": (4, "counted", {"strategy": "pp1,dp2,tp2", "microbatches": 2}, 1),
    "counted, stages": (4, "counted", {"strategy": "pp2,dp2", "microbatches": 4, "schedule": "zb-h1"}, 1),
    "counted, recompute": (2, "counted", {"strategy": "dp2", "microbatches": 2, "recompute": "full", "zero": 3}, 1),
    "counted, compiled": (2, "counted", {"strategy": "dp2", "microbatches": 2, "compile": "aot_eager"}, 1),
}


def start(case: str, **more: Any) -> mw.Parallel:
    world, loss, options, _ = CASES[case]
    x, y = data()
    return mw.parallelize(
        Model(), fast_links(world), example_inputs=(x,), targets=(y,), loss_fn=LOSSES[loss],
        optimizer=lambda ps: torch.optim.SGD(ps, lr=LR), **{"zero": 0, **options, **more},
    )  # fmt: skip


def train(case: str) -> tuple[list[float], dict[str, Tensor], list[int], Any, float | None, bool]:
    """Losses, the last state, how many single numbers were summed at the end of each step, counts of collectives, the
    loss of an evaluation of the training programs, whether one that is not finite was told."""
    parallel = start(case)
    session, sums, plain = parallel.session, [], DistributedComm.start_all_reduce

    def counted(self: Any, x: Tensor, *rest: Any) -> Any:
        sums[-1] += x.dim() == 0 and self.phase == "step"
        return plain(self, x, *rest)

    DistributedComm.start_all_reduce, losses = counted, []  # type: ignore[method-assign]
    try:
        for step in range(STEPS):
            sums.append(0)
            x, y = data(step)
            losses.append(float(parallel.train_step(x, targets=y)))
        state, counts, evaluated = parallel.full_state_dict(), dict(session.counts), None
        sums.append(0)
        if session.plan.microbatches == 1:
            evaluated = float(session.forward(parallel._flat((x,), {}, y)[0], session.plan, session.programs)["loss"])
        try:
            parallel.train_step(torch.full_like(x, math.inf), targets=y)
            told = False
        except NonFiniteLoss:
            told = True
    finally:
        DistributedComm.start_all_reduce = plain  # type: ignore[method-assign]
    return losses, state, sums[:STEPS], counts, evaluated, told


def one_device(case: str) -> tuple[list[float], dict[str, Tensor]]:
    _, loss, options, _ = CASES[case]
    model, losses, m = Model(), [], options["microbatches"]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [LOSSES[loss](model(x), y) / m for x, y in zip(*(t.chunk(m) for t in data(step)), strict=True)]
        sum(parts).backward()  # type: ignore[union-attr]
        if "clip_grad_norm" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip_grad_norm"])
        optimizer.step()
        losses.append(sum(float(part.detach()) for part in parts))
    return losses, model.state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_one_sum_a_step_and_the_numbers_of_one_device(ranks: RankPool, case: str):
    world, loss, options, per_step = CASES[case]
    losses, state = one_device(case)
    results = ranks.run(world, train, case)
    for found, _, sums, counts, evaluated, told in results:
        assert found == pytest.approx(losses, rel=1e-9)
        assert told
        if evaluated is not None:
            model = Model()
            model.load_state_dict(state)
            x, y = data(STEPS - 1)
            assert evaluated == pytest.approx(LOSSES[loss](model(x), y).item(), rel=1e-9)
        if options["strategy"] in ("dp2", "dp4"):
            assert sums == [per_step] * STEPS
            spoken = STEPS * options["microbatches"] if loss in SPOKEN else 0
            assert counts.get(("forward", "all_reduce"), 0) == spoken
    assert [max(result[2][step] for result in results) for step in range(STEPS)] == [per_step] * STEPS
    atol = 1e-9 if "clip_grad_norm" in options else 1e-12  # norms are fp32
    for name, value in state.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=1e-9, atol=atol)


def alone() -> tuple[int, list[float], list[float], int]:
    """Of this replica: which it is, its losses and their means, how often programs and steps have summed."""
    parallel = start("alone", delay=1)
    losses, means = [], []
    for step in range(STEPS):
        x, y = data(step)
        loss = parallel.train_step(x, targets=y)
        losses.append(loss.item())
        means.append(float(parallel.mean_loss(loss)))
    spoken = sum(n for (_, kind), n in parallel.session.counts.items() if kind == "all_reduce")
    return dist.get_rank(), losses, means, spoken


@pytest.mark.ranks
def test_replicas_by_themselves_have_losses_of_their_own(ranks: RankPool):
    results = ranks.run(2, alone)
    x, y = data(0)
    out = Model()(x).detach()
    halves = [[part.chunk(2)[rank] for part in t.chunk(2)] for rank in (0, 1) for t in (out, y)]
    for rank, losses, means, spoken in results:
        own = [LOSSES["scaled"](a, b) for a, b in zip(halves[2 * rank], halves[2 * rank + 1], strict=True)]
        assert losses[0] == pytest.approx(float(sum(own)) / 2, rel=1e-9)
        assert means[0] == pytest.approx(float(LOSSES["scaled"](out, y)), rel=1e-9)
        assert spoken == 0
    assert results[0][1][0] != pytest.approx(results[1][1][0], rel=1e-3)
