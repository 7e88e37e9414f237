"""Outputs, batch dimensions and local data of ``parallelize`` on real ranks, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import zoo
from tests.support.small_net import BATCHES, FEATURES, Net, batch, losses_of, net, one_device, same_state, sgd

pytestmark = pytest.mark.ranks


# ---- outputs
def outputs(name: str, strategy: str, sizes: tuple[int, ...]) -> list[Any]:
    model, args, kwargs = zoo.ZOO[name](8)
    parallel = mw.parallelize(
        model, example_inputs=args, example_kwargs=kwargs, strategy=strategy, microbatches=2, optimizer=sgd
    )
    parallel.train_step(*args, **kwargs)
    parallel.eval()
    found = []
    for size in sizes:
        _, args, kwargs = zoo.ZOO[name](size)
        args, kwargs = unlabelled(name, args, kwargs)
        found.append(parallel(*args, **kwargs))
    return [found, parallel.full_state_dict()]


def unlabelled(name: str, args: Any, kwargs: Any) -> Any:
    if name == "convnet":  # its forward needs labels, and gives the loss
        return args, kwargs
    if name == "gpt":
        return args[:1], {}
    if name == "t5":  # without labels the decoder needs inputs of its own; with them the loss is among the outputs
        return args, kwargs
    return args, {key: value for key, value in kwargs.items() if key != "labels"}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("gpt", "pp2,tp2"), ("gpt2", "pp2"), ("bert", "tp2"), ("t5", "pp2"), ("vit", "dp2"), ("convnet", "pp2")],
)
def test_whole_outputs_on_every_rank(ranks: Any, name: str, strategy: str) -> None:
    sizes = (8, 4, 3)
    results = ranks.run(4 if strategy == "pp2,tp2" else 2, outputs, name, strategy, sizes)
    model, _, _ = zoo.ZOO[name](8)
    model.load_state_dict(results[0][1], strict=True)  # running statistics included
    model.eval()
    for index, size in enumerate(sizes):
        _, args, kwargs = zoo.ZOO[name](size)
        args, kwargs = unlabelled(name, args, kwargs)
        if hasattr(model, "config"):
            kwargs["use_cache"] = False
        with torch.no_grad():
            expected = model(*args, **kwargs)
        for found, _ in results:
            assert type(found[index]) is type(expected)
            if isinstance(expected, Tensor):
                torch.testing.assert_close(found[index], expected, rtol=1e-4, atol=1e-5)
                continue
            assert set(found[index].keys()) == set(expected.keys())
            assert found[index].logits.shape[0] == size
            for key, value in expected.items():
                torch.testing.assert_close(getattr(found[index], key), value, rtol=1e-4, atol=1e-5)
            assert getattr(found[index], "hidden_states", None) is None


class Passing(nn.Module):
    """Outputs that no op makes, one of several of an op, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.register_buffer("scale", torch.arange(3.0))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.net(x)
        left, _ = out.split(FEATURES // 2, 1)
        return F.mse_loss(out, y), {"left": left, "x": x, "none": None, "scale": self.scale, "again": left}


def passing() -> Passing:
    torch.manual_seed(0)
    return Passing()


def passed(strategy: str) -> list[Any]:
    parallel = mw.parallelize(passing(), example_inputs=BATCHES[0], strategy=strategy, microbatches=2, optimizer=sgd)
    before = parallel.full_state_dict()
    trained = parallel(*BATCHES[1])
    parallel.eval()
    evaluated = parallel(*BATCHES[1])
    parallel.train()
    again = parallel(*BATCHES[1])
    after = parallel.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    torch.testing.assert_close(trained, again)
    return [trained, evaluated, parallel.session.step]


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "pp2"])
def test_training_and_evaluation_outputs(ranks: Any, strategy: str) -> None:
    model = passing()
    expected = model.eval()(*BATCHES[1]), model.train()(*BATCHES[1])
    for trained, evaluated, _ in ranks.run(2, passed, strategy):
        torch.testing.assert_close((evaluated, trained), expected)


# ---- batches


