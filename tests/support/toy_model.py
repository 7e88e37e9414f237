"""A small model with hand-lowered programs: a skip edge, a tied weight, an integer edge and a buffer that counts; and
the same model in eager PyTorch on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
import torch.nn.functional as F
from meshwright.compiler.ir.graph import TensorType
from meshwright.compiler.ir.program import ChunkProgram, Exit, Slot
from meshwright.compiler.ir.reshard import reshard
from meshwright.compiler.ir.spec import P, Pair, R, S
from meshwright.compiler.plan.plan import Chunk, ParameterSharding, Plan, Prediction, Stage, StagePrediction, Transfer
from meshwright.runtime.execution.session import Session, SessionOptions
from meshwright.runtime.parameters.state import BufferInfo, ModelInfo, ParameterInfo
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
        return ChunkProgram(self.graph, tuple(self.slots), tuple(self.exits), self.mesh_shape, {}, {})


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
                parameters[name] = ParameterSharding(pair, pair.value, pair.value, pair.value)
        chunk = Chunk(
            (layers[0], layers[-1] + 1),
            {},
            parameters,
            {name: pair_of(name, modes) for name in used if KINDS[name] != "parameter"},
            {name: pair_of(name, modes) for name in received},
            {name: pair_of(name, modes).value for name in sent},
        )
        stages.append(Stage(devices, mesh_shape, (chunk,)))
    priceless = StagePrediction(0.0, 0.0, 0.0, {}, {"framework": 0.0}, {})
    plan = Plan(
        "toy", {}, {"hosts": [{"num_devices": world}]}, batch, microbatches, schedule, "sgd", ("a", "b", "c", "d"),
        tuple(stages), tuple(transfers), Prediction(0.0, 0.0, (priceless,) * len(stages), 0.0, 0.0),
    )  # fmt: skip
    faults = plan.check()
    assert faults == [], faults
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
    return Session(plan, mine, INFO, model, SessionOptions(optimizer=OPTIMIZERS[optimizer], **more))


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
