"""Codes by their names in ``costmodel.codecs.CODECS``: the family of a description says which class makes the sum.

To add a code of a known family, add a line to that table. To add a family, add its class here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...costmodel.codecs import CODECS, Codec, Dense, Entries, LowRankFactors, QuantizationLevels
from ..collectives.protocol import Submit
from ..collectives.worker import submit
from .atomo import SampledEntries, SampledTriplets
from .exchange import Exchange, GroupExchange
from .gathered import GatheredCodec, GatheredSum
from .levels import StochasticLevels
from .linear import Half, LinearCodec, LinearSum, Plain, RandomK
from .powersgd import PowerSGD
from .signs import ErrorFeedbackSign, MajoritySign, OneBit
from .sparse import DeepGradient, DeepGradientSum, Threshold, TopK
from .summing import BucketSpec, CompressedSum
from .two_step import BlockCodec, TwoStepSum

__all__ = ["FAMILIES", "block_family", "make_sum"]

Family = Callable[..., CompressedSum]
_P = TypeVar("_P")


def make_sum(
    name: str,
    bucket: BucketSpec | int,
    group: dist.ProcessGroup | Exchange | None = None,
    *,
    submit: Submit = submit,
    **options: Any,
) -> CompressedSum:
    """The sum of flat gradients over a group in the code of this name; made on every rank of the group alike.

    bucket: the tensors that are summed; a number n stands for one fp32 vector [n]. Most biased codes look at the shapes
    of the tensors in it: give them. group: a process group that nothing else sends over, an ``Exchange``, or None for
    one rank alone. options: ``momentum`` (0.9), ``clip_norm`` (None) and ``warmup_steps`` (0) of dgc; ``ranks`` of
    powersgd, one per shape.
    Raises ValueError for an unknown name or option, and for other dtypes than fp32 and bf16.
    """
    if name not in CODECS:
        raise ValueError(f"codes are {', '.join(CODECS)}, but got {name!r}; use one of these or add it to CODECS")
    codec = CODECS[name]
    exchange = GroupExchange(group) if group is None or isinstance(group, dist.ProcessGroup) else group
    spec = BucketSpec(bucket) if isinstance(bucket, int) else bucket
    known = {"dgc": {"momentum", "clip_norm", "warmup_steps"}, "powersgd": {"ranks"}}.get(codec.family, set())
    if options.keys() - known:
        raise ValueError(f"options of {name} are {sorted(known)}, but got {sorted(options)}; leave the others out")
    return FAMILIES[codec.family](codec, spec, exchange, submit, **options)


def _payload(codec: Codec, kind: type[_P]) -> _P:
    assert isinstance(codec.payload, kind), codec
    return codec.payload


def block_family(make: Callable[[QuantizationLevels, torch.device], BlockCodec]) -> Family:
    """The family of a ``BlockCodec``."""

    def family(codec: Codec, bucket: BucketSpec, exchange: Exchange, submit: Submit) -> CompressedSum:
        return TwoStepSum(
            codec.name, bucket, exchange, submit, make(_payload(codec, QuantizationLevels), bucket.device)
        )

    return family


def _linear(make: Callable[[Codec, int, BucketSpec, int], LinearCodec]) -> Family:
    def family(codec: Codec, bucket: BucketSpec, exchange: Exchange, submit: Submit) -> CompressedSum:
        return LinearSum(codec.name, bucket, exchange, submit, lambda low, high, i: make(codec, high - low, bucket, i))

    return family


def _sparse(make: Callable[[int, BucketSpec, Entries, int], GatheredCodec]) -> Family:
    def family(codec: Codec, bucket: BucketSpec, exchange: Exchange, submit: Submit) -> CompressedSum:
        payload = _payload(codec, Entries)
        return GatheredSum(
            codec.name, bucket, exchange, submit, lambda low, high, i: make(high - low, bucket, payload, low)
        )

    return family


def _half(dtype: torch.dtype) -> Family:
    def make(codec: Codec, n: int, bucket: BucketSpec, index: int) -> LinearCodec:
        assert _payload(codec, Dense).itemsize == dtype.itemsize
        return Half(n, bucket, dtype)

    return _linear(make)


def _powersgd(
    codec: Codec, bucket: BucketSpec, exchange: Exchange, submit: Submit, ranks: Sequence[int] | None = None
) -> CompressedSum:
    payload = _payload(codec, LowRankFactors)
    return LinearSum(
        codec.name, bucket, exchange, submit, lambda low, high, i: PowerSGD(bucket, payload, ranks), max(bucket.n, 1)
    )


def _spectral(codec: Codec, bucket: BucketSpec, exchange: Exchange, submit: Submit) -> CompressedSum:
    payload = _payload(codec, LowRankFactors)
    return GatheredSum(
        codec.name, bucket, exchange, submit, lambda low, high, i: SampledTriplets(bucket, payload), max(bucket.n, 1)
    )


def _deep_gradient(
    codec: Codec,
    bucket: BucketSpec,
    exchange: Exchange,
    submit: Submit,
    momentum: float = 0.9,
    clip_norm: float | None = None,
    warmup_steps: int = 0,
) -> CompressedSum:
    payload = _payload(codec, Entries)
    total = DeepGradientSum(
        codec.name,
        bucket,
        exchange,
        submit,
        lambda low, high, i: DeepGradient(high - low, bucket, payload, low, momentum, warmup_steps),
    )
    total.clip_norm = clip_norm
    return total


FAMILIES: dict[str, Family] = {
    "none": _linear(lambda codec, n, bucket, i: Plain()),
    "bf16": _half(torch.bfloat16),
    "fp16": _half(torch.float16),
    "int": block_family(StochasticLevels),
    "1bit": block_family(OneBit),
    "ef-signsgd": block_family(ErrorFeedbackSign),
    "signsgd": block_family(MajoritySign),
    "randomk": _linear(lambda codec, n, bucket, i: RandomK(n, bucket, codec, i)),
    "powersgd": _powersgd,
    "topk": _sparse(TopK),
    "dgc": _deep_gradient,
    "threshold": _sparse(lambda n, bucket, payload, start: Threshold(n, bucket, payload, start, 10.0)),
    "atomo": _sparse(SampledEntries),
    "atomo-svd": _spectral,
}
