"""Functions with long loops over time become one op with the user's own code; loops over the batch are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from meshwright.compiler.errors import CaptureError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.long_loops import LONG
from meshwright.compiler.frontend.mixed_precision import in_precision
from meshwright.compiler.ir.graph import Graph, op_name, types_of
from meshwright.compiler.ir.long_loop import LoopFunction
from meshwright.compiler.rules import rule_for
from meshwright.compiler.verification.capture_check import check_capture
from meshwright.compiler.verification.check_rules import check_node
from torch import Tensor, nn

from tests.support.recurrent import HIDDEN, Gated, Recurrent, decay_scan

BATCH = 8


def graph_of(model: nn.Module, steps: int = 2 * LONG, **options: object) -> Graph:
    x = torch.randn(BATCH, steps, HIDDEN)
    return capture(model, (x, torch.randn(BATCH, steps, HIDDEN)), **options)


def loops(graph: Graph) -> list:
    return [node for node in graph.ops() if isinstance(node.target, LoopFunction)]


def test_a_long_loop_is_one_op_per_block() -> None:
    graph = graph_of(Recurrent())
    first, second = loops(graph)
    assert op_name(first) == op_name(second)
    assert "decay_scan" in op_name(first)
    assert {node.meta["module"] for node in (first, second)} == {"blocks.0", "blocks.1"}
    assert len(graph.ops()) < 40
    assert graph.text() == graph_of(Recurrent(), share_blocks=False).text()


def test_a_short_loop_is_traced() -> None:
    graph = graph_of(Recurrent(), LONG - 1)
    assert not loops(graph)
    assert len(graph.ops()) > 4 * LONG


def test_the_graph_computes_what_the_model_does() -> None:
    model, inputs = Recurrent(), (torch.randn(BATCH, 2 * LONG, HIDDEN), torch.randn(BATCH, 2 * LONG, HIDDEN))
    assert check_capture(model, capture(model, inputs), inputs, {}, (), None) == ""


def test_everything_is_put_back() -> None:
    before = decay_scan.__globals__["decay_scan"], Tensor.unbind, torch.unbind, Tensor.__iter__
    graph_of(Recurrent())
    assert before == (decay_scan.__globals__["decay_scan"], Tensor.unbind, torch.unbind, Tensor.__iter__)
    assert "range" not in decay_scan.__globals__


def test_work_is_counted() -> None:
    node = loops(graph_of(Recurrent()).with_batch(BATCH))[0]
    elements = BATCH * 2 * LONG * HIDDEN
    rule = rule_for(node)
    assert rule.flops(node) == pytest.approx(4 * elements, rel=0.3)  # two products, a sum and the stack
    assert rule.temporary_bytes(node) == pytest.approx(2 * 4 * elements, rel=0.6)
    assert rule.saves(node) == ()


def test_batch_and_channels_are_split_and_the_checker_agrees() -> None:
    node = loops(graph_of(Recurrent()).with_batch(BATCH))[0]
    assert [(choice.label, choice.extent) for choice in rule_for(node).axis_choices(node)] == [
        ("whole", 1), ("in0d0", BATCH), ("in0d2", HIDDEN)
    ]  # fmt: skip
    assert check_node(node) == {}


def test_without_data_a_loop_gives_the_same_types() -> None:
    node = loops(graph_of(Recurrent()).with_batch(BATCH))[0]
    for shape in ((BATCH, 2 * LONG, HIDDEN), (BATCH // 4, 2 * LONG, HIDDEN // 2)):
        found = []
        for device in ("cpu", "meta"):
            operands = [torch.rand(s, device=device, requires_grad=True) for s in (shape, shape[-1:])]
            (y,) = node.target(*operands)
            found.append([(x.shape, x.dtype) for x in (y, *torch.autograd.grad(y.sum(), operands))])
        assert found[0] == found[1]


def test_in_16_bits_a_loop_stays_in_32() -> None:
    node = loops(in_precision(graph_of(Recurrent()), "bf16"))[0]
    assert types_of(node)[0].dtype == torch.float32
    assert all(operand.meta["type"].dtype == torch.float32 for operand in node.all_input_nodes)


def test_heads_in_groups_follow_each_other() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(HIDDEN, 8 * 4), nn.Linear(HIDDEN, 4 * 4)

        def forward(self, x: Tensor) -> Tensor:
            v, k = self.wide(x).unflatten(-1, (8, 4)), self.narrow(x).unflatten(-1, (4, 4))
            return grouped_scan(k, v).square().mean()

    graph = capture(Grouped(), (torch.randn(BATCH, 2 * LONG, HIDDEN),)).with_batch(BATCH)
    (node,) = loops(graph)
    choices = rule_for(node).axis_choices(node)
    assert [(choice.label, choice.extent) for choice in choices] == [("whole", 1), ("in0d0", BATCH), ("in0d2", 4)]


def grouped_scan(k: Tensor, v: Tensor) -> Tensor:
    k = k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    state, states = torch.zeros_like(v[:, 0]), []
    for t in range(v.shape[1]):
        state = 0.5 * state + torch.softmax(k[:, t], -1) * v[:, t].sum(-1, keepdim=True)
        states.append(state)
    return torch.stack(states, 1)


def test_a_module_that_loops_over_time_is_one_op_and_one_that_loops_over_layers_is_not() -> None:
    inputs = tuple(torch.randn(BATCH, 2 * LONG, HIDDEN) for _ in range(2))
    graph = capture(Gated(), inputs)
    assert check_capture(Gated(), graph, inputs, {}, (), None) == ""
    first, second = loops(graph)
    assert [operand.meta["source"].name for operand in second.all_input_nodes if operand.op == "placeholder"] == [
        "cells.1.inner.weight", "cells.1.inner.bias", "cells.1.state.weight"
    ]  # fmt: skip
    assert len(graph.placeholders("parameter")) == 2 * 32 + 6
    assert len(graph.ops()) > 3 * 32
    assert [choice.label for choice in rule_for(first).axis_choices(first)] == ["whole", "in3d0"]
    assert check_node(loops(graph.with_batch(BATCH))[0]) == {}


def test_a_module_that_keeps_state_is_traced() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)
            self.register_buffer("state", torch.zeros(HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            h = self.state
            for t in range(x.shape[1]):
                h = torch.tanh(self.linear(x[:, t]) + h)
            self.state.copy_(h.detach().mean(0))
            return h.mean()

    graph = capture(nn.Sequential(nn.Identity(), Keeping()), (torch.randn(BATCH, LONG, HIDDEN),))
    assert not loops(graph)
    assert [result.name for result in graph.results] == ["loss", "1.state"]


def in_place_scan(x: Tensor) -> Tensor:
    for t in range(1, x.shape[1]):
        x[:, t] += x[:, t - 1]
    return x


def test_a_loop_that_changes_its_argument_is_traced() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return in_place_scan(self.linear(x).clone()).mean()

    assert not loops(capture(InPlace(), (torch.randn(BATCH, LONG + 1, HIDDEN),)))


# ---- the batch


class OverBatch(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "range":
            return torch.stack([y[i].relu().sum() for i in range(y.shape[0])]).mean()
        parts = y.unbind(0) if self.kind == "unbind" else list(y)
        return torch.stack([F.relu(part).sum() for part in parts]).mean()


@pytest.mark.parametrize("kind", ["range", "unbind", "list"])
def test_a_loop_over_the_batch_is_refused_by_its_line(kind: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_long_loops.py:\d+: .*{kind}.*a Python loop over the batch; .*batch"):
        capture(OverBatch(kind), (torch.randn(BATCH, 4, HIDDEN),))
