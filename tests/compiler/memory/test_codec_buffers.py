"""The bytes that codecs hold: residuals, buffers, and stages of plans against measured ones."""

from __future__ import annotations

import gc
from statistics import median
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.memory.stage import with_stage_memories
from meshwright.compiler.plan.plan import Plan
from meshwright.costmodel.codecs import CODECS
from meshwright.costmodel.memory import drawn_bytes, held_bytes, state_bytes
from meshwright.runtime.compression import BucketSpec, Rehearsal, make_sum
from meshwright.runtime.compression.dither import grid_tile
from meshwright.runtime.profiling.memory_meter import storages_alive

from tests.support.parity import case
from tests.support.peak_memory import MEDIAN, MOST, least_peak
from tests.support.plan_documents import forced, rewired

SHAPES = ((1100, 1000), (300,), (40, 20, 3))
N = 1_102_700  # two chunks


# ---- bytes
@pytest.mark.parametrize("name", CODECS)
def test_a_sum_holds_what_its_description_says(name):
    if name.startswith("atomo-svd"):
        shapes, n = ((40, 30),), 1200
    else:
        shapes, n = SHAPES, N
    codec = CODECS[name]
    grid_tile(0, 1, torch.device("cpu"))
    for size in (1, 3):
        gc.collect()
        before = sum(storages_alive().values())
        made = make_sum(name, BucketSpec(n, shapes=tuple(shapes)), Rehearsal(size).exchanges[0])
        held = sum(storages_alive().values()) - before
        state = sum(x.nbytes for key, x in made.state_dict().items() if key != "step")
        assert state == state_bytes(codec, n, size, shapes)
        assert held == pytest.approx(held_bytes(codec, n, size, shapes), abs=64)
        del made


def test_the_table_of_random_numbers_is_as_large_as_it_says():
    assert grid_tile(0, 1, torch.device("cpu")).untyped_storage().nbytes() == drawn_bytes(CODECS["int8"])
    assert drawn_bytes(CODECS["topk1%"]) == 0


def train_and_measure(document: dict[str, Any], code: str) -> tuple[float, int]:
    """(predicted, measured) bytes of this rank; what earlier tests left in the process does not count."""
    grid_tile(0, 1, torch.device("cpu"))
    gc.collect()
    before = sum(storages_alive().values()) - drawn_bytes(CODECS[code])
    model, args, _ = case("gpt", layers=4)
    parallel = mw.parallelize(
        model, plan=Plan.from_json(document), example_inputs=args,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    )  # fmt: skip
    del model
    parallel.train_step(*args)
    peak = least_peak(lambda: parallel.train_step(*args))
    memory = parallel.plan.prediction.stages[0].memory_bytes
    return sum(size for cause, size in memory.items() if cause != "framework"), peak - before


def test_predicted_bytes_of_coded_gradients_are_those_measured(ranks):
    errors: dict[str, float] = {}
    plain = forced("gpt", ("replicated", "zero1", "zero2"), "dp2", 1, layers=4)
    graph = capture(*case("gpt", layers=4))
    for code in ("1bit", "powersgd4", "topk1%"):
        plan = with_stage_memories(graph, Plan.from_json(rewired(plain, "backend", code)))
        found = ranks.run(2, train_and_measure, plan.to_json(), code)
        errors[code] = max((predicted / measured - 1 for predicted, measured in found), key=abs)
    assert all(abs(error) <= MOST for error in errors.values()), errors
    assert median(map(abs, errors.values())) <= MEDIAN, errors
