"""What the published rows taught the cost model: attention without a fused kernel, and the state of an exit."""

from __future__ import annotations

import pytest
import torch
from meshwright.compiler.cost.pricing import MeshPricer
from meshwright.compiler.frontend.layers import cluster_layers
from meshwright.compiler.ir.graph import op_name
from meshwright.compiler.rules import mesh_choices, rule_for
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.compute import SCORE_BYTES, op_price

from tests.oracles.scalar_composer import Composer
from tests.support.graphs import graph_of

V100 = Cluster.preset("p3.16xlarge")


@pytest.fixture(scope="module")
def graph():
    return graph_of("gpt", 64, layers=8)


# ---- what the rows taught the model


def test_attention_without_a_fused_kernel_pays_for_its_scores():
    """Twice the head size is twice the FLOPs: of a fused kernel twice the time, of the V100's less, as the scores are
    the same; half the heads of twice the size are half the scores."""
    v100, a100 = V100.device(0), Cluster.preset("dgx-a100-40").device(0)

    def seconds(device, heads, size):
        shape = (4, heads, 1024, size)
        flops = 4.0 * 4 * heads * 1024**2 * size
        price = op_price("attention", flops, 8.0 * 4 * heads * 1024 * size, torch.float16, device, shapes=(shape,) * 4)
        return price.seconds - device.launch_s

    scores = SCORE_BYTES * 4 * 16 * 1024**2 / (v100.memory_bytes_per_s * 0.8)
    assert seconds(v100, 16, 64) == pytest.approx(scores + 4.0 * 4 * 16 * 1024**2 * 64 / (0.65 * 125e12))
    assert 1.1 < seconds(v100, 16, 128) / seconds(v100, 16, 64) < 1.5
    assert seconds(v100, 8, 128) < 0.7 * seconds(v100, 16, 64)
    assert seconds(a100, 16, 128) == pytest.approx(2 * seconds(a100, 16, 64))
    assert seconds(a100, 8, 128) == pytest.approx(seconds(a100, 16, 64))


def test_attention_costs_two_forwards_backward(graph):
    small = graph.with_batch(8)
    pricer = MeshPricer(V100, 0, ())
    grad = cluster_layers(small).needs_grad
    attention = [n for n in small.ops() if op_name(n) == "aten.scaled_dot_product_attention.default"]
    price = pricer.op(attention[0], mesh_choices(attention[0], ())[0], grad)
    added = price.forward_s * 0.1  # sums of cotangents, where an operand has several consumers
    assert 2 * price.forward_s <= price.backward_s <= 2 * price.forward_s + added
    assert price.flops == pytest.approx(3 * rule_for(attention[0]).flops(attention[0]))


def test_the_state_of_an_exit_counts_the_way_back(graph):
    """Between hosts a stage of four devices wants its cotangents cut, not four times whole."""
    small = graph.with_batch(16)
    two = Cluster.preset("p3.16xlarge", 2)
    composer = Composer(small, cluster_layers(small), MeshPricer(two, 4, (4,)), 4)
    boundary = len(composer.layering.layers) // 2
    states, seconds = composer.states(boundary), composer.exit_seconds(boundary)
    sizes = [composer.pricer.local_bytes(small.by_name()[name].meta["type"], state[t].cotangent)
             for state in states for t, name in enumerate(composer.layering.crossing[boundary])]  # fmt: skip
    assert len(set(sizes)) > 1
    order = [seconds[i] for i in sorted(range(len(sizes)), key=sizes.__getitem__)]
    assert order == sorted(order)
    assert order[0] < order[-1]
    assert not composer.exit_seconds(len(composer.layering.layers)).any()
