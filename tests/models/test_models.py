"""Built-in targets: names, published sizes, and a GPT that learns."""

from __future__ import annotations

import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import op_name
from meshwright.models import build, names
from meshwright.models.architectures import GPT, TransformerMoE


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-350m", 0.356), ("gpt-2.6b", 2.65), ("gpt-39b", 39.1), ("gpt-175b", 174.6), ("llama3-8b", 8.03),
        ("llama3-405b", 405.9), ("moe-380m", 0.384), ("moe-70b", 70.4), ("wrn-250m", 0.254), ("wrn-13b", 12.63),
        ("resnet-152", 0.060), ("t5-3b", 2.852), ("vit-moe", 3.43),
    ],
)  # fmt: skip
def test_sizes_are_the_published_ones(name: str, billions: float) -> None:
    target = build(name)
    parameters = list(target.model.parameters())
    assert sum(p.numel() for p in parameters) / 1e9 == pytest.approx(billions, rel=5e-3, abs=5e-4)
    assert all(p.is_meta and p.dtype == target.dtype for p in parameters)
    tensors = [*target.args, *target.kwargs.values()]
    assert all(t.is_meta and t.shape[0] == target.global_batch for t in tensors)


def test_names_and_unknown_names() -> None:
    listed = names()
    assert {"gpt-demo", "gpt-39b", "llama3-8b", "moe-10b", "wrn-4b", "unet", "t5-3b", "resnet-152", "vit-moe"} <= set(
        listed
    )
    assert all(description for description in listed.values())
    with pytest.raises(ValueError, match=r"got 'gpt-36b'; did you mean .*gpt-39b"):
        build("gpt-36b")


def test_flops_are_the_formula() -> None:
    batch, sequence, layers, hidden, vocab = 1024, 1024, 24, 1024, 51200
    attention = 1 + sequence / (6 * hidden)
    model = 72 * batch * sequence * layers * hidden**2 * attention + 6 * batch * sequence * hidden * vocab
    alpa = 96 * batch * sequence * layers * hidden**2 * attention + 6 * batch * sequence * hidden * vocab
    flops = build("gpt-350m").flops_per_step
    assert flops == pytest.approx(model)
    assert model / alpa == pytest.approx(0.775, abs=5e-4)
    assert build("wrn-250m").flops_per_step is None


@pytest.mark.parametrize("name", ["gpt-demo", "unet", "vit-moe", "moe-380m", "resnet-152"])
def test_targets_capture(name: str) -> None:
    target = build(name)
    graph = capture(target.model, target.args, target.kwargs)
    assert graph.results[0].kind == "loss"
    assert ("meshwright.experts" in {op_name(node) for node in graph.ops()}) == ("moe" in name)


@pytest.mark.parametrize("make", [lambda: GPT(16, 1, 32, 2, 8), lambda: TransformerMoE(16, 2, 32, 2, 4, 8, 64)])
def test_it_learns_to_repeat(make) -> None:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(9).repeat(4, 1).add(torch.arange(4)[:, None]) % 16
    losses = []
    for _ in range(30):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.5
    assert losses[-1] < 0.3
    assert model(tokens[:, :3]).shape == (4, 3, 16)


def test_bad_heads() -> None:
    with pytest.raises(ValueError, match="heads divide hidden, but got 5"):
        GPT(16, 1, 32, 5, 8)
