"""Random small models × random executable plans, for ``verify``: the same seed gives the same case.

model     blocks of linear, convolution, attention or experts; skips, a tied weight, dropout, frozen weights
cluster   1 to 8 devices on one host
plan      the search's best or one of its first four; a shape; a schedule; ZeRO, recompute; microbatches
labels    of some ops replaced by any other that their rules offer and that has a program
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import meshwright as mw
import torch
import torch.nn.functional as F
from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import op_name
from meshwright.compiler.rules import pairs_choice, rule_for
from meshwright.models.architectures import Experts
from torch import Tensor, nn

from tests.support.clusters import fast_links

__all__ = ["Case", "random_plan"]

WIDTH, HEADS, LENGTH = 8, 4, 8


class Block(nn.Module):
    """One residual block of [batch, length, WIDTH], or none."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind, self.dropout = kind, nn.Dropout(dropout)
        self.norm = nn.LayerNorm(WIDTH) if kind != "convolution" else nn.BatchNorm1d(WIDTH)
        wide = {"linear": 4 * WIDTH, "attention": 3 * WIDTH}.get(kind, WIDTH)
        self.up = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if kind == "convolution" else nn.Linear(WIDTH, wide)
        self.down = nn.Linear(wide if kind == "linear" else WIDTH, WIDTH, bias=kind != "linear")
        self.experts = Experts(WIDTH, 2 * WIDTH, 4) if kind == "experts" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "convolution":
            return self.dropout(self.down(F.relu(self.norm(self.up(x.transpose(1, 2)))).transpose(1, 2)))
        h = self.up(self.norm(x))
        if self.kind == "attention":
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in h.chunk(3, -1))
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        elif self.experts is not None:
            h = self.experts(h)
        else:
            h = F.gelu(h)
        return self.dropout(self.down(h))


class RandomBlocks(nn.Module):
    """Blocks with or without skips; mean squared error, or cross entropy of a head that may be tied to a table."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        kinds = [
            draw.choice(("linear", "linear", "convolution", "attention", "experts")) for _ in range(draw.randint(1, 3))
        ]
        dropout = draw.choice((0.0, 0.0, 0.3))
        self.blocks = nn.ModuleList(Block(kind, dropout) for kind in kinds)
        self.skips = [draw.random() < 0.5 for _ in kinds]
        self.words = nn.Embedding(16, WIDTH) if draw.random() < 0.5 else None
        self.head = nn.Linear(WIDTH, 16, bias=False) if self.words is not None else None
        if self.head is not None and self.words is not None and draw.random() < 0.6:
            self.head.weight = self.words.weight
        if draw.random() < 0.2:
            for parameter in self.blocks[0].parameters():
                parameter.requires_grad_(False)
        self.kinds = kinds

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = h = x if self.words is None else self.words(x)
        for block, skip in zip(self.blocks, self.skips, strict=True):
            h = h + block(h) if skip else block(h)
        if self.head is None:
            return F.mse_loss(h + first, y)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class Case:
    """A model, its inputs and a plan of it; ``text`` says which."""

    text: str
    model: nn.Module
    inputs: tuple[Tensor, Tensor]
    plan: mw.Plan


def random_plan(seed: int) -> Case | None:
    """The case of this seed; None where nothing fits what was drawn."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, devices = RandomBlocks(draw), draw.choice((1, 2, 2, 3, 4, 4, 6, 8))
    microbatches = draw.choice((1, 2, 4))
    batch = microbatches * draw.choice((devices, 2 * devices, 4, 6))
    inputs = _inputs(model, batch)
    asked: dict[str, Any] = {"microbatches": microbatches, "top_k": draw.choice((1, 4)), "cache": False}
    asked["strategy"] = draw.choice((None, *_shapes(devices)))
    asked["schedule"] = draw.choice(("auto", "1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"))
    asked["zero"], asked["recompute"] = draw.choice(("auto", 0, 1, 2, 3)), draw.choice(("auto", "none", "full"))
    text = f"seed {seed}: {model.kinds}, batch {batch}, {devices} devices, {asked}"
    try:
        plan = draw.choice(mw.plan(model, fast_links(devices), example_inputs=inputs, **asked))
    except (InfeasibleError, ValueError):
        return None
    return Case(text, model, inputs, _relabelled(plan, model, inputs, draw))


def _inputs(model: RandomBlocks, batch: int) -> tuple[Tensor, Tensor]:
    if model.words is None:
        x, y = torch.randn(2, batch, LENGTH, WIDTH)
        return x, y
    x, y = torch.randint(0, 16, (2, batch, LENGTH))
    return x, y.masked_fill(torch.rand(y.shape) < 0.3, -100)


def _shapes(devices: int) -> list[dict[str, int]]:
    sizes = [d for d in range(1, devices + 1) if devices % d == 0]
    return [{"pp": p, "dp": d, "tp": devices // p // d} for p in sizes for d in sizes if devices % (p * d) == 0]


def _relabelled(plan: mw.Plan, model: nn.Module, inputs: Any, draw: random.Random) -> mw.Plan:
    """The plan with other labels on some ops: those without a program always, as there is nothing to run."""
    nodes = capture(model, inputs).with_batch(plan.microbatch_size).by_name()
    share, stages = draw.choice((0.0, 0.2, 1.0)), []
    for stage in plan.stages:
        chunks = []
        for chunk in stage.chunks:
            ops = dict(chunk.ops)
            for name, labels in chunk.ops.items():
                sound = pairs_choice(nodes[name], labels, stage.mesh_shape).executable
                if (not sound or draw.random() < share) and op_name(nodes[name]) != "getitem":
                    ops[name] = _other(nodes[name], labels, stage.mesh_shape, draw, sound)
            chunks.append(dataclasses.replace(chunk, ops=ops))
        stages.append(dataclasses.replace(stage, chunks=tuple(chunks)))
    return dataclasses.replace(plan, stages=tuple(stages))


def _other(node: Any, labels: tuple[str, ...], mesh: tuple[int, ...], draw: random.Random, sound: bool) -> Any:
    offered = [choice.label for choice in rule_for(node).axis_choices(node)]
    for _ in range(8):
        tried = tuple(draw.choice(offered) for _ in mesh)
        try:
            if pairs_choice(node, tried, mesh).executable:
                return tried
        except ValueError:
            continue
    return labels if sound else ("whole",) * len(mesh)
