"""Random graphs of many ops, each of a number: built alike on every rank, and trained on one device and on two."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshwright as mw
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["OPS", "GraphCase", "RandomGraph", "graph_case", "losses_of", "one_device"]

BATCH, TIME, WIDTH, HEADS, TOKENS = 8, 8, 16, 4, 12
STEPS, RATE = 3, 0.05
#: name → (modules that it needs, what it makes of two tensors [batch, time, width])
OPS: dict[str, tuple[Callable[[], list[nn.Module]], Callable[..., Tensor]]] = {
    "linear": (lambda: [nn.Linear(WIDTH, WIDTH)], lambda x, y, a: a(x)),
    "feed forward": (
        lambda: [nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)],
        lambda x, y, a, b: y + b(F.gelu(a(x))),
    ),
    "gated": (lambda: [nn.Linear(WIDTH, 2 * WIDTH)], lambda x, y, a: F.glu(a(x), -1)),
    "layer norm": (lambda: [nn.LayerNorm(WIDTH)], lambda x, y, a: a(x)),
    "rms norm": (lambda: [nn.RMSNorm(WIDTH)], lambda x, y, a: a(x)),
    "group norm": (
        lambda: [nn.GroupNorm(4, WIDTH)],
        lambda x, y, a: a(x.transpose(1, 2)).transpose(1, 2),
    ),
    "batch norm": (
        lambda: [nn.BatchNorm1d(WIDTH)],
        lambda x, y, a: a(x.transpose(1, 2)).transpose(1, 2),
    ),
    "attention": (
        lambda: [nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)],
        lambda x, y, a, b: x + b(_attention(a(x))),
    ),
    "causal attention": (lambda: [nn.Linear(WIDTH, 3 * WIDTH)], lambda x, y, a: _attention(a(x), True)),
    "cross scores": (lambda: [], lambda x, y: torch.softmax(torch.einsum("btd,bsd->bts", x, y) / WIDTH, -1) @ y),
    "convolution": (
        lambda: [nn.Conv1d(WIDTH, WIDTH, 3, padding=1)],
        lambda x, y, a: torch.relu(a(x.transpose(1, 2))).transpose(1, 2),
    ),
    "depthwise": (
        lambda: [nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)],
        lambda x, y, a: a(x.transpose(1, 2)).transpose(1, 2),
    ),
    "cat": (lambda: [nn.Linear(2 * WIDTH, WIDTH)], lambda x, y, a: a(torch.cat([x, y], -1))),
    "cat of time": (lambda: [], lambda x, y: torch.cat([x, y], 1)[:, TIME // 2 : TIME + TIME // 2]),
    "halves": (lambda: [], lambda x, y: torch.cat([h * g for h, g in zip(x.chunk(2, -1), y.chunk(2, -1))], -1)),
    "stack": (lambda: [], lambda x, y: torch.stack([x, y, x * y]).mean(0)),
    "heads": (
        lambda: [],
        lambda x, y: x.unflatten(-1, (HEADS, -1)).transpose(1, 2).mul(2).transpose(1, 2).reshape(x.shape),
    ),
    "add": (lambda: [], lambda x, y: x + y),
    "product": (lambda: [], lambda x, y: x * torch.sigmoid(y)),
    "difference": (lambda: [], lambda x, y: torch.tanh(x - 2 * y)),
    # two results may be equal but for rounding, which must decide nothing
    "choice": (lambda: [], lambda x, y: torch.where(x > y + 0.1, x, 0.5 * y)),
    "clamp": (lambda: [], lambda x, y: x.clamp(-1, 1) + y.abs()),
    "softmax": (lambda: [], lambda x, y: torch.softmax(x, -1) * y),
    "log softmax": (lambda: [], lambda x, y: F.log_softmax(x + y, -1)),
    "logsumexp": (lambda: [], lambda x, y: y - torch.logsumexp(x, -1, keepdim=True)),
    "mean of time": (lambda: [], lambda x, y: x - y.mean(1, keepdim=True)),
    "variance": (lambda: [], lambda x, y: x / (1 + y.var(-1, keepdim=True))),
    "greatest": (lambda: [], lambda x, y: x + y.amax(-1, keepdim=True)),
    "running sum": (lambda: [], lambda x, y: torch.cumsum(x, 1) / TIME + y),
    "roll": (lambda: [], lambda x, y: torch.roll(x, 1, 1) + y),
    "flip": (lambda: [], lambda x, y: torch.flip(x, [1]) * y),
    "pad": (lambda: [], lambda x, y: F.pad(x, (0, 0, 1, 0))[:, :-1] + y),
    "pool": (lambda: [], lambda x, y: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2) + y),
    "picked": (lambda: [], lambda x, y: x[:, torch.arange(TIME - 1, -1, -1)] + y),
    "triangle": (lambda: [], lambda x, y: torch.tril(x @ y.transpose(1, 2) / WIDTH) @ x),
    "power": (lambda: [], lambda x, y: x.pow(2) / (1 + y.exp().clamp(max=9.0))),
    "embedding": (lambda: [nn.Embedding(TOKENS, WIDTH)], lambda x, y, a: x + a(_codes(y))),
}  # fmt: skip


def _attention(qkv: Tensor, causal: bool = False) -> Tensor:
    q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in qkv.chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def _codes(x: Tensor) -> Tensor:
    """Whole numbers that depend on values, but hardly on their last bits."""
    return (x.detach().mean(-1) * 4).round().clamp(0, TOKENS - 1).to(torch.int64)


class RandomGraph(nn.Module):
    """``length`` random ops, each of two earlier results; one module in six is an earlier one again, tied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        names, made = sorted(OPS), dict[str, list[int]]()
        self.parts = nn.ModuleList()
        self.ops: list[tuple[str, int, int, list[int]]] = []
        for place in range(draw.randrange(4, 12)):
            name = draw.choice(names)
            if name in made and draw.random() < 1 / 6:
                parts = made[name]
            else:
                modules = OPS[name][0]()
                parts = made[name] = list(range(len(self.parts), len(self.parts) + len(modules)))
                self.parts.extend(modules)
            # the newest result is read most of the time, so that most ops count
            first = place if draw.random() < 0.8 else draw.randrange(place + 1)
            self.ops.append((name, first, draw.randrange(place + 1), parts))
        self.entry, self.exit = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        results = [self.entry(x)]
        for name, first, second, parts in self.ops:
            results.append(OPS[name][1](results[first], results[second], *(self.parts[k] for k in parts)))
        return F.mse_loss(self.exit(torch.tanh(results[-1])), y)

    @property
    def text(self) -> str:
        """What it does."""
        return "; ".join(f"{name}({first}, {second})" for name, first, second, _ in self.ops)


