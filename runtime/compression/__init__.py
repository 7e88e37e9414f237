"""Compressed sums of gradients: codecs, the patterns that they travel in, and what they owe to later steps.

``make_sum(name, n, group)`` gives the sum of flat buckets of n elements in a code of ``costmodel.codecs.CODECS``, with
the interface of ``runtime.collectives.protocol.Sum``.
"""

from ..errors import NonFiniteGradient
from .exchange import Exchange, GroupExchange, Rehearsal
from .registry import FAMILIES, make_sum
from .summing import BucketSpec, CompressedSum

__all__ = [
    "FAMILIES",
    "BucketSpec",
    "CompressedSum",
    "Exchange",
    "GroupExchange",
    "NonFiniteGradient",
    "Rehearsal",
    "make_sum",
]
