"""What a user does: every way to call ``plan`` and ``parallelize``, on real ranks, against plain PyTorch."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from meshwright.compiler.lower import lower
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.ranks

FEATURES = 16


class Net(nn.Module):
    """Two layers with batch norm between them; the output is [B, FEATURES], or the loss if it is given what to hit."""

    def __init__(self, norm: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 4 * FEATURES)
        self.norm = nn.BatchNorm1d(4 * FEATURES) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.down(self.dropout(F.gelu(self.norm(self.up(x)))))
        return out if y is None else F.mse_loss(out, y)


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch(step: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(2, size, FEATURES, generator=generator)
    return x, y


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_device(
    model: nn.Module,
    batches: Sequence[Sequence[Tensor]],
    m: int = 1,
    loss_of: Callable[..., Tensor] | None = None,
    clip: float | None = None,
    factory: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> dict[str, Any]:
    """A plain loop that accumulates ``m`` contiguous chunks: losses, gradient norms, the trained model."""
    optimizer = factory([p for p in model.parameters() if p.requires_grad])
    losses, norms = [], []
    for inputs in batches:
        optimizer.zero_grad()
        total = 0.0
        for i in range(m):
            chunks = [x.chunk(m)[i] for x in inputs]
            loss = model(*chunks) if loss_of is None else loss_of(model, *chunks)
            (loss / m).backward()
            total += loss.item() / m
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e30)
        norms.append(float(norm))
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "norms": norms, "model": model}


def same_state(state: dict[str, Tensor], model: nn.Module) -> None:
    """``state`` is the model's, and loads into it."""
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")
    model.load_state_dict(state, strict=True)


def losses_of(parallel: mw.Parallel, batches: Sequence[Sequence[Tensor]]) -> list[float]:
    return [float(parallel.train_step(*inputs)) for inputs in batches]


BATCHES = [batch(0), batch(1), batch(2)]


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
    results = ranks.run(4, "test_api:on_mesh", kind)
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
    import meshwright.parallel as parallel_module

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the search was entered")

    kept, parallel_module.make_plans = parallel_module.make_plans, refuse  # type: ignore[assignment]
    try:
        plan = mw.Plan.load(path)
        parallel = mw.parallelize(net(), plan=plan, example_inputs=BATCHES[0], optimizer=sgd)
        losses = losses_of(parallel, BATCHES)
    finally:
        parallel_module.make_plans = kept
    assert parallel.plan == plan
    program = next(iter(parallel.session.programs), None)
    return None if program is None else str(program.module.code), parallel.plan.model, losses


@pytest.mark.parametrize("strategy", [{"pp": 2, "tp": 2}, "pp2,dp2", {"dp": 4}])
def test_a_saved_plan_is_the_same_program_without_search(ranks: Any, tmp_path: Path, strategy: Any) -> None:
    from meshwright.compiler.capture import capture

    path = tmp_path / "plan.json"
    meta = copy.deepcopy(net()).to("meta")
    made = mw.plan(
        meta, "local:4", example_inputs=batch(0, 3), global_batch=8, strategy=strategy, microbatches=2, executable=True
    )
    made.save(path)
    assert mw.Plan.load(path) == made
    assert mw.Plan.load(path).to_json() == made.to_json()
    assert made.explain()
    graph = capture(net(), batch(0, 5)).with_batch(4)
    codes = [str(lower(graph, made, made.stage_of(rank)).module.code) for rank in range(4)]
    results = ranks.run(4, "test_api:by_saved_plan", str(path))
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
    results = ranks.run(4, "test_api:with_targets", "pp2,tp2")
    model = net()
    optimizer = sgd(list(model.parameters()))
    losses = []
    for step, (x, y) in enumerate(BATCHES):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**step
        parts = [((model(a) - b) ** 2 * b.abs()).mean() / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        sum(parts).backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(float(sum(parts)))
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
    results = ranks.run(2, "test_api:accumulated", "pp2")
    model = net()
    optimizer, losses = sgd(list(model.parameters())), []
    for x, y in BATCHES[:2]:
        parts = [model(a, b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        (parts[0] + parts[1]).backward()
        losses.append(float(parts[0] + parts[1]))
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
    (loss, out, message), (other, *_) = ranks.run(2, "test_api:formed", form)
    whole = model.net(x)
    assert loss == other == pytest.approx(float((whole - y).abs().pow(3).mean()), rel=1e-5)
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
    results = ranks.run(2, "test_api:clipped", "gpt", strategy, m, 0.5)
    model, args, _ = zoo.gpt(8)
    expected = one_device(model, [args] * 3, m, clip=0.5)
    assert expected["norms"][0] > 0.5
    for losses, norms, _ in results:
        assert losses == pytest.approx(expected["losses"], rel=1e-4)
        assert norms == pytest.approx(expected["norms"], rel=1e-4)
    same_state(results[0][2], model)


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
    results = ranks.run(4 if strategy == "pp2,tp2" else 2, "test_api:outputs", name, strategy, sizes)
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
    for trained, evaluated, _ in ranks.run(2, "test_api:passed", strategy):
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
        losses.append(float(loss))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e30)))
        optimizer.step()
    for other, other_norms in ranks.run(2, "test_api:mixed_batches", strategy, dims):
        assert other == pytest.approx(losses, rel=1e-4)
        assert other_norms == pytest.approx(norms, rel=1e-4)


