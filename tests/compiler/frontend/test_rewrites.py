"""Assignments to slices and gradients of tables: what they become, and that nothing is lost on the way."""

from __future__ import annotations

import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.graph_edits import arguments_of
from meshwright.compiler.frontend.layers import differentiable_nodes
from meshwright.compiler.ir.graph import Graph, op_name
from meshwright.compiler.verification.capture_check import check_capture
from torch import Tensor, nn

from tests.support.special_models import SPECIAL


class Halves(nn.Module):
    """A new tensor of which each half is assigned; ``gap``: but for a place between them."""

    def __init__(self, gap: int = 0) -> None:
        super().__init__()
        self.left, self.right, self.gap = nn.Linear(8, 4), nn.Linear(8, 4 - gap), gap

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x.new_zeros(x.shape)
        h[..., 4 + self.gap :] = self.right(x)
        h[..., :4] = self.left(x)
        return (h * x - y).square().mean()


def captured(model: nn.Module, *inputs: Tensor) -> Graph:
    graph = capture(model, inputs)
    assert check_capture(model, graph, inputs, {}, (), None) == ""
    return graph


def names(graph: Graph) -> list[str]:
    return [op_name(node) for node in graph.ops()]


def test_assignments_have_derivatives() -> None:
    model, inputs, _ = SPECIAL["assigning"](8)
    found = names(captured(model, *inputs))
    assert "aten.copy.default" not in found
    assert "aten.slice_scatter.default" in found


def test_assignments_that_cover_a_dim_are_joined() -> None:
    found = names(captured(Halves(), torch.randn(4, 8), torch.randn(4, 8)))
    assert "aten.cat.default" in found
    assert not any("scatter" in name or "new_zeros" in name for name in found)


def test_a_place_that_is_not_assigned_keeps_its_value() -> None:
    graph = captured(Halves(gap=1), torch.randn(4, 8), torch.randn(4, 8))
    assert names(graph).count("aten.slice_scatter.default") == 2


def test_a_new_tensor_has_no_gradient() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return (h + h.new_full((8,), 2.0)).square().mean()

    graph = capture(Masked(), (torch.randn(4, 8),))
    (made,) = [node.name for node in graph.ops() if "new_full" in op_name(node)]
    assert made not in differentiable_nodes(graph)


class Masking(nn.Module):
    """Blocks each of which makes the same mask, and draws its own noise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        for block in self.blocks:
            causal = torch.ones(8, 8).tril()
            mask = torch.where(keep[:, None, :] > 0, causal, 0.0)
            x = block(x) + (x[:, None, :] * mask).sum(-1) * torch.exp(self.scale) + torch.rand_like(keep)
        return x.square().mean()


def test_gradients_of_tables_are_dense() -> None:
    model, inputs, _ = SPECIAL["sparse"](8)
    graph = captured(model, *inputs)
    (table,) = [node for node in graph.ops() if op_name(node) == "aten.embedding.default"]
    assert arguments_of(table)["sparse"] is False
    assert "aten.embedding_bag" not in " ".join(names(graph))  # bags of equal size have an op of their own


def test_equal_masks_are_made_once() -> None:
    graph = capture(Masking(), (torch.randn(4, 8), torch.ones(4, 8)))
    found = names(graph)
    assert [found.count(name) for name in ("aten.tril.default", "aten.gt.Scalar")] == [1, 1]
    assert found.count("aten.exp.default") == 3  # a weight decides it, so each layer has its own
    assert found.count("meshwright.random_tensor") == 3
