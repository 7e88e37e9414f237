"""Signatures of local work and the probes that run it: equal work has equal text, and probes do the step's own work."""

from __future__ import annotations

import re

import pytest
import torch
from meshwright.compiler.cost.signature import plan_probes, signature
from meshwright.compiler.frontend.layers import differentiable_nodes
from meshwright.compiler.frontend.strides import copy_with_layout, layout_of, note_layouts
from meshwright.compiler.ir.graph import Graph, op_name
from meshwright.compiler.ir.probe import Probe
from meshwright.compiler.rules import pairs_choice
from meshwright.compiler.search.parallel_shape import Strategy
from meshwright.costmodel.cluster import Cluster

from tests.support import zoo
from tests.support.graphs import graph_of, shared_plan

CLUSTER = Cluster.parse("p3.16xlarge:1")


def signature_of(node, labels, mesh_shape, needs_grad) -> str:
    return signature(node, pairs_choice(node, labels, mesh_shape), mesh_shape, needs_grad)


def probes_of(graph: Graph, tp: int) -> dict[str, Probe]:
    plan = shared_plan(graph, CLUSTER, 8, 2, Strategy(1, 1, tp))
    return plan_probes(graph, plan)


def test_text_of_a_linear() -> None:
    graph = graph_of("gpt").with_batch(8)
    note_layouts(graph)
    grad = differentiable_nodes(graph)
    linear = graph.node("linear_4")
    whole = "aten.linear.default(f32[8,16,64]*, f32[256,64]^, f32[256]^)"
    assert signature_of(linear, (), (), grad) == whole
    assert signature_of(linear, ("whole",), (4,), grad) == whole
    assert signature_of(linear, (), (), frozenset()) == "aten.linear.default(f32[8,16,64], f32[256,64], f32[256])"
    cut = "aten.linear.default(f32[2,16,64]*, f32[128,64]^, f32[128]^)"
    assert signature_of(linear, ("b0", "o"), (4, 2), grad) == cut
    assert signature_of(linear, ("o", "b0", "whole"), (2, 4, 3), grad) == cut
    assert signature_of(linear, ("b0", "b0", "o"), (2, 2, 2), grad) == cut


def test_masked_ops_count_blocks_not_axes() -> None:
    graph = graph_of("gpt").with_batch(8)
    grad = differentiable_nodes(graph)
    loss = next(node for node in graph.ops() if op_name(node) == "meshwright.cross_entropy")
    four = signature_of(loss, ("vocab",), (4,), grad)
    assert "vocab_blocks=4" in four
    assert four == signature_of(loss, ("whole", "vocab", "vocab"), (3, 2, 2), grad)
    assert four != signature_of(loss, ("vocab",), (2,), grad)


def test_only_views_that_copy_are_named() -> None:
    graph = graph_of("llama").with_batch(8)
    note_layouts(graph)
    grad = differentiable_nodes(graph)
    text = {n.name: signature_of(n, (), (), grad) for n in graph.ops() if op_name(n) != "getitem"}
    assert text["transpose"] == ""  # heads first: no bytes move in either direction
    assert text["view"].endswith("<- @0.2.1.3")  # its cotangent comes with heads first and must be packed
    assert text["slice_2"].startswith("aten.slice.Tensor(")  # its cotangent is padded with zeros
    assert "@0.2.1.3*" in text["scaled_dot_product_attention"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", sorted(zoo.ZOO))
def test_every_probe_runs(name: str, tp: int) -> None:
    probes = probes_of(graph_of(name), tp)
    assert probes
    for text, probe in probes.items():
        assert text == probe.signature
        first, second = probe.make("cpu"), probe.make("cpu", weights=False)
        for instance in (first, second):
            instance.prepare()
        first.forward()
        second.forward()
        second.backward()
        first.backward()


def test_probes_give_the_gradients_that_the_marks_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    grad = torch.autograd.grad

    def spy(outputs: object, inputs: list[torch.Tensor], *args: object, **kwargs: object) -> object:
        found = grad(outputs, inputs, *args, **kwargs)  # type: ignore[arg-type]
        assert all(g is not None and g.shape == x.shape for g, x in zip(found, inputs))
        asked.append(len(inputs))
        return found

    probes = probes_of(graph_of("mixtral"), 2)
    monkeypatch.setattr(torch.autograd, "grad", spy)
    for text, probe in probes.items():
        for weights, marks in ((True, "*^"), (False, "*")):
            asked.clear()
            instance = probe.make("cpu", weights=weights)
            instance.forward()
            instance.backward()
            found = re.findall(r"[a-z]+\d+\[[\d,]*\][@\d.x~]*([*^])", text.partition(" <- ")[0])
            expected = sum(mark in marks for mark in found)
            assert asked == ([expected] if expected else []), text


def test_instances_are_independent() -> None:
    probes = probes_of(graph_of("gpt"), 1)
    probe = next(probe for text, probe in probes.items() if "gelu" in text)
    many = [probe.make("cpu") for _ in range(3)]
    pointers = {x.data_ptr() for instance in many for x in instance.operands}
    assert len(pointers) == 3
    assert all(torch.equal(instance.operands[0], many[0].operands[0]) for instance in many)
    assert probe.nbytes == 3 * many[0].operands[0].nbytes  # operand, output, cotangent


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 4).transpose(0, 2),
        torch.randn(2, 3, 12)[:, :, 4:8],
        torch.randn(2, 1, 4).expand(2, 3, 4),
        torch.randn(2, 5, 4)[:, :4],
        torch.randn(2, 3, 4),
    ],
)
def test_layouts_are_made_again(x: torch.Tensor) -> None:
    layout = layout_of(x.shape, x.stride())
    again = copy_with_layout(x, layout)
    assert torch.equal(again, x)
    assert layout_of(again.shape, again.stride()) == layout
    assert (layout is None) == x.is_contiguous()
