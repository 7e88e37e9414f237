"""Ways to call ``plan`` and ``parallelize`` on real ranks, against plain PyTorch: meshes, saved plans, steps, norms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshwright.compiler.plan.lower import lower
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support import zoo
from tests.support.small_net import BATCHES, Net, batch, losses_of, net, one_device, same_state, sgd

pytestmark = pytest.mark.ranks


# ---- what a mesh may be; planning at the first step
def on_mesh(kind: str) -> tuple[list[float], dict[str, Tensor], int, int]:
    world = dist.get_world_size()
    meshes: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "flat": lambda: init_device_mesh("cpu", (world,)),
        "square": lambda: init_device_mesh("cpu", (2, world // 2)),
        "mesh": lambda: mw.Mesh.of(mw.Cluster.preset("p3.16xlarge"), 4, (world,)),
        "cluster": lambda: mw.Cluster.local(world),
    }
    parallel = mw.parallelize(net(), meshes[kind](), optimizer=sgd)
    losses = losses_of(parallel, BATCHES)
    return losses, parallel.full_state_dict(), parallel.plan.num_devices, parallel.plan.microbatches


@pytest.mark.parametrize("kind", ["none", "flat", "square", "mesh", "cluster"])
def test_any_mesh_and_no_example_inputs(ranks: Any, kind: str) -> None:
    results = ranks.run(4, on_mesh, kind)
    model = net()
    m = results[0][3]  # the search chose it; batch statistics are those of a microbatch
    expected = one_device(model, BATCHES, m)["losses"]
    assert all(losses == pytest.approx(expected, rel=1e-4) for losses, *_ in results)
    assert [bool(state) for _, state, *_ in results] == [True, False, False, False]
    assert {tuple(rest) for _, _, *rest in results} == {(4, m)}
    same_state(results[0][1], model)


# ---- a saved plan


def by_saved_plan(path: str) -> tuple[str | None, str | None, list[float]]:
    """The program, the model and the losses under a saved plan, on a rank where searching would fail."""
    from meshwright import api

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the search was entered")

    kept, api.make_plans = api.make_plans, refuse  # type: ignore[assignment]
    try:
        plan = mw.Plan.load(path)
        parallel = mw.parallelize(net(), plan=plan, example_inputs=BATCHES[0], optimizer=sgd)
        losses = losses_of(parallel, BATCHES)
    finally:
        api.make_plans = kept
    assert parallel.plan == plan
    program = next(iter(parallel.session.programs), None)
    return None if program is None else str(program.module.code), parallel.plan.model, losses


@pytest.mark.parametrize("strategy", [{"pp": 2, "tp": 2}, "pp2,dp2", {"dp": 4}])
def test_a_saved_plan_is_the_same_program_without_search(ranks: Any, tmp_path: Path, strategy: Any) -> None:
    from meshwright.compiler.frontend.capture import capture

    path = tmp_path / "plan.json"
    meta = copy.deepcopy(net()).to("meta")
    made = mw.plan(
        meta, "local:4", example_inputs=batch(0, 3), global_batch=8, strategy=strategy, microbatches=2, executable=True
    )
    made.save(path)
    assert mw.Plan.load(path) == made
    assert {**mw.Plan.load(path).to_json(), "outline": {}} == {"outline": {}, **made.to_json()}  # of the saved one only
    assert made.explain()
    graph = capture(net(), batch(0, 5)).with_batch(4)
    codes = [str(lower(graph, made, made.stage_of(rank)).module.code) for rank in range(4)]
    results = ranks.run(4, by_saved_plan, str(path))
    assert [code for code, *_ in results] == codes
    expected = one_device(net(), BATCHES, 2)["losses"]
    assert all(losses == pytest.approx(expected, rel=1e-4) for *_, losses in results)


# ---- calls of a step


def with_targets(strategy: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    parallel = mw.parallelize(
        net(),
        loss_fn=lambda out, y, weight: (F.mse_loss(out, y, reduction="none") * weight).mean(),
        example_inputs=(batch()[0],),
        targets=(batch()[1], batch()[1].abs()),
        strategy=strategy,
        microbatches=2,
        optimizer=sgd,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(parallel.optimizer, 1, 0.5)
    losses, rates = [], []
    for x, y in BATCHES:
        losses.append(float(parallel.train_step(x, targets=(y, y.abs()))))
        rates += scheduler.get_last_lr()
        scheduler.step()
    assert isinstance(parallel.optimizer, torch.optim.SGD)
    return losses, rates, parallel.full_state_dict()


def test_loss_function_targets_and_a_scheduler(ranks: Any) -> None:
    results = ranks.run(4, with_targets, "pp2,tp2")
    model = net()
    optimizer = sgd(list(model.parameters()))
    losses = []
    for step, (x, y) in enumerate(BATCHES):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**step
        parts = [((model(a) - b) ** 2 * b.abs()).mean() / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        sum(parts).backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(sum(parts).item())
    for other, rates, _ in results:
        assert other == pytest.approx(losses, rel=1e-4)
        assert rates == pytest.approx([0.1, 0.05, 0.025])
    same_state(results[0][2], model)


def accumulated(strategy: str) -> tuple[list[float], float, dict[str, Tensor]]:
    parallel = mw.parallelize(net(), example_inputs=BATCHES[0], strategy=strategy, microbatches=2, optimizer=sgd)
    losses = [float(parallel.forward_backward(*inputs)) for inputs in BATCHES[:2]]
    norm = float(parallel.grad_norm)
    parallel.optimizer_step()
    return losses, norm, parallel.full_state_dict()


def test_forward_backward_twice_accumulates(ranks: Any) -> None:
    results = ranks.run(2, accumulated, "pp2")
    model = net()
    optimizer, losses = sgd(list(model.parameters())), []
    for x, y in BATCHES[:2]:
        parts = [model(a, b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        (parts[0] + parts[1]).backward()
        losses.append((parts[0] + parts[1]).item())
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e30))
    optimizer.step()
    assert all(
        other == pytest.approx(losses, rel=1e-4) and n == pytest.approx(norm, rel=1e-4) for other, n, _ in results
    )
    same_state(results[0][2], model)


class Tupled(nn.Module):
    """Returns its loss in the way that ``form`` says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.net, self.form = Net(norm=False), form

    def forward(self, x: Tensor, *, y: Tensor, power: int = 2) -> Any:
        out = self.net(x)
        loss = (out - y).abs().pow(power).mean()
        return {"tuple": (loss, out), "dict": {"out": out, "loss": loss}, "scalar": loss}[self.form]


