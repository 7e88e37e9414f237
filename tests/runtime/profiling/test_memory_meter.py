"""The meter of live tensors counts every byte, whatever came before, or says why not."""

from __future__ import annotations

import gc

import torch
from meshwright.runtime.profiling.memory_meter import live_bytes
from torch import nn


# ---- the meter
def test_meter_counts_every_byte() -> None:
    gc.collect()
    old = torch.zeros(1000)
    leaf = nn.Parameter(torch.zeros(250))
    leaf.grad = torch.zeros(250)
    with live_bytes() as reading:
        new = torch.zeros(500)
        del old
        with reading.window("inside"):
            part = torch.zeros(300)[:3]
            more = torch.zeros(200)
            del more
        leaf.grad = None
        del part
    assert reading.start_bytes is not None
    assert reading.peak_bytes == reading.start_bytes + 2000
    inside = reading.windows["inside"]
    assert inside.start_bytes == reading.start_bytes + 2000 - 4000
    assert (inside.peak_bytes - inside.start_bytes, inside.end_bytes - inside.start_bytes) == (2000, 1200)
    assert reading.end_bytes == reading.start_bytes + 2000 - 4000 - 1000
    assert reading.peak_rss_bytes > 50 * 2**20
    assert new.numel() == 500


def test_meter_is_not_misled_by_blocks_of_an_earlier_reading() -> None:
    with live_bytes():
        kept = torch.zeros(5000)
    del kept
    other = torch.zeros(5000)  # likely at the same address
    with live_bytes() as reading:
        del other
    assert reading.start_bytes is not None
    assert reading.end_bytes == reading.start_bytes - 20_000


def test_meter_says_so_where_a_profiler_runs() -> None:
    with torch.profiler.profile(), live_bytes() as reading:
        torch.zeros(10)
    assert reading.peak_bytes is None
    assert "profiler" in reading.why
    assert reading.peak_rss_bytes > 0
