"""The runtime on real ranks: hand-lowered programs of a small model against the same model in eager PyTorch on one
device."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.compiler.graph import TensorType
from meshwright.compiler.plan import Chunk, Plan, Prediction, Residency, Stage, Transfer
from meshwright.compiler.program import ChunkProgram, Exit, Slot
from meshwright.compiler.reshard import reshard
from meshwright.compiler.schedule import generate
from meshwright.compiler.spec import P, Pair, R, S
from meshwright.runtime.checkpoint import load_checkpoint, save_checkpoint
from meshwright.runtime.crossmesh import Layout, tiles
from meshwright.runtime.facts import settled
from meshwright.runtime.groups import bind, coordinates
from meshwright.runtime.launch import spawn_local
from meshwright.runtime.stage import NonFiniteLoss, Session
from meshwright.runtime.state import BufferInfo, ModelInfo, ParameterInfo
from torch import nn

# ---- the model: a skip edge (h0), a tied weight (w0), an int edge (mask), a buffer that counts

BATCH = 8
SHAPES = {"w0": (16, 8), "b0": (16,), "w1": (8, 16), "b1": (8,), "w2": (16, 8)}


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator) / 3))
        self.tied = self.w0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.tensor(0.5), persistent=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).long()
        h0 = F.relu(F.linear(x, self.w0, self.b0))
        h1 = torch.tanh(F.linear(h0, self.w1) + self.b1)
        self.seen += 1
        y = F.linear(h1, self.w2) + h0
        out = (y @ self.tied) * (self.shift + mask)
        return (out - target).square().mean()


INFO = ModelInfo(
    {
        **{
            name: ParameterInfo(TensorType(shape, torch.float32), ("tied",) if name == "w0" else (), True)
            for name, shape in SHAPES.items()
        },
        "unused": ParameterInfo(TensorType((3,), torch.float32)),
    },
    {
        "seen": BufferInfo(TensorType((), torch.int64), (), True, "seen"),
        "shift": BufferInfo(TensorType((), torch.float32), (), False, "shift"),
    },
)

# tensor → mesh axis mode → (value, cotangent)
DATA, WHOLE = (S(0), S(0)), (R, R)
PAIRS = {
    "x": {"data": DATA, "tensor": WHOLE},
    "target": {"data": DATA, "tensor": WHOLE},
    "mask": {"data": DATA, "tensor": WHOLE},
    "h0": {"data": DATA, "tensor": (S(1), S(1))},
    "h1": {"data": DATA, "tensor": WHOLE},
    "w0": {"data": (R, P), "tensor": (S(0), S(0))},
    "b0": {"data": (R, P), "tensor": (S(0), S(0))},
    "w1": {"data": (R, P), "tensor": (S(1), S(1))},
    "b1": {"data": (R, P), "tensor": WHOLE},
    "w2": {"data": (R, P), "tensor": (S(0), S(0))},
    "addend": {"data": DATA, "tensor": (P, R)},  # a row-parallel product
    "enter": {"data": DATA, "tensor": (R, P)},  # the input of a column-parallel one
    "part": {"data": (P, R), "tensor": WHOLE},  # of the loss
}
LAYER_USES = {
    0: ["x", "w0", "b0"],
    1: ["h0", "w1", "b1", "seen"],
    2: ["h1", "h0", "w2"],
    3: ["y", "w0", "mask", "shift", "target"],
}
LAYER_MAKES = {0: ["h0", "mask"], 1: ["h1"], 2: ["y"], 3: []}


def pair_of(name: str, modes: tuple[str, ...]) -> Pair:
    name = {"y": "h0"}.get(name, name)
    axes = [PAIRS.get(name, {}).get(mode, WHOLE) for mode in modes]
    return Pair(tuple(a for a, _ in axes), tuple(b for _, b in axes))


def type_of(name: str, batch: int) -> TensorType:
    if name in SHAPES:
        return TensorType(SHAPES[name], torch.float32)
    if name in ("seen", "shift", "loss"):
        return TensorType((), torch.int64 if name == "seen" else torch.float32)
    width = 16 if name in ("h0", "y") else 8
    return TensorType((batch, width), torch.int64 if name == "mask" else torch.float32)


class Builder:
    """A chunk program written node by node."""

    def __init__(self, modes: tuple[str, ...], mesh_shape: tuple[int, ...], batch: int) -> None:
        self.modes, self.mesh_shape, self.batch = modes, mesh_shape, batch
        self.graph, self.slots, self.exits, self.env = torch.fx.Graph(), [], [], {}
        self.results: list[Any] = []

    def slot(self, kind: str, name: str) -> None:
        self.env[name] = self.graph.placeholder(name)
        batch_dim = 0 if kind == "input" else None
        label = f"args.{name}" if kind == "input" else name
        kind_type = type_of(name, self.batch)
        self.slots.append(
            Slot(kind, label, name, pair_of(name, self.modes), kind_type, batch_dim, requires_grad=kind == "parameter")
        )

    def call(self, out: str, fn: Callable[..., Any], *names: str) -> None:
        def call(*args: torch.Tensor) -> torch.Tensor:
            return fn(*args)

        self.env[out] = self.graph.call_function(call, tuple(self.env[n] for n in names))

    def move(self, out: str, name: str, source: str, target: str) -> None:
        a, b = pair_of(source, self.modes), pair_of(target, self.modes)
        self.call(out, lambda x: reshard(x, a, b), name)

    def exit(self, kind: str, name: str, node: str, pair: Pair) -> None:
        self.exits.append(Exit(kind, name, node, pair, type_of(name, self.batch)))
        self.results.append(self.env[node])

    def layer(self, index: int, output: bool) -> None:
        if index == 0:
            self.call("mask", lambda x: (x > 0).long(), "x")
            self.move("x_in", "x", "x", "enter")
            self.call("h0", lambda x, w, b: F.relu(F.linear(x, w, b)), "x_in", "w0", "b0")
        elif index == 1:
            self.call("h1_part", F.linear, "h0", "w1")
            self.move("h1_sum", "h1_part", "addend", "h1")
            self.call("h1", lambda h, b: torch.tanh(h + b), "h1_sum", "b1")
            self.call("seen_next", lambda n: n + 1, "seen")
        elif index == 2:
            self.move("h1_in", "h1", "h1", "enter")
            self.call("y", lambda h, w, h0: F.linear(h, w) + h0, "h1_in", "w2", "h0")
        else:
            total = self.batch * 8
            self.call("out_part", torch.matmul, "y", "w0")
            self.move("out_sum", "out_part", "addend", "h1")
            self.call("out", lambda o, s, m: o * (s + m), "out_sum", "shift", "mask")
            if not output:
                self.call("loss_part", lambda o, t: (o - t).square().sum() / total, "out", "target")
                self.move("loss", "loss_part", "part", "loss")

    def finish(self) -> ChunkProgram:
        self.graph.output(tuple(self.results))
        module = torch.fx.GraphModule(nn.Module(), self.graph)
        return ChunkProgram(module, tuple(self.slots), tuple(self.exits), self.mesh_shape, {}, {})


KINDS = {**dict.fromkeys(SHAPES, "parameter"), "seen": "buffer", "shift": "buffer", "x": "input", "target": "input"}

Part = tuple[
    tuple[int, ...], tuple[int, ...], tuple[str, ...], tuple[int, ...]
]  # devices, mesh shape, mode per axis, layers


def build(
    parts: list[Part], microbatches: int, schedule: str, world: int, batch: int = BATCH, output: bool = False
) -> tuple[Plan, list[ChunkProgram]]:
    """A plan and the programs of its stages."""
    micro = batch // microbatches
    maker = {name: index for index, part in enumerate(parts) for layer in part[3] for name in LAYER_MAKES[layer]}
    programs, stages, transfers = [], [], []
    needs = []
    for _, _, _, layers in parts:
        needs.append(list(dict.fromkeys(name for layer in layers for name in LAYER_USES[layer])))
    for index, (devices, mesh_shape, modes, layers) in enumerate(parts):
        builder = Builder(modes, mesh_shape, micro)
        made_here = {name for layer in layers for name in LAYER_MAKES[layer]}
        received = [name for name in needs[index] if name not in KINDS and name not in made_here]
        for name in received:
            builder.slot("receive", name)
            transfers.append(Transfer(name, maker[name], index))
        used = [name for name in needs[index] if name in KINDS and not (output and name in ("target", "seen"))]
        for name in used:
            builder.slot(KINDS[name], name)
        if output and 1 in layers:
            builder.slot("buffer", "seen")
        for layer in layers:
            builder.layer(layer, output)
        sent = [n for n in made_here if any(n in needs[later] for later in range(index + 1, len(parts)))]
        for name in sorted(sent):
            builder.exit("send", name, name, pair_of(name, modes))
        if 1 in layers and not output:
            builder.exit("buffer", "seen", "seen_next", pair_of("seen", modes))
        if 3 in layers:
            kind = (
                ("output", "out", "out", pair_of("h1", modes))
                if output
                else ("loss", "loss", "loss", pair_of("loss", modes))
            )
            builder.exit(*kind)
        programs.append(builder.finish())
        parameters = {}
        for name in used:
            if KINDS[name] == "parameter":
                pair = pair_of(name, modes)
                parameters[name] = Residency(pair, pair.value, pair.value, pair.value)
        chunk = Chunk(
            (layers[0], layers[-1] + 1),
            {},
            parameters,
            {name: pair_of(name, modes) for name in used if KINDS[name] != "parameter"},
            {name: pair_of(name, modes) for name in received},
            {name: pair_of(name, modes).value for name in sent},
        )
        stages.append(Stage(devices, mesh_shape, (chunk,)))
    plan = Plan(
        "toy", {}, {"hosts": [{"num_devices": world}]}, batch, microbatches, schedule, "sgd", ("a", "b", "c", "d"),
        tuple(stages), tuple(transfers), Prediction(0.0, 0.0, (), 0.0, 0.0),
    )  # fmt: skip
    assert plan.check() == []
    return plan, programs


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "lbfgs": torch.optim.LBFGS,
    "adafactor": torch.optim.Adafactor,
}


def batch_of(step: int, batch: int = BATCH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        "args.x": torch.randn(batch, 8, generator=generator),
        "args.target": torch.randn(batch, 8, generator=generator),
    }


def session_of(
    parts: list[Part], microbatches: int = 2, schedule: str = "1f1b", optimizer: str = "sgd", **more: Any
) -> Session:
    plan, programs = build(parts, microbatches, schedule, dist.get_world_size())
    stage = plan.stage_of(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    model = more.pop("weights", None)
    if model is None:
        model = Toy()
        if dist.get_rank():  # only rank 0's weights count
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
    mine = [] if stage is None else [programs[stage]]
    return Session(plan, mine, INFO, model, optimizer=OPTIMIZERS[optimizer], **more)


def train(
    parts: list[Part], microbatches: int, schedule: str, optimizer: str, steps: int, **more: Any
) -> dict[str, Any]:
    session = session_of(parts, microbatches, schedule, optimizer, **more)
    losses, norms = [], []
    for step in range(steps):
        losses.append(float(session.forward_backward(batch_of(step))))
        norms.append(float(session.grad_norm))
        session.optimizer_step()
    copies = {name: leaf.detach().clone() for name, leaf in session.state.parameters.items()}
    return {
        "losses": losses, "norms": norms, "full": session.full_state_dict(), "copies": copies,
        "counts": dict(session.counts),
    }  # fmt: skip


def reference(optimizer: str, steps: int, microbatches: int, clip: float | None = None) -> dict[str, Any]:
    model = Toy()
    optim = OPTIMIZERS[optimizer](model.parameters())
    losses, norms = [], []
    for step in range(steps):
        optim.zero_grad()
        total = 0.0
        data = batch_of(step)
        for x, t in zip(data["args.x"].chunk(microbatches), data["args.target"].chunk(microbatches), strict=True):
            loss = model(x, t) / microbatches
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optim.step()
        losses.append(total)
    return {"losses": losses, "norms": norms, "full": model.state_dict()}


ALL = (0, 1, 2, 3)
CASES: dict[str, tuple[int, list[Part], int, str]] = {
    "one": (1, [((0,), (1,), ("data",), ALL)], 2, "1f1b"),
    "dp2": (2, [((0, 1), (2,), ("data",), ALL)], 1, "1f1b"),
    "dp2-micro": (2, [((0, 1), (2,), ("data",), ALL)], 2, "gpipe"),
    "tp2": (2, [((0, 1), (2,), ("tensor",), ALL)], 2, "1f1b"),
    "dp2tp2": (4, [((0, 1, 2, 3), (2, 2), ("data", "tensor"), ALL)], 2, "1f1b"),
    "dp2dp2": (4, [((0, 1, 2, 3), (2, 2), ("data", "data"), ALL)], 2, "1f1b"),
    "pp2": (2, [((0,), (1,), ("data",), (0, 1)), ((1,), (1,), ("data",), (2, 3))], 4, "1f1b"),
    "pp2-gpipe": (2, [((0,), (1,), ("data",), (0, 1)), ((1,), (1,), ("data",), (2, 3))], 4, "gpipe"),
    "pp3-idle": (4, [((0,), (), (), (0,)), ((2,), (), (), (1,)), ((3,), (), (), (2, 3))], 4, "1f1b"),
    "pp3-gpipe": (3, [((0,), (), (), (0,)), ((1,), (), (), (1, 2)), ((2,), (), (), (3,))], 2, "gpipe"),
    "uneven": (3, [((0,), (1,), ("data",), (0, 1)), ((1, 2), (2,), ("tensor",), (2, 3))], 2, "1f1b"),
    "mixed": (4, [((0, 1), (2,), ("data",), (0, 1)), ((2, 3), (2,), ("tensor",), (2, 3))], 2, "1f1b"),
    "mixed-back": (4, [((2, 3), (2,), ("tensor",), (0,)), ((0, 1), (2,), ("data",), (1, 2, 3))], 4, "gpipe"),
}


def check(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    model = Toy()
    model.load_state_dict(results[0]["full"], strict=True)
    for name, value in expected["full"].items():
        torch.testing.assert_close(
            results[0]["full"][name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert all(result["full"] == {} for result in results[1:])


@pytest.mark.ranks
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", CASES)
def test_five_steps_equal_one_device(ranks: Any, case: str, optimizer: str) -> None:
    world, parts, microbatches, schedule = CASES[case]
    results = ranks.run(world, "test_runtime:train", parts, microbatches, schedule, optimizer, 5)
    check(results, reference(optimizer, 5, microbatches))
    copies = [
        result["copies"]["w0"] for result in results if result["copies"].get("w0", torch.empty(0)).shape == (16, 8)
    ]
    assert all(torch.equal(copies[0], copy) for copy in copies)


@pytest.mark.ranks
def test_clipping_counts_each_element_once(ranks: Any) -> None:
    world, parts, microbatches, schedule = CASES["mixed"]
    results = ranks.run(world, "test_runtime:train_clipped", parts, microbatches, schedule)
    check(results, reference("sgd", 3, microbatches, clip=0.1))


def train_clipped(parts: list[Part], microbatches: int, schedule: str) -> dict[str, Any]:
    return train(parts, microbatches, schedule, "sgd", 3, clip_grad_norm=0.1)


@pytest.mark.ranks
def test_collectives_are_those_of_the_program(ranks: Any) -> None:
    world, parts, microbatches, schedule = CASES["tp2"]
    counts = ranks.run(world, "test_runtime:train", parts, microbatches, schedule, "sgd", 1)[0]["counts"]
    # per microbatch: h1 and out summed forward; the gradient of h1 summed where it enters the column-parallel product,
    # and that of x
    # not, because nothing asks for it
    assert counts == {("forward", "all_reduce"): 2 * microbatches, ("backward", "all_reduce"): microbatches}
    world, parts, microbatches, schedule = CASES["dp2-micro"]
    counts = ranks.run(world, "test_runtime:train", parts, microbatches, schedule, "sgd", 1)[0]["counts"]
    assert counts == {("forward", "all_reduce"): microbatches, ("step", "all_reduce"): 1}


def train_bucketed(parts: list[Part], bucket_bytes: int) -> dict[str, Any]:
    return train(parts, 2, "1f1b", "adamw", 3, bucket_bytes=bucket_bytes)


@pytest.mark.ranks
@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 5), (600, 3)])
def test_gradients_travel_in_buckets(ranks: Any, bucket_bytes: int, buckets: int) -> None:
    # 512 bytes each but for the biases: 64 (b0) and 32 (b1); filled from the last used parameter backwards
    world, parts, _, _ = CASES["dp2"]
    results = ranks.run(world, "test_runtime:train_bucketed", parts, bucket_bytes)
    check(results, reference("adamw", 3, 2))
    assert results[0]["counts"]["step", "all_reduce"] == 3 * buckets


def refuse(parts: list[Part]) -> str:
    plan, programs = build(parts, 2, "1f1b", dist.get_world_size())
    chunk = plan.stages[0].chunks[0]
    sharded = {name: replace(home, optimizer=(S(0),)) for name, home in chunk.parameters.items()}
    stage = replace(plan.stages[0], chunks=(replace(chunk, parameters=sharded),))
    with pytest.raises(ValueError, match="parameters in custom") as caught:
        Session(replace(plan, stages=(stage,)), programs, INFO, Toy())
    with pytest.raises(ValueError, match="not divisible by microbatches"):
        Session(replace(plan, global_batch=7), programs, INFO, Toy())
    return str(caught.value)


@pytest.mark.ranks
def test_plans_that_the_runtime_cannot_follow_are_refused(ranks: Any) -> None:
    world, parts, _, _ = CASES["dp2"]
    assert all("w0" in message or "b0" in message for message in ranks.run(world, "test_runtime:refuse", parts))


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
    result = ranks.run(world, "test_runtime:accumulate", parts)[0]
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
    for message, rank, step in ranks.run(world, "test_runtime:not_finite", parts):
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
    results = ranks.run(world, "test_runtime:bad_inputs", parts)
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
    results = ranks.run(world, "test_runtime:local_data", parts, True)
    assert [result[:2] for result in results] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    expected = reference("sgd", 1, 1)["losses"][0]
    assert [result[2] for result in results] == pytest.approx([expected] * 4, rel=1e-5)
    with pytest.raises(
        AssertionError,
        match="ranks that share a data_index must pass equal data, but got different data on ranks 2 and 3",
    ):
        ranks.run(world, "test_runtime:local_data", parts, False)
    world, parts, _, _ = CASES["mixed"]
    with pytest.raises(
        AssertionError, match=r"data='local' needs one split of the batch on all stages, but got 1 parts"
    ):
        ranks.run(world, "test_runtime:local_data", parts, True)


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
    results = ranks.run(world, "test_runtime:evaluate", parts, layers)
    model, x = Toy(), batch_of(0, 4)["args.x"]
    with torch.no_grad():
        h0 = F.relu(F.linear(x, model.w0, model.b0))
        h1 = torch.tanh(F.linear(h0, model.w1, model.b1))
        expected = ((F.linear(h1, model.w2) + h0) @ model.w0) * (0.5 + (x > 0))
    for first, second in results:
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(first, second)
        assert torch.equal(second, results[0][1])


def state_round_trip(parts: list[Part], folder: str) -> bool:

    session = session_of(parts, optimizer="adamw")
    for step in range(2):
        session.forward_backward(batch_of(step))
        session.optimizer_step()
    timings = session.timings
    labels = sorted(label for label, _ in timings["actions"])
    assert labels == (["B0", "B1", "F0", "F1"] if session.stage is not None else [])
    assert 0 < timings["optimizer_s"] < 10
    assert sum(seconds for _, seconds in timings["actions"]) <= timings["forward_backward_s"]
    assert timings["peak_bytes"] > 2**20
    local = session.state_dict()
    if session.stage is not None and 0 in parts[session.stage][3]:
        assert local["w0"] is local["tied"]
        assert tuple(local["w0"].shape) == (16, 8)
    assert "shift" not in local
    save_checkpoint(session, folder)
    fresh = session_of(parts, optimizer="adamw")
    fresh.load_state_dict(session.state_dict())
    for name, leaf in fresh.state.parameters.items():
        assert torch.equal(leaf, session.state.parameters[name])
    return session.stage is None or "seen" not in session.state.buffers or int(session.state.buffers["seen"]) == 4


def resume(parts: list[Part], folder: str) -> tuple[list[float], int]:
    session = session_of(parts, optimizer="adamw")
    load_checkpoint(session, folder)
    losses = []
    for step in range(2, 5):
        losses.append(float(session.forward_backward(batch_of(step))))
        session.optimizer_step()
    return losses, session.step


@pytest.mark.ranks
def test_checkpoints_cross_plans(ranks: Any, tmp_path: Any) -> None:
    world, parts, _, _ = CASES["mixed"]
    assert all(ranks.run(world, "test_runtime:state_round_trip", parts, str(tmp_path)))
    expected = reference("adamw", 5, 2)["losses"][2:]
    for case in ("mixed", "one", "dp2tp2", "pp3-idle"):
        world, parts, _, _ = CASES[case]
        for losses, step in ranks.run(world, "test_runtime:resume", parts, str(tmp_path)):
            assert losses == pytest.approx(expected, rel=1e-4)
            assert step == 5


def initial(parts: list[Part], kind: str) -> dict[str, torch.Tensor]:
    def fill(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.is_floating_point():
            tensor.normal_()
            return None
        return torch.zeros_like(tensor)

    init: Any = fill if kind == "function" else Toy().state_dict() | {"shift": torch.tensor(0.5)}
    return session_of(parts, weights=Toy().to("meta"), init=init, seed=3).full_state_dict()


@pytest.mark.ranks
def test_meta_models_take_init(ranks: Any) -> None:
    found = []
    for case in ("one", "mixed"):
        world, parts, _, _ = CASES[case]
        found.append(ranks.run(world, "test_runtime:initial", parts, "function")[0])
    assert found[0].keys() == Toy().state_dict().keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert found[0]["w0"].std() > 0.5
    by_name = ranks.run(world, "test_runtime:initial", parts, "mapping")[0]
    assert all(torch.equal(value, by_name[name]) for name, value in Toy().state_dict().items())


# ---- the parts


def collectives(shape: tuple[int, ...]) -> bool:
    world = dist.get_world_size()
    comm = bind(shape, range(world))
    assert comm is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64):
        for axis, size in enumerate(shape):
            place = list(comm.coordinates)
            peers = []  # what the devices along this axis hold
            for index in range(size):
                place[axis] = index
                flat = sum(c * int(torch.tensor(shape[i + 1 :]).prod()) for i, c in enumerate(place))
                peers.append((torch.arange(8 * 12, dtype=torch.float32).view(8, 12) % 7 + flat).to(dtype))
            mine, me = peers[comm.index(axis)], comm.index(axis)
            before = mine.clone()
            total = torch.stack(peers).sum(0, dtype=dtype)
            assert torch.equal(comm.all_reduce(mine, axis), total)
            assert torch.equal(comm.all_reduce(mine, axis, "max"), torch.stack(peers).amax(0))
            assert torch.equal(comm.all_reduce(mine.t(), axis), total.t())
            for dim in (0, 1):
                gathered = comm.all_gather(mine, axis, dim)
                assert gathered.is_contiguous()
                assert torch.equal(gathered, torch.cat(peers, dim))
                assert torch.equal(comm.reduce_scatter(mine, axis, dim), total.chunk(size, dim)[me])
                expected = torch.cat([peer.chunk(size, dim)[me] for peer in peers], 1 - dim)
                assert torch.equal(comm.all_to_all(mine, axis, dim, 1 - dim), expected)
            assert torch.equal(mine, before)
    assert comm.start_sum(torch.tensor(dist.get_rank()), range(len(shape))).wait() == sum(range(world))
    flags = torch.arange(4) == comm.index(0)
    assert int(comm.all_gather(flags, 0, 0).sum()) == shape[0]
    assert int(comm.all_reduce(flags, 0, "max").sum()) == shape[0]
    return True


@pytest.mark.ranks
@pytest.mark.parametrize("shape", [(2,), (2, 2), (1, 4)])
def test_collectives(ranks: Any, shape: tuple[int, ...]) -> None:
    assert all(ranks.run(torch.Size(shape).numel(), "test_runtime:collectives", shape))


MESHES = [(), (1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 2)]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_tiles_deliver_every_element_once(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice([12, 24]) for _ in range(rng.randint(1, 3)))
    layouts = []
    for first in (0, rng.choice([2, 10])):  # the device sets may overlap, as in a gather to rank 0
        mesh = rng.choice(MESHES)
        spec = tuple(rng.choice([R, *[S(d) for d in range(len(shape))]]) for _ in mesh)
        devices = list(range(first, first + torch.Size(mesh).numel()))
        rng.shuffle(devices)
        layouts.append(Layout(tuple(devices), mesh, spec))
    source, target = layouts
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    def block(layout: Layout, device: int) -> torch.Tensor:
        out = whole
        place = coordinates(layout.devices.index(device), layout.mesh_shape)
        for placement, size, index in zip(layout.spec, layout.mesh_shape, place, strict=True):
            if placement.is_shard:
                out = out.chunk(size, placement.dim)[index]
        return out

    arrived = {device: torch.full(target.local_shape(shape), -1) for device in target.devices}
    times = {device: torch.zeros(target.local_shape(shape)) for device in target.devices}
    sent = dict.fromkeys(source.devices, 0)
    messages = tiles(shape, source, target)
    assert len({(tile.source, tile.target) for tile in messages}) == len(messages)  # one message per pair of ranks
    for tile in messages:
        take = tuple(slice(*box) for box in tile.source_box)
        put = tuple(slice(*box) for box in tile.target_box)
        arrived[tile.target][put] = block(source, tile.source)[take]
        times[tile.target][put] += 1
        if tile.source != tile.target:
            sent[tile.source] += torch.Size(tile.shape).numel()
        assert (
            tile.source == tile.target
            or tile.target not in source.devices
            or not torch.equal(block(source, tile.source), block(source, tile.target))
        ), "a device that holds the block takes its own"
    for device in target.devices:
        assert torch.equal(arrived[device], block(target, device))
        assert bool((times[device] == 1).all())
    if not set(source.devices) & set(target.devices):  # balanced: replicas of a block differ by one message at most
        largest = max(torch.Size(tile.shape).numel() for tile in messages)
        for device in source.devices:
            twins = [other for other in source.devices if source.box(shape, other) == source.box(shape, device)]
            assert max(sent[t] for t in twins) - min(sent[t] for t in twins) <= largest


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_sends_are_settled_only_by_later_messages(name: str) -> None:
    schedule = generate(name, 4, 16)
    edges = [((a, 0), (b, 0)) for a, b in ((0, 1), (1, 2), (2, 3), (0, 3))]
    for stage in range(4):
        seen: set[int] = set()
        held = most_held = 0
        for index, done in enumerate(settled(schedule.actions, stage, edges, edges[:3])):
            assert all(earlier < index for earlier in done)
            assert not seen & set(done)
            seen |= set(done)
            sends = stage < 3 if schedule.actions[stage][index].kind == "F" else stage > 0
            held += sends - len(done)
            most_held = max(most_held, held)
        # stage 3 never answers stage 0 (nothing goes back along their edge); it is heard of through the others
        assert most_held <= (8 if name == "1f1b" else 17), (stage, most_held)


def test_spawn_local_returns_results_and_the_first_failure() -> None:
    assert spawn_local("ranks:pool_check", 2, ("rank",), timeout_s=60) == [0, 1]
    with pytest.raises(RuntimeError, match="rank 1 failed: ValueError: rank one says no"):
        spawn_local("ranks:pool_check", 2, ("raise",), timeout_s=60)
    with pytest.raises(ValueError, match="cannot be found"):
        spawn_local("ranks:absent", 2)


@pytest.mark.ranks
def test_pool_shows_failures_and_hangs_and_recovers(ranks: Any) -> None:
    with pytest.raises(AssertionError, match="rank one says no"):
        ranks.run(2, "ranks:pool_check", "raise")
    with pytest.raises(AssertionError, match="did not finish") as caught:
        ranks.run(2, "ranks:pool_check", "hang", timeout_s=8)
    assert "pool_check" in str(caught.value)  # the stack of the rank that hangs
    assert ranks.run(3, "ranks:pool_check", "rank") == [0, 1, 2]