def other_example_batch() -> tuple[list[float], int]:
    parallel = mw.parallelize(
        net(), example_inputs=batch(0, 2), global_batch=8, strategy="dp2", microbatches=4, optimizer=sgd
    )
    return losses_of(parallel, BATCHES), parallel.plan.global_batch


def test_the_example_may_have_another_batch(ranks: Any) -> None:
    expected = one_device(net(), BATCHES, 4)["losses"]  # batch statistics: microbatch i is the i-th contiguous chunk
    for losses, size in ranks.run(2, "test_api:other_example_batch"):
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
    results = ranks.run(world, "test_api:local", strategy, 2)
    count = results[0][1]
    assert count == (2 if "dp2" in strategy else 1)
    assert {index for index, *_ in results} == set(range(count))

    def reassembled(x: Tensor) -> Tensor:
        return torch.cat([part.chunk(2)[i] for i in range(2) for part in x.chunk(count)])

    model = net()
    expected = one_device(model, [[reassembled(x) for x in inputs] for inputs in BATCHES], 2)
    assert all(losses == pytest.approx(expected["losses"], rel=1e-4) for _, _, losses, _ in results)
    same_state(results[0][3], model)


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
    results = ranks.run(2, "test_api:first_values", "by rank", "real", "pp2")
    expected = net(0).state_dict()
    assert all(torch.equal(results[0][0][name], value) for name, value in expected.items())
    results = ranks.run(2, "test_api:first_values", "by rank", "state", "tp2")
    assert all(torch.equal(results[0][0][name], value) for name, value in expected.items())


def test_init_does_not_depend_on_the_plan_and_runs_where_tensors_live(ranks: Any) -> None:
    states = []
    names = set(net().state_dict())
    for strategy in ("tp2", "pp2", "dp2"):
        (state, first), (_, second) = ranks.run(2, "test_api:first_values", "alike", "init", strategy)
        states.append(state)
        assert len(set(first)) == len(first)
        assert set(first) | set(second) == names
        if strategy == "pp2":  # no rank makes what it does not keep
            assert not {name for name in first if name in second and "num_batches" not in name}
    assert states[0].keys() == names
    assert all(torch.equal(states[0][name], other[name]) for other in states[1:] for name in names)
    assert float(states[0]["up.weight"].std()) > 0.5
    (state, first), (_, second) = ranks.run(2, "test_api:first_values", "alike", "part", "tp2")
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
    for alive, kept, total in ranks.run(2, "test_api:alive_in_init", strategy):
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
    (result,) = ranks.run(1, "test_api:dropped", None, 2)
    return result


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "pp2"])
def test_dropout_does_not_depend_on_the_plan(ranks: Any, dropped_alone: Any, strategy: str) -> None:
    losses, state, more = dropped_alone
    assert more[0] != pytest.approx(more[1], rel=1e-4)  # same weights, same data: other microbatches of the same step
    for other, _, other_more in (results := ranks.run(2, "test_api:dropped", strategy, 2)):
        assert other == pytest.approx(losses, rel=1e-5)
        assert other_more == pytest.approx(more, rel=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=1e-4, atol=1e-6)
    again = ranks.run(2, "test_api:dropped", strategy, 2)
    assert [losses for losses, *_ in again] == [losses for losses, *_ in results]


def repeated_dropout() -> list[float]:
    x = torch.ones(8, FEATURES)
    parallel = mw.parallelize(
        net(norm=False, dropout=0.5), example_inputs=(x, x), strategy="dp2", microbatches=1, optimizer=still
    )
    return [float(parallel.train_step(x, x)) for _ in range(4)]


