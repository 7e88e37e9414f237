"""Which gradients travel together: the flat pieces in which partial gradients are summed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["FIRST_BUCKET_BYTES", "gradient_buckets"]

FIRST_BUCKET_BYTES = 2**20  # small, so that the wire starts early


def gradient_buckets(parameters: Sequence[tuple[Hashable | None, float]], bucket_bytes: int) -> list[list[int]]:
    """Positions of parameters in buckets of about ``bucket_bytes``, the last used first.

    parameters: (key, bytes) in program order; only equal keys (axes and dtype) share a bucket, None has none.
    """
    done: list[list[int]] = []
    openings: dict[Hashable, tuple[list[int], float, int]] = {}
    for position, (key, size) in reversed(list(enumerate(parameters))):
        if key is None:
            continue
        bucket, filled, limit = openings.get(key) or ([], 0.0, min(FIRST_BUCKET_BYTES, bucket_bytes))
        if bucket and filled + size > limit:
            done.append(bucket)
            bucket, filled, limit = [], 0.0, bucket_bytes
        bucket.append(position)
        openings[key] = (bucket, filled + size, limit)
    return done + [bucket for bucket, _, _ in openings.values()]
