"""The published configurations that ``benchmarks/published.py`` compares with: counts, divisors, one row."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.models import gpt_flops

from tests.support.paths import BENCHMARKS

BENCHMARK = BENCHMARKS / "published.py"


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("published", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module  # dataclasses look their module up
    sys.path.insert(0, str(BENCHMARK.parent))  # as python does for a script
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARK.parent))
    return module


# ---- the benchmark
def test_the_published_count_of_flops(published):
    """MODELS: the model's own FLOPs are 0.775 and 0.759 of what the published figures count; the regression row's
    seconds and TFLOPS agree with each other."""
    by_name = {row.target: row for row in published.ROWS}
    for target, share in (("gpt-350m", 0.775), ("gpt-2.6b", 0.759)):
        row = by_name[target]
        ours = gpt_flops(row.batch, 1024, row.layers, row.hidden, 51200)
        assert ours / row.counted_flops == pytest.approx(share, abs=5e-4)
    regression = published.REGRESSION
    assert regression.counted_tflops(regression.step_s) == pytest.approx(regression.tflops, rel=1e-3)


def test_the_published_plans_use_all_gpus_and_divide_their_microbatches(published):
    for row in (*published.ROWS, published.REGRESSION):
        strategy = parse_strategy(row.division)
        assert strategy.num_devices == row.gpus == published.cluster_of(row.gpus).num_devices
        assert (row.batch // row.microbatches) % strategy.data_parts == 0


def test_a_row_is_predicted(published):
    row = published.Row("tiny", 4, 64, 4, 2, 32, 4, "1:dp1 + 1:dp1", tflops=1.0, step_s=1.0, peak_gib=1.0)
    graph = published.captured(row)
    plan = published.published_plan(row, graph)
    assert not plan["lifted"]
    assert plan["recompute"] == "full"
    assert plan["ratio_step"] == plan["step_s"]
    assert plan["ratio_tflops"] == pytest.approx(row.counted_tflops(plan["step_s"]))
    assert len(plan["stages"]) == 2
    own = published.own_plan(row, graph)
    assert own["step_s"] <= plan["step_s"] * (1 + 1e-9)