def still(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def test_dropout_differs_between_steps(ranks: Any) -> None:
    losses, other = ranks.run(2, "test_api:repeated_dropout")
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


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.parametrize(("first", "second"), [("tp2", "pp2"), ("pp2", "dp2")])
def test_state_dicts_and_checkpoints_across_plans(ranks: Any, tmp_path: Path, first: str, second: str) -> None:
    results = ranks.run(2, "test_api:states", str(tmp_path / "checkpoint"), first, second)
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
    results = ranks.run(world, "test_api:partly_trained", strategy)
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
    results = ranks.run(2, "test_api:thawed", str(tmp_path / "p.json"), freeze)
    expected = one_device(model, BATCHES, 2)
    assert all(losses == pytest.approx(expected["losses"], rel=1e-4) for losses, _ in results)
    same_state(results[0][1], model)


# ---- odd worlds


def three(kind: str) -> tuple[list[float], dict[str, Tensor], list[int]]:
    model, args = (net(), BATCHES[0]) if kind == "net" else zoo.gpt(6)[:2]
    batches = [batch(i, 6) for i in range(3)] if kind == "net" else [args] * 3
    parallel = mw.parallelize(model, example_inputs=batches[0], optimizer=sgd, microbatches=2)
    return (
        losses_of(parallel, batches),
        parallel.full_state_dict(),
        [len(stage.devices) for stage in parallel.plan.stages],
    )


@pytest.mark.parametrize("kind", ["net", "gpt"])
def test_three_ranks(ranks: Any, kind: str) -> None:
    model = net() if kind == "net" else zoo.gpt(6)[0]
    batches = [batch(i, 6) for i in range(3)] if kind == "net" else [zoo.gpt(6)[1]] * 3
    expected = one_device(model, batches, 2)
    results = ranks.run(3, "test_api:three", kind)
    assert all(losses == pytest.approx(expected["losses"], rel=1e-4) for losses, *_ in results)
    same_state(results[0][1], model)


# ---- plans that a person edited


def spliced(folder: Path, model: nn.Module, inputs: Any, first: str, second: str, devices: tuple[int, int]) -> mw.Plan:
    """Stage 0 as in a pp2 plan of shape ``first``, stage 1 as in one of shape ``second``, by editing the document."""
    sizes = [max(1, int(shape[2:])) for shape in (first, second)]
    assert sizes == list(devices)
    asked = {"example_inputs": inputs, "microbatches": 2, "executable": True, "schedule": "1f1b"}
    one = mw.plan(model, "p3.16xlarge", strategy=f"pp2,{first}", **asked)
    (cut,) = (stage.chunks[0].layers[0] for stage in one.stages[1:])
    same_cut = f"stage boundary at {one.layers[cut]}"
    other = mw.plan(model, "p3.16xlarge", strategy=f"pp2,{second}", constraints=same_cut, **asked)
    documents = one.to_json(), other.to_json()
    assert documents[0]["stages"][0]["chunks"][0]["layers"] == documents[1]["stages"][0]["chunks"][0]["layers"]
    made = documents[0]
    made["stages"][1] = documents[1]["stages"][1]
    made["stages"][1]["devices"] = list(range(sizes[0], sum(sizes)))
    made["prediction"]["stages"] = (made["prediction"]["stages"][0], documents[1]["prediction"]["stages"][1])
    made["cluster"]["hosts"][0]["num_devices"] = sum(sizes)
    path = folder / "edited.json"
    path.write_text(json.dumps(made))
    return mw.Plan.load(path)


def by_edited_plan(path: str, kind: str, data: str) -> tuple[list[float], dict[str, Tensor]]:
    model, batches = case(kind)
    parallel = mw.parallelize(model, plan=mw.Plan.load(path), example_inputs=batches[0], optimizer=sgd, data=data)
    return losses_of(parallel, batches), parallel.full_state_dict()


def case(kind: str) -> tuple[nn.Module, list[Any]]:
    return (net(), BATCHES) if kind == "net" else (zoo.gpt(8)[0], [zoo.gpt(8)[1]] * 3)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("net", "tp2", "dp1"), ("net", "dp1", "dp2"), ("gpt", "dp1", "dp2"), ("gpt", "dp2", "dp1")],
)
def test_stages_of_unequal_devices_by_hand(ranks: Any, tmp_path: Path, kind: str, first: str, second: str) -> None:
    model, batches = case(kind)
    sizes = int(first[2:]), int(second[2:])
    plan = spliced(tmp_path, model, batches[0], first, second, sizes)
    assert plan.check() == []
    results = ranks.run(sum(sizes), "test_api:by_edited_plan", str(tmp_path / "edited.json"), kind, "global")
    expected = one_device(model, batches, 2)
    assert all(losses == pytest.approx(expected["losses"], rel=1e-4) for losses, _ in results)
    same_state(results[0][1], model)


