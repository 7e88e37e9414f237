"""Bytes that a compressed sum of n elements over p devices keeps from step to step, on each of them.

State, which checkpoints hold, all of it fp32; in two steps of the part m (``Levels.part``), too, that a device sums::

    two_step     residuals (n + m)            error feedback at both stages
    others       residuals n                  what was not sent yet, and of dgc the velocity
    factors      residuals n + rank Σ c       and the warm start, of the matrices that are factored

Buffers, which it makes once::

    Dense        n elements as they are sent
    Levels       messages to all, from all, of all sums, of my part: (3 p + 1) part_bytes(m); 4 m for the sum of a part
    Entries      4 n of magnitudes, where the largest are looked for
    Factors      the left factors and what is sent dense, where they are summed

Large sums go in chunks of ``CHUNK`` elements, each with its own; but for factors. Codes that draw share one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from .codecs import CHUNK, TILE, Codec, Dense, Entries, Factors, Levels

__all__ = ["drawn_bytes", "held_bytes", "state_bytes"]

_TABLE = 4 * (2**20 + TILE)


def state_bytes(codec: Codec, n: int, group: int, shapes: Sequence[Sequence[int]] = ()) -> int:
    """Of what ``state_dict`` gives, without its count of steps. shapes: as ``sent_bytes`` has them."""
    payload, residuals = codec.payload, codec.residuals
    if isinstance(payload, Levels):
        return sum(4 * residuals * (chunk + payload.part(chunk, group)) for chunk in _chunks(n))
    warm = 0
    if isinstance(payload, Factors) and codec.pattern == "all_reduce":
        warm = sum(payload.rank * c for r, c in payload.sizes(shapes or [(n,)]) if payload.pays(r, c))
    return 4 * (residuals * n + warm)


def held_bytes(codec: Codec, n: int, group: int, shapes: Sequence[Sequence[int]] = ()) -> int:
    """Of state and buffers."""
    payload, held = codec.payload, state_bytes(codec, n, group, shapes)
    if codec.name == "none":
        return 0
    if isinstance(payload, Dense):
        return held + payload.itemsize * n
    if isinstance(payload, Entries):
        spans = sum(ceil(chunk / payload.span) for chunk in _chunks(n))
        return held + (4 * n if codec.residuals else 0) + 8 * spans
    if isinstance(payload, Factors) and codec.pattern == "all_reduce":
        sizes = payload.sizes(shapes or [(n,)])
        return held + 4 * sum(payload.rank * r if payload.pays(r, c) else r * c for r, c in sizes)
    if isinstance(payload, Levels):
        start = widest = 0
        for chunk in _chunks(n):
            part, blocks = payload.part(chunk, group), payload.blocks(payload.tiles(chunk, group, shapes, start))
            held += (3 * group + 1) * payload.part_bytes(part, blocks) + 4 * part
            widest, start = max(widest, min(part, chunk, TILE // payload.block * payload.block)), start + chunk
        digits = ceil(widest / payload.per_byte) * payload.per_byte
        scratch = 0 if codec.family == "int" else max(TILE, payload.block)
        held += 4 * (scratch + widest + 2 * digits)
    return held


def drawn_bytes(codec: Codec) -> int:
    """Of the table of random numbers, once for all sums of a device."""
    return _TABLE if codec.family in ("int", "powersgd") else 0


def _chunks(n: int) -> list[int]:
    return [CHUNK] * (n // CHUNK) + ([n % CHUNK] if n % CHUNK else [])
