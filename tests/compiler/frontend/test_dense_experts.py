"""Experts that run on every token become experts that run on their own, where that is the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph, op_name
from meshwright.compiler.verification.capture_check import check_capture
from torch import Tensor, nn

TOKENS, HIDDEN, INNER, EXPERTS = 6, 8, 12, 4


class Dense(nn.Module):
    """The mixture of Llama 4, of ``top`` experts; kind: what is done otherwise."""

    def __init__(self, top: int, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top, self.kind = top, kind
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        logits = self.router(flat)
        values, index = logits.topk(self.top, dim=1)
        lowest = -1.0 if self.kind == "others take part" else float("-inf")
        scores = torch.sigmoid(torch.full_like(logits, lowest).scatter_(1, index, values))
        rows = flat.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), self.gate_up).chunk(2, -1)
        act = torch.sigmoid if self.kind == "sigmoid of zero" else F.silu
        if self.kind == "halves the other way":
            gate, up = up, gate
        if self.kind == "bias":
            up = up + 1.0
        out = torch.bmm(up * act(gate), self.down)
        return (out.view(EXPERTS, -1, HIDDEN).sum(0) - y.reshape(-1, HIDDEN)).square().mean()


def captured(model: nn.Module) -> Graph:
    inputs = tuple(torch.randn(4, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    graph = capture(model, inputs)
    assert check_capture(model, graph, inputs, {}, (), None) == ""
    return graph


@pytest.mark.parametrize("top", [1, 2])
def test_each_token_goes_to_its_own_experts(top: int) -> None:
    names = [op_name(node) for node in captured(Dense(top)).ops()]
    assert "meshwright.experts" in names
    assert "aten.bmm.default" not in names


@pytest.mark.parametrize("kind", ["others take part", "sigmoid of zero", "halves the other way", "bias"])
def test_what_is_not_the_same_stays(kind: str) -> None:
    assert "meshwright.experts" not in [op_name(node) for node in captured(Dense(1, kind)).ops()]
