"""A plan is not handed out where the program of one of its stages fails on tensors without data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.errors import StageError
from meshwright.compiler.memory.chunk import ChunkMemory

from tests.support.clusters import fast_links
from tests.support.small_net import BATCHES, net


@pytest.mark.parametrize(("strategy", "stage"), [("dp2", 0), ("pp2", 1)])
def test_a_stage_that_fails_without_data_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strategy: str, stage: int
) -> None:
    def failing(self: Any, context: Any, index: int, place: int = 0) -> None:
        original(self, context, index, place)
        if index == stage:
            torch.zeros(4, 16, device="meta") + torch.zeros(8, 15, device="meta")  # as a wrong rule makes them

    original = ChunkMemory.__init__
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path))
    ask = {"example_inputs": BATCHES[0], "strategy": strategy, "microbatches": 2}
    with monkeypatch.context() as patch:
        patch.setattr(ChunkMemory, "__init__", failing)
        with pytest.raises(StageError, match=rf"RuntimeError: .*15.* in stage {stage}.*mw.verify") as caught:
            mw.plan(net(), fast_links(2), **ask)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value.__cause__, RuntimeError)
    found = mw.plan(net(), fast_links(2), **ask)  # nothing was saved of the plan that failed
    assert found.prediction.stages[0].memory_bytes["parameters"] > 0