class Mixed(nn.Module):
    """Inputs with the batch in dim 1, without a batch, and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, FEATURES)
        self.net = Net(norm=False)

    def forward(self, x: Tensor, bias: Tensor, *, index: Tensor) -> Tensor:
        """x: [T, B, F], bias: [T, F], index: int64 [B]."""
        out = self.net(x + bias[:, None]) + self.table(index)
        return (out**2).mean((0, 2)).sum() / index.shape[0]


def mixed_case(size: int, step: int = 0) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, size, FEATURES, generator=generator)
    return (x, x[:, 0].clone()), {"index": torch.arange(size) % 10}


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def mixed_batches(strategy: str, dims: Any) -> tuple[list[float], list[float]]:
    args, kwargs = mixed_case(8)
    parallel = mw.parallelize(
        mixed(),
        example_inputs=args,
        example_kwargs=kwargs,
        batch_dims=dims,
        strategy=strategy,
        microbatches=2,
        optimizer=sgd,
    )
    norms, losses = [], []
    for step in range(2):
        args, kwargs = mixed_case(8, step)
        losses.append(float(parallel.train_step(*args, **kwargs)))
        norms.append(float(parallel.grad_norm))
    return losses, norms


@pytest.mark.parametrize("dims", [{"args.0": 1, "args.1": None}, (1, None, 0)], ids=["by name", "by position"])
@pytest.mark.parametrize("strategy", ["dp2", "pp2"])
def test_batch_dims(ranks: Any, strategy: str, dims: Any) -> None:
    model, losses, norms = mixed(), [], []
    optimizer = sgd(list(model.parameters()))
    for step in range(2):
        (x, bias), kwargs = mixed_case(8, step)
        optimizer.zero_grad()
        loss = sum(model(x[:, i : i + 4], bias, index=kwargs["index"][i : i + 4]) / 2 for i in (0, 4))
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e30)))
        optimizer.step()
    for other, other_norms in ranks.run(2, mixed_batches, strategy, dims):
        assert other == pytest.approx(losses, rel=1e-4)
        assert other_norms == pytest.approx(norms, rel=1e-4)


def other_example_batch() -> tuple[list[float], int]:
    parallel = mw.parallelize(
        net(), example_inputs=batch(0, 2), global_batch=8, strategy="dp2", microbatches=4, optimizer=sgd
    )
    return losses_of(parallel, BATCHES), parallel.plan.global_batch


def test_the_example_may_have_another_batch(ranks: Any) -> None:
    expected = one_device(net(), BATCHES, 4)["losses"]  # batch statistics: microbatch i is the i-th contiguous chunk
    for losses, size in ranks.run(2, other_example_batch):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert size == 8


# ---- data="local"


def local(strategy: str, m: int) -> tuple[int, int, list[float], dict[str, Tensor]]:
    parallel = mw.parallelize(
        net(), example_inputs=BATCHES[0], strategy=strategy, microbatches=m, optimizer=sgd, data="local"
    )
    index, count = parallel.data_index, parallel.data_count
    losses = [float(parallel.train_step(*(x.chunk(count)[index] for x in inputs))) for inputs in BATCHES]
    return index, count, losses, parallel.full_state_dict()


@pytest.mark.parametrize(("strategy", "world"), [("dp2", 2), ("pp2,dp2", 4), ("dp2,tp2", 4), ("tp2", 2)])
def test_local_data_equals_the_reassembled_batch(ranks: Any, strategy: str, world: int) -> None:
    results = ranks.run(world, local, strategy, 2)
    count = results[0][1]
    assert count == (2 if "dp2" in strategy else 1)
    assert {index for index, *_ in results} == set(range(count))

    def reassembled(x: Tensor) -> Tensor:
        return torch.cat([part.chunk(2)[i] for i in range(2) for part in x.chunk(count)])

    model = net()
    expected = one_device(model, [[reassembled(x) for x in inputs] for inputs in BATCHES], 2)
    assert all(losses == pytest.approx(expected["losses"], rel=1e-4) for _, _, losses, _ in results)
    same_state(results[0][3], model)