def refused_local(path: str) -> str:
    with pytest.raises(ValueError, match="one split of the batch") as caught:
        by_edited_plan(path, "net", "local")
    return str(caught.value)


def test_local_data_needs_one_split_on_all_stages(ranks: Any, tmp_path: Path) -> None:
    spliced(tmp_path, net(), BATCHES[0], "dp2", "tp2", (2, 2))
    texts = ranks.run(4, "test_api:refused_local", str(tmp_path / "edited.json"))
    assert len(set(texts)) == 1
    assert "2 parts" in texts[0]
    assert "data='global'" in texts[0]


def moved_to_the_end(path: str) -> tuple[list[float], dict[str, Tensor], list[str], Any]:
    """Rank 0 idles, the model's only stage is on rank 1."""
    parallel = mw.parallelize(
        net(), plan=mw.Plan.load(path), example_inputs=BATCHES[0], optimizer=sgd, clip_grad_norm=1e9
    )
    losses = losses_of(parallel, BATCHES)
    torch.optim.lr_scheduler.StepLR(parallel.optimizer, 1).step()
    norm = float(parallel.grad_norm)
    parallel.eval()
    return losses, parallel.full_state_dict(), list(parallel.state_dict()), (norm, parallel(BATCHES[0][0]))


def test_ranks_without_a_stage(ranks: Any, tmp_path: Path) -> None:
    made = mw.plan(net(), "local:2", example_inputs=BATCHES[0], strategy="pp1", microbatches=2, executable=True)
    document = made.to_json()
    document["stages"][0]["devices"] = [1]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    (losses, state, nothing, (norm, out)), (other, empty, names, (other_norm, other_out)) = ranks.run(
        2, "test_api:moved_to_the_end", str(path)
    )
    model = net()
    expected = one_device(model, BATCHES, 2)
    assert losses == other == pytest.approx(expected["losses"], rel=1e-4)
    assert norm == other_norm == pytest.approx(expected["norms"][-1], rel=1e-4)
    assert nothing == []
    assert empty == {}
    assert set(names) == set(state)
    same_state(state, model)
    torch.testing.assert_close(out, model.eval()(BATCHES[0][0]), rtol=1e-4, atol=1e-5)
    assert torch.equal(out, other_out)


class Bare(nn.Module):
    """Parameters in its first layer only: a later stage has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.first(x)[:, :, None] * y[:, None, :]
        for _ in range(4):
            out = torch.tanh(out @ out.mT @ out / 64)
        return out.square().mean()


def bare() -> Bare:
    torch.manual_seed(0)
    return Bare()


def without_parameters(strategy: str) -> tuple[list[float], list[float], int, dict[str, Tensor]]:
    parallel = mw.parallelize(bare(), example_inputs=BATCHES[0], strategy=strategy, microbatches=2, optimizer=adamw)
    losses, norms = [], []
    for inputs in BATCHES:
        losses.append(float(parallel.train_step(*inputs)))
        norms.append(float(parallel.grad_norm))
    return losses, norms, len(parallel.state_dict()), parallel.full_state_dict()


def test_a_stage_without_parameters(ranks: Any) -> None:
    results = ranks.run(2, "test_api:without_parameters", "pp2")
    model = bare()
    expected = one_device(model, BATCHES, 2, factory=adamw)
    for losses, norms, *_ in results:
        assert losses == pytest.approx(expected["losses"], rel=1e-4)
        assert norms == pytest.approx(expected["norms"], rel=1e-4)
    assert [count for _, _, count, _ in results] == [2, 0]
    same_state(results[0][3], model)


def pipeline_of_three() -> tuple[list[float], dict[str, Tensor], list[list[int]]]:
    model, args, _ = zoo.gpt(6)
    parallel = mw.parallelize(
        model, example_inputs=args, strategy="pp3", microbatches=3, optimizer=sgd, schedule="gpipe"
    )
    losses = losses_of(parallel, [args] * 3)
    return losses, parallel.full_state_dict(), [list(stage.devices) for stage in parallel.plan.stages]


def test_three_stages(ranks: Any) -> None:
    results = ranks.run(3, "test_api:pipeline_of_three")
    model, args, _ = zoo.gpt(6)
    expected = one_device(model, [args] * 3, 3)
    assert all(losses == pytest.approx(expected["losses"], rel=1e-4) for losses, *_ in results)
    assert results[0][2] == [[0], [1], [2]]
    same_state(results[0][1], model)
