"""A graph is the same whether its program was decomposed op by op or traced again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshwright.compiler.frontend import capture as capturing
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.decompose import decompose_program
from meshwright.compiler.ir.graph import Graph, op_name
from torch import Tensor, nn

from tests.support.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")


ONE_BY_ONE = ["mlp", "gpt", "moe", "gpt2", "llama", "bert", "vit"]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Graph, Graph, bool]]:
    """(the graph as it is captured, as it is where everything is traced again, whether the former was not)."""

    def captured(*case: Any, **options: Any) -> tuple[Graph, Graph, bool]:
        again: list[bool] = []

        def noted(program: Any) -> Any:
            found = decompose_program(program)
            again.append(found is not program)
            return found

        monkeypatch.setattr(capturing, "decompose_program", noted)
        graph = capture(*case, **options)
        monkeypatch.setattr(capturing, "decompose_program", lambda program: program.run_decompositions({}))
        return graph, capture(*case, **options), not again[-1]

    return captured


def facts(graph: Graph) -> list[Any]:
    names = ("type", "source", "module", "line")
    return [graph.text(), graph.results, [[node.name, *(str(node.meta.get(key)) for key in names)] for node in graph]]


FEW = ["gpt", "convnet", "bert"]


@pytest.mark.parametrize(
    ("name", "training", "dropout"),
    [*((name, True, 0.25) for name in ZOO), *((name, *how) for name in FEW for how in ((True, 0.0), (False, 0.25)))],
)
def test_graphs_are_equal(name: str, training: bool, dropout: float, both: Callable[..., Any]) -> None:
    found, expected, one_by_one = both(*ZOO[name](4, dropout=dropout, device="meta"), training=training)
    assert facts(found) == facts(expected)
    assert one_by_one or name not in ONE_BY_ONE or not training


class Views(nn.Module):
    """Casts, views and splits that do something or nothing, of operands that are contiguous or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.to(torch.float32)).transpose(1, 2).reshape(x.shape[0], -1)
        y = y.double().to(torch.float32).contiguous().view_as(y).unflatten(1, (4, -1)).flatten(1).type_as(x)
        first, second = y.reshape(x.shape[0], 2, -1).transpose(0, 1).contiguous().chunk(2)
        third, fourth = first.narrow(2, 0, 4).expand_as(second.narrow(2, 0, 4)).tensor_split(2, dim=2)
        return (third * fourth.movedim(1, 2).reshape_as(third)).detach().mean() + second.square().mean()


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0] = 1.0
        return y.add_(1).relu_().mean()


class Regions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.reshape(-1).abs().max().to(torch.float64).to(x.dtype)
        return (x / scale).reshape(-1).sum().reshape(())  # the result itself is a view


class Constants(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.as_tensor(2.0)).mean()


@pytest.mark.parametrize(
    ("model", "shape", "one_by_one"),
    [(Views(), (4, 2, 6), True), (InPlace(), (4, 3), False), (Regions(), (4, 3), False), (Constants(), (4, 2), False)],
)
def test_views_casts_and_what_works_in_place(
    model: nn.Module, shape: tuple[int, ...], one_by_one: bool, both: Callable[..., Any]
) -> None:
    found, expected, fast = both(model, (torch.zeros(shape),))
    assert facts(found) == facts(expected)
    assert fast == one_by_one


def test_nothing_composite_is_left() -> None:
    ops = {op_name(node) for node in capture(Views(), (torch.zeros(4, 2, 6),)).ops()}
    assert not ops & {"aten.reshape.default", "aten.to.dtype", "aten.chunk.default", "aten.flatten.using_ints"}
    assert {"aten.view.default", "aten._to_copy.default", "aten.linear.default"} <= ops