@dataclass(frozen=True)
class GraphCase:
    """A random graph, and what is asked of its plan on two devices."""

    seed: int
    wishes: dict[str, Any]

    @property
    def model(self) -> RandomGraph:
        """It, the same each time."""
        return RandomGraph(self.seed)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The inputs of a step."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        shape = (BATCH, TIME, WIDTH)
        return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def graph_case(seed: int) -> GraphCase:
    """The case of a number."""
    draw = random.Random(f"wishes {seed}")
    wishes: dict[str, Any] = {"strategy": draw.choice(["dp2", "tp2", "pp2", "auto"])}
    wishes["microbatches"] = draw.choice([1, 2, 4])
    if wishes["strategy"] == "auto":
        del wishes["strategy"]
    elif wishes["strategy"] == "dp2":
        wishes["zero"] = draw.choice([0, 1, 3])
    elif wishes["strategy"] == "pp2":
        wishes["schedule"] = draw.choice(["gpipe", "1f1b", "zb-h1"])
    wishes["recompute"] = draw.choice(["none", "full"])
    return GraphCase(seed, wishes)


def losses_of(seed: int) -> list[float] | str:
    """Training by the plan of a case, on one of two ranks: its losses; why not, where no plan is possible."""
    case = graph_case(seed)
    try:
        parallel = mw.parallelize(
            case.model, mw.Cluster.local(2), example_inputs=case.batch(0),
            optimizer=lambda ps: torch.optim.SGD(ps, lr=RATE, momentum=0.9), **case.wishes,
        )  # fmt: skip
    except (ValueError, mw.InfeasibleError) as error:
        return f"{type(error).__name__}: {error}"
    return [float(parallel.train_step(*case.batch(step))) for step in range(STEPS)]


def one_device(seed: int) -> list[float]:
    """The losses of eager PyTorch, with the mean of microbatches as a plan has it."""
    case = graph_case(seed)
    model, count = case.model, case.wishes["microbatches"]
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in zip(*(x.chunk(count) for x in case.batch(step))):
            loss = model(*part) / count
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses
