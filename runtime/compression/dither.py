"""Random numbers that cost next to nothing: a scrambled grid, read from a place that the counters decide.

``random_key(seed, step, rank, …)`` mixes integers to 64 bits (the finalizer of SplitMix64: Steele, Lea, Flood 2014,
figure 16), so that the same counters give the same number on every machine. ``uniforms(key, n)`` is n ≤ ``TILE``
consecutive values of a fixed table from the place key mod L on. The table has each of the L = 2²⁰ values (k + ½)/L
once, in scrambled order.

What holds. Over keys, each single value is uniform on that grid: stochastic rounding floor(v + u) has the expectation
v up to 1/(2L) of a level, whatever v, with its true variance. Over keys too, values of one tile at a given distance
are correlated by no more than the table's autocorrelation (about 1/√L). What does not: the values of a tile are no
independent sample; they are one of L.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ...costmodel.codecs import TILE

__all__ = ["GRID", "grid_tile", "random_key", "uniforms"]

GRID = 2**20
_MASK = 2**64 - 1


def random_key(*counters: int) -> int:
    """64 bits that depend on every counter and on their order."""
    state = 0x9E3779B97F4A7C15
    for counter in counters:
        state = (state ^ (counter & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def uniforms(key: int, n: int, device: torch.device) -> torch.Tensor:
    """n values in (0, 1), fp32, to be read only."""
    return grid_tile(key % GRID, n, device)


def grid_tile(place: int, n: int, device: torch.device) -> torch.Tensor:
    """n values of the table from ``place`` on."""
    assert n <= TILE, n
    return _table(device)[place : place + n]


@lru_cache(maxsize=8)
def _table(device: torch.device) -> torch.Tensor:
    """The scrambled grid, its beginning repeated at its end. Every step of the scrambling is a bijection of 20 bits."""
    k = torch.arange(GRID)
    for factor, shift in ((0x6C8E9, 11), (0xD3A35, 7), (0x9E3B5, 12), (0x5851F, 10)):
        k = (k * factor + 0x3C6EF) % GRID
        k ^= k >> shift
    table = (k.to(torch.float64) + 0.5) / GRID
    return torch.cat([table, table[:TILE]]).to(torch.float32).to(device)
