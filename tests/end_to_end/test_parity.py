"""The parallel run equals the single-device run, for forced shapes and automatic plans."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.parity import compared

SHAPES = {
    "dp4": ({"dp": 4}, 2),
    "tp4": ({"tp": 4}, 2),
    "pp4": ({"pp": 4}, 4),
    "dp2tp2": ({"dp": 2, "tp": 2}, 2),
    "pp2tp2": ({"pp": 2, "tp": 2}, 4),
    "pp2dp2": ({"pp": 2, "dp": 2}, 2),
    "pp2dp2tp2": ({"pp": 2, "dp": 2, "tp": 2}, 2),
}
OPTIONS: dict[str, dict[str, Any]] = {"llama": {"kv_heads": 4}, "mixtral": {"kv_heads": 4}}
MODELS = ["gpt", "llama", "t5", "convnet", "mixtral"]


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("name", MODELS)
def test_forced_shape_equals_one_device(ranks, name, shape):
    strategy, m = SHAPES[shape]
    size = strategy.get("pp", 1) * strategy.get("dp", 1) * strategy.get("tp", 1)
    stages = compared(ranks, size, name, strategy, m, **OPTIONS.get(name, {}))
    assert [len(stage.devices) for stage in stages] == [size // strategy.get("pp", 1)] * strategy.get("pp", 1)


@pytest.mark.parametrize("name", MODELS)
def test_automatic_plan_equals_one_device(ranks, name):
    stages = compared(ranks, 4, name, **OPTIONS.get(name, {}))
    assert sum(len(stage.devices) for stage in stages) > 1


@pytest.mark.parametrize(
    ("name", "strategy"), [("gpt", {"pp": 2, "tp": 2}), ("t5", {"tp": 4}), ("convnet", {"dp": 2, "tp": 2})]
)
def test_in_float64_adamw_agrees_to_the_ninth_digit(ranks, name, strategy):
    compared(ranks, 4, name, strategy, 2, ("adamw",), double=True)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_other_models_equal_one_device(ranks, name):
    compared(ranks, 4, name, {"pp": 2, "tp": 2}, 2, ("sgd",))


def test_gpipe_equals_one_device(ranks):
    compared(ranks, 4, "gpt", {"pp": 4}, 4, ("sgd",), "gpipe")


@pytest.mark.parametrize("size", [3, 6])
def test_odd_rank_counts_equal_one_device(ranks, size):
    compared(ranks, size, "gpt", kinds=("sgd",), batch=12, layers=4)