def tupled(form: str = "scalar") -> Tupled:
    torch.manual_seed(0)
    return Tupled(form)


def formed(form: str) -> tuple[float, Any, str]:
    x, y = BATCHES[0]
    parallel = mw.parallelize(
        tupled(form), example_inputs=(x,), example_kwargs={"y": y, "power": 3}, strategy="tp2", optimizer=sgd
    )
    loss = float(parallel.forward_backward(x, y=y, power=3))
    with pytest.raises(ValueError, match="power") as caught:
        parallel.forward_backward(x, y=y, power=2)
    with pytest.raises(ValueError, match="captured with inputs"):
        parallel.forward_backward(x, y=y)
    return loss, parallel.eval()(x, y=y, power=2), str(caught.value)


@pytest.mark.parametrize("form", ["tuple", "dict", "scalar"])
def test_where_the_loss_is_and_inputs_that_are_numbers(ranks: Any, form: str) -> None:
    x, y = BATCHES[0]
    model = tupled(form)
    (loss, out, message), (other, *_) = ranks.run(2, formed, form)
    whole = model.net(x)
    assert loss == other == pytest.approx((whole - y).abs().pow(3).mean().item(), rel=1e-5)
    assert "2 for 'kwargs.power', which was 3" in message
    expected = model(x, y=y, power=2)
    assert type(out) is type(expected)
    torch.testing.assert_close(out, expected)


# ---- clipping and norms


def clipped(name: str, strategy: str, m: int, clip: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model, args, kwargs = zoo.ZOO[name](8)
    parallel = mw.parallelize(
        model,
        example_inputs=args,
        example_kwargs=kwargs,
        strategy=strategy,
        microbatches=m,
        optimizer=sgd,
        clip_grad_norm=clip,
    )
    losses, norms = [], []
    for _ in range(3):
        losses.append(float(parallel.train_step(*args, **kwargs)))
        norms.append(float(parallel.grad_norm))
    if strategy.startswith("pp"):  # both copies of the tied weight
        shared = parallel.session.state.parameters.get("token_embedding.weight")
        copies: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(copies, shared if shared is None else shared.detach())
        held = [copy for copy in copies if copy is not None]
        assert len(held) == 2
        assert torch.equal(*held)
    return losses, norms, parallel.full_state_dict()


@pytest.mark.parametrize(("strategy", "m"), [("pp2", 2), ("tp2", 1), ("dp2", 2)])
def test_gradient_norm_counts_unique_elements_once(ranks: Any, strategy: str, m: int) -> None:
    results = ranks.run(2, clipped, "gpt", strategy, m, 0.5)
    model, args, _ = zoo.gpt(8)
    expected = one_device(model, [args] * 3, m, clip=0.5)
    assert expected["norms"][0] > 0.5
    for losses, norms, _ in results:
        assert losses == pytest.approx(expected["losses"], rel=1e-4)
        assert norms == pytest.approx(expected["norms"], rel=1e-4)
    same_state(results[0][2], model)
