"""First values, dropout, state dicts, checkpoints and frozen weights on real ranks, against plain PyTorch."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support import zoo
from tests.support.small_net import BATCHES, FEATURES, Net, adamw, losses_of, net, one_device, same_state, sgd, still

pytestmark = pytest.mark.ranks


# ---- first values
def first_values(seeds: str, kind: str, strategy: str | None) -> tuple[dict[str, Tensor], list[str]]:
    """The state after parallelize under this strategy, and the names for which this rank ran init."""
    rank = dist.get_rank()
    source = net(rank if seeds == "by rank" else 0)
    called: list[str] = []

    def init(name: str, x: Tensor) -> None:
        called.append(name)
        if name.endswith("weight"):
            x.normal_()
        else:
            x.zero_()

    given: dict[str, Any] = {}
    model: nn.Module = source
    if kind == "init":
        model, given = source.to("meta"), {"init": init}
    elif kind == "state":
        state = source.state_dict()
        model, given = copy.deepcopy(source).to("meta"), {"state_dict": state}
    elif kind == "part":
        state = {name: x for name, x in source.state_dict().items() if name.startswith("up")}
        model, given = copy.deepcopy(source).to("meta"), {"state_dict": state, "init": init}
    parallel = mw.parallelize(model, example_inputs=BATCHES[0], strategy=strategy, microbatches=1, seed=5, **given)
    return parallel.full_state_dict(), called


def test_rank_0_wins(ranks: Any) -> None:
    results = ranks.run(2, first_values, "by rank", "real", "pp2")
    expected = net(0).state_dict()
    assert all(torch.equal(results[0][0][name], value) for name, value in expected.items())
    results = ranks.run(2, first_values, "by rank", "state", "tp2")
    assert all(torch.equal(results[0][0][name], value) for name, value in expected.items())


def test_init_does_not_depend_on_the_plan_and_runs_where_tensors_live(ranks: Any) -> None:
    states = []
    names = set(net().state_dict())
    for strategy in ("tp2", "pp2", "dp2"):
        (state, first), (_, second) = ranks.run(2, first_values, "alike", "init", strategy)
        states.append(state)
        assert len(set(first)) == len(first)
        assert set(first) | set(second) == names
        if strategy == "pp2":  # no rank makes what it does not keep
            assert not {name for name in first if name in second and "num_batches" not in name}
    assert states[0].keys() == names
    assert all(torch.equal(states[0][name], other[name]) for other in states[1:] for name in names)
    assert float(states[0]["up.weight"].std()) > 0.5
    (state, first), (_, second) = ranks.run(2, first_values, "alike", "part", "tp2")
    assert torch.equal(state["up.weight"], net().up.weight)
    assert torch.equal(state["down.weight"], states[0]["down.weight"])
    assert not any(name.startswith("up") for name in first + second)


def alive_in_init(strategy: str) -> tuple[int, int, int]:
    """Most whole tensors that lived at once during init, elements this rank keeps, elements of the model."""
    made: list[weakref.ref[Any]] = []
    alive = []

    def init(name: str, x: Tensor) -> None:
        made.append(weakref.ref(x))
        x.fill_(len(made))
        alive.append(sum(ref() is not None for ref in made))

    model = zoo.gpt(8, device="meta", tied=False)[0]
    parallel = mw.parallelize(model, example_inputs=zoo.gpt(8)[1], strategy=strategy, microbatches=1, init=init)
    kept = sum(p.numel() for p in parallel.session.state.parameters.values())
    assert sum(p.untyped_storage().nbytes() for p in parallel.session.state.parameters.values()) == 4 * kept
    return max(alive), kept, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("strategy", ["tp2", "pp2"])
def test_a_meta_model_needs_shards_and_one_tensor(ranks: Any, strategy: str) -> None:
    for alive, kept, total in ranks.run(2, alive_in_init, strategy):
        assert alive == 1
        assert kept < (0.75 * total if strategy == "tp2" else total)


# ---- dropout


def dropped(strategy: str | None, m: int) -> tuple[list[float], dict[str, Tensor], list[float]]:
    model, args, _ = zoo.gpt(8, dropout=0.2)
    parallel = mw.parallelize(model, example_inputs=args, strategy=strategy, microbatches=m, optimizer=sgd, seed=3)
    losses = [float(parallel.train_step(*args)) for _ in range(3)]
    return losses, parallel.full_state_dict(), [float(parallel.forward_backward(*args)) for _ in range(2)]


@pytest.fixture(scope="module")
def dropped_alone(ranks: Any) -> Any:
    (result,) = ranks.run(1, dropped, None, 2)
    return result


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "pp2"])
def test_dropout_does_not_depend_on_the_plan(ranks: Any, dropped_alone: Any, strategy: str) -> None:
    losses, state, more = dropped_alone
    assert more[0] != pytest.approx(more[1], rel=1e-4)  # same weights, same data: other microbatches of the same step
    for other, _, other_more in (results := ranks.run(2, dropped, strategy, 2)):
        assert other == pytest.approx(losses, rel=1e-5)
        assert other_more == pytest.approx(more, rel=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=1e-4, atol=1e-6)
    again = ranks.run(2, dropped, strategy, 2)
    assert [losses for losses, *_ in again] == [losses for losses, *_ in results]


def repeated_dropout() -> list[float]:
    x = torch.ones(8, FEATURES)
    parallel = mw.parallelize(
        net(norm=False, dropout=0.5), example_inputs=(x, x), strategy="dp2", microbatches=1, optimizer=still
    )
    return [float(parallel.train_step(x, x)) for _ in range(4)]


def test_dropout_differs_between_steps(ranks: Any) -> None:
    losses, other = ranks.run(2, repeated_dropout)
    assert losses == other
    assert len(set(losses)) == 4


# ---- state


def states(folder: str, first: str, second: str) -> tuple[dict[str, Tensor], list[float], list[float], list[float]]:
    _, args, _ = zoo.gpt(8)
    made = lambda strategy, seed: mw.parallelize(  # noqa: E731
        zoo.gpt(8)[0] if seed is None else reseeded(seed),
        example_inputs=args,
        strategy=strategy,
        microbatches=2,
        optimizer=adamw,
    )
    one = made(first, None)
    before = [float(one.train_step(*args)) for _ in range(2)]
    full = one.full_state_dict()
    assert all(isinstance(value, DTensor) for value in one.state_dict().values())
    local = {name: value.clone() for name, value in one.state_dict().items()}  # they share memory with the parameters
    owner = {name: value.full_tensor() for name, value in local.items()}
    shared = [full]
    dist.broadcast_object_list(shared, 0)
    full = shared[0]
    assert all(torch.equal(value, full[name]) for name, value in owner.items())
    one.save_checkpoint(folder)
    expected = [float(one.train_step(*args)) for _ in range(2)]
    two = made(second, 7)
    two.load_checkpoint(folder)
    resumed = [float(two.train_step(*args)) for _ in range(2)]
    three = made(second, 8)
    three.load_state_dict(full)
    assert float(three.forward_backward(*args)) == pytest.approx(expected[0], rel=1e-5)
    four = made(first, 9)
    four.load_state_dict(local)
    assert float(four.forward_backward(*args)) == pytest.approx(expected[0], rel=1e-5)
    return full, before, expected, resumed


def reseeded(seed: int) -> nn.Module:
    model = zoo.gpt(8)[0]
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


@pytest.mark.parametrize(("first", "second"), [("tp2", "pp2"), ("pp2", "dp2")])
def test_state_dicts_and_checkpoints_across_plans(ranks: Any, tmp_path: Path, first: str, second: str) -> None:
    results = ranks.run(2, states, str(tmp_path / "checkpoint"), first, second)
    model = zoo.gpt(8)[0]
    model.load_state_dict(results[0][0], strict=True)
    for _, before, expected, resumed in results:
        assert before[0] != before[1]
        assert resumed == pytest.approx(expected, rel=1e-5)


class Partly(nn.Module):
    """Frozen, unused and trained parameters, and a stage boundary behind a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.net = Net()
        self.register_buffer("idle", torch.arange(4.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(torch.tanh(self.frozen(x)), y)


def partly(seed: int = 0) -> Partly:
    torch.manual_seed(seed)
    return Partly()


def partly_trained(strategy: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    parallel = mw.parallelize(
        partly(dist.get_rank()), example_inputs=BATCHES[0], strategy=strategy, microbatches=2, optimizer=sgd
    )
    losses, norms = [], []
    for inputs in BATCHES:
        losses.append(float(parallel.train_step(*inputs)))
        norms.append(float(parallel.grad_norm))
    names = {p.global_name for group in parallel.optimizer.param_groups for p in group["params"]}  # type: ignore[attr-defined]
    assert not any(name.startswith("frozen") for name in names)
    return losses, norms, parallel.full_state_dict()


@pytest.mark.parametrize(("strategy", "world"), [("dp2", 2), ("tp2", 2), ("pp2", 2)])
def test_frozen_and_unused_parameters(ranks: Any, strategy: str, world: int) -> None:
    results = ranks.run(world, partly_trained, strategy)
    model = partly()
    expected = one_device(model, BATCHES, 2)
    for losses, norms, _ in results:
        assert losses == pytest.approx(expected["losses"], rel=1e-4)
        assert norms == pytest.approx(expected["norms"], rel=1e-4)
    same_state(results[0][2], model)


def thawed(path: str, freeze: bool) -> tuple[list[float], dict[str, Tensor]]:
    model = net()
    model.up.requires_grad_(not freeze)
    parallel = mw.parallelize(model, plan=mw.Plan.load(path), example_inputs=BATCHES[0], optimizer=sgd)
    return losses_of(parallel, BATCHES), parallel.full_state_dict()


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("strategy", ["dp2", "tp2"])
def test_what_is_frozen_may_change_after_planning(ranks: Any, tmp_path: Path, strategy: str, freeze: bool) -> None:
    planned, model = net(), net()
    planned.up.requires_grad_(freeze)
    model.up.requires_grad_(not freeze)
    made = mw.plan(planned, "local:2", example_inputs=BATCHES[0], strategy=strategy, microbatches=2, executable=True)
    made.save(tmp_path / "p.json")
    results = ranks.run(2, thawed, str(tmp_path / "p.json"), freeze)
    expected = one_device(model, BATCHES, 2)
    assert all(losses == pytest.approx(expected["losses"], rel=1e-4) for losses, _ in results)
    same_state(results[0][1], model)
