"""Seconds of an op: the roofline and curves."""

import pytest
import torch
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.compute import op_price
from meshwright.costmodel.hardware import Device

from tests.support.clusters import on_two_cores
from tests.support.prices import op_seconds


# ---- compute
def test_roofline():
    device = Device(
        "d",
        2**30,
        (("float32", 1e12), ("float16", 4e12)),
        1e11,
        5e-6,
        "test",
        efficiency=(("matmul", 0.5), ("memory", 1.0)),
    )
    assert op_price("matmul", 1e9, 1, torch.float32, device).seconds == pytest.approx(1e9 / 5e11 + 5e-6)
    assert op_seconds("matmul", 1e9, 1, torch.float16, device) == pytest.approx(1e9 / 2e12 + 5e-6)
    assert op_seconds("matmul", 1, 1e9, torch.float32, device) == pytest.approx(1e-2 + 5e-6)
    assert op_seconds("pointwise", 0, 1e9, "float32", device) == pytest.approx(1e-2 + 5e-6)
    assert op_price("pointwise", 0, 1e9, "float32", device).source == "roofline"
    assert op_seconds("view", 0, 1e9, "float32", device) == 0
    with pytest.raises(ValueError, match="op kind is one of"):
        op_price("magic", 1, 1, "float32", device)
    with pytest.raises(ValueError, match="never negative"):
        op_price("matmul", -1, 1, "float32", device)


def test_price_from_a_curve_says_so():
    device = on_two_cores(2).device(0)
    assert op_price("matmul", 1e6, 1e3, "float32", device).source == "interpolated"
    assert op_price("matmul", 1e6, 1e3, "float32", device).seconds == pytest.approx(2e-5)
    assert op_price("matmul", 1e12, 1e3, "float32", device).source == "extrapolated"
    assert op_price("normalization", 0, 1e6, "float32", device).source == "roofline"  # no curve in this table
    assert op_seconds("matmul", 1e6, 1e8, "float32", device) == pytest.approx(1e-3)  # bytes still bind
    assert op_seconds("matmul", 1e6, 1e3, "float64", device) > op_seconds("matmul", 1e6, 1e3, "float32", device)
    assert op_seconds("view", 0, 0, "float32", device) == 5e-7


def test_v100_share_reproduces_the_row_it_came_from():
    """GPT-350m on one V100, microbatch 2, forward + recompute + 2 × backward, against the published 45.1 TFLOPS; then
    GPT-1.3b's compute against 58.2, which no constant was taken from."""
    device = Cluster.preset("p3.16xlarge").device(0)
    for layers, hidden, heads, batch, published in ((24, 1024, 16, 2, 45.1), (24, 2048, 32, 4, 58.2)):
        tokens, seq, vocab = batch * 1024, 1024, 51200
        dense = op_seconds("matmul", 24 * tokens * hidden**2, 0, "float16", device)
        attention = op_seconds("attention", 4 * tokens * seq * hidden, 0, "float16", device)
        rest = op_seconds("pointwise", 0, 2 * 34 * tokens * hidden, "float16", device)
        head = op_seconds("matmul", 6 * tokens * hidden * vocab, 0, "float16", device)
        seconds = 4 * layers * (dense + attention + rest) + head
        flops = 96 * tokens * layers * hidden**2 * (1 + seq / (6 * hidden)) + 6 * tokens * hidden * vocab
        assert flops / seconds / 1e12 == pytest.approx(published, rel=0.1), (hidden, heads)
