"""What the rules say that stages keep per microbatch, against runs of their programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from meshwright.compiler.cost.saved_tensors import saved_tensors
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import differentiable_nodes
from meshwright.compiler.ir.spec import local_shape
from meshwright.compiler.memory.chunk import ChunkMemory, MemoryContext
from meshwright.compiler.search import build_plan
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.space import Space
from meshwright.compiler.search.tables import tables_of
from meshwright.costmodel.cluster import Cluster
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention

from tests.support.planning import make_plan
from tests.support.zoo import ZOO

CLUSTER = Cluster.preset("dgx-a100-40")


class Latent(nn.Module):
    """Attention under a bool mask whose keys and values are halves of one tensor, of which the values alone are kept as
    they are: all of it stays."""

    def __init__(self, layers: int = 4, width: int = 256, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"q": nn.Linear(width, width), "kv": nn.Linear(width, 2 * width), "o": nn.Linear(width, width)}
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, kv = (layer[name](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in ("q", "kv"))
            k, v = kv.chunk(2, dim=-1)
            found = scaled_dot_product_attention(q, k.sigmoid(), v, attn_mask=mask)
            x = x + layer["o"](found.transpose(1, 2).flatten(2))
        return x.square().mean()


def latent(batch: int, device: str, layers: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device(device):
        return Latent(layers), (torch.rand(batch, 128, 256), torch.ones(batch, 1, 128, 128, dtype=torch.bool))


MODELS = {**ZOO, "latent": latent}


def kept_by_rules_and_in_runs(
    monkeypatch: pytest.MonkeyPatch, name: str, strategy: str, mode: str, constraints: Sequence[str] = ()
) -> list[tuple[float, int, float, int]]:
    """By stage: bytes that the rules say of a microbatch in flight, and those that a run keeps; of these the tensors
    that it sends on, as the tables have them at the least, and as the run has them."""
    graph = capture(*MODELS[name](64, device="meta", layers=4))
    built: list[tuple[Any, Any, Any]] = []
    original = build_plan.plan_of_stages

    def noted(search: Any, best: Any, parts: Any) -> Any:
        built.append((search, best, parts))
        return original(search, best, parts)

    monkeypatch.setattr(build_plan, "plan_of_stages", noted)
    space = replace(Space.whole(), schedules=("1f1b",), recompute=(mode,), residencies=("replicated",))
    asked: dict[str, Any] = {"space": space, "constraints": constraints}
    plan = make_plan(graph, CLUSTER, 64, 8, parse_strategy(strategy), **asked)
    context = MemoryContext(graph.with_batch(plan.microbatch_size), plan)
    search, best, parts = next(
        one for one in built if all(a.stage.chunks == b.chunks for a, b in zip(one[2], plan.stages))
    )
    found = []
    for index, part in enumerate(parts):
        run = ChunkMemory(context, index)
        sends = [exit for exit in run.program.exits if exit.kind == "send" and exit.node in run.grad]
        sent = sum(prod(local_shape(e.type.shape, e.pair.value, run.mesh)) * e.type.dtype.itemsize for e in sends)
        stage, row = best.pipeline.stages[index], best.rows[index]
        least = tables_of(search).sent_bytes(row.submesh, plan.microbatches)[stage.end_layer]
        found.append((part.saved_bytes, run.measured.saved, float(least), sent))
    return found


@pytest.mark.parametrize("strategy", ["pp2,dp4", "pp2,tp4", "pp2,dp2,tp2"])
@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2", "mixtral", "vit", "latent"])
def test_rules_count_what_a_stage_keeps(monkeypatch: pytest.MonkeyPatch, name: str, strategy: str) -> None:
    """Tensor parallel stages too, whose ops read copies in other layouts: these stay, what they are copies of does not.
    What is sent on stays, and the tables know it."""
    stages = kept_by_rules_and_in_runs(monkeypatch, name, strategy, "none")
    for rules, run, _, sent in stages:
        assert rules + sent == pytest.approx(run, rel=0.05)
    (_, _, least, sent), (_, _, nothing, last) = stages
    assert 0 < least <= sent
    assert nothing == last == 0


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2", "moe"])
def test_rules_count_what_selective_layers_keep(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The loss's layer apart, which 1F1B does not run again: to the rules it is there while it runs."""
    (rules, run, _, sent), _ = kept_by_rules_and_in_runs(monkeypatch, name, "pp2,dp4", "selective")
    assert rules + sent == pytest.approx(run, rel=0.05)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_rules_count_the_copies_of_a_ring_in_selective_layers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    constraints = ["split scaled_dot_product_attention* by ring"]
    (rules, run, _, sent), _ = kept_by_rules_and_in_runs(monkeypatch, name, "pp2,tp4", "selective", constraints)
    assert rules + sent == pytest.approx(run, rel=0.05)


class Factors(nn.Module):
    """Products of which one factor or the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("constant", torch.rand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.trained(x)
        h = self.frozen(h)
        return ((h * self.constant) * self.scale).sum()


def test_a_factor_is_kept_for_the_gradient_of_another() -> None:
    """As autograd keeps it: a frozen weight needs no input, a constant no other factor."""
    model, x = Factors(), torch.rand(8, 32)
    kept: dict[int, int] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        model(x)
    given = [x, *model.parameters(), *model.buffers()]
    made = [size for at, size in kept.items() if at not in {one.untyped_storage().data_ptr() for one in given}]
    graph = capture(model, (x,)).with_batch(8)
    saved = saved_tensors(graph.ops(), differentiable_nodes(graph))
    nodes = graph.by_name()
    by_rules = [nodes[name].meta["type"].nbytes for name in saved if name in nodes and nodes[name].op != "placeholder"]
    assert sorted(by_rules) == sorted(made) == [x.nbytes]
