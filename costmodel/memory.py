"""Bytes that a parameter costs while it is trained: itself, its gradient, and what the optimizer keeps for it; and
fixed overheads.

Mixed precision is the 2 + 2 + 12 bytes per element of fp16 Adam: half-precision weight and gradient, and in fp32 the
master weight beside the optimizer's own state tensors (Rajbhandari et al. 2020, section 3.1). Where gradients are kept
and summed in fp32 (``summed``), they are 2 + 4 + 12. The optimizers of torch keep no masters: of a 16-bit weight they
keep 16-bit states, 2 + 2 + 4. ``AdamW+masters`` is one that does.

Bytes that a compressed sum of n elements over p devices keeps from step to step, on each of them.

State, which checkpoints hold, all of it fp32; in two steps of the part m (``QuantizationLevels.part``), too, that a
device sums::

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
from dataclasses import dataclass
from math import ceil

import torch

from .cluster import Cluster
from .codecs import CHUNK, TILE, Codec, Dense, Entries, LowRankFactors, QuantizationLevels
from .measured import FUSED, MASTERS

__all__ = [
    "FRAMEWORK_BYTES", "OPTIMIZER_STATE", "ParameterBytes", "drawn_bytes", "held_bytes",
    "parameter_bytes", "state_bytes", "state_tensors", "updated_itemsize", "usable_bytes",
]  # fmt: skip


#: state tensors of the parameter's own size that each torch optimizer keeps with its default arguments
OPTIMIZER_STATE: dict[str, int] = {
    "none": 0,
    "SGD": 0,
    "SGD+momentum": 1,
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Rprop": 2,
    "ASGD": 1,
    "Adagrad": 1,
    "RMSprop": 1,
    "Muon": 1,
    "SparseAdam": 2,
}

#: bytes that a process holds besides its tensors, by device kind
FRAMEWORK_BYTES: dict[str, int] = {
    "cuda": 800 * 2**20,  # assumed: context, cuBLAS workspaces and NCCL buffers, 0.5 to 1 GiB as commonly published
    # measured: resident set after the first step of a two-layer perceptron over Gloo, planned in the same process (2
    # ranks, torch 2.13, one thread, weights under 1 MiB): 222 MiB imports, 140 capture and planning, 8 the step
    "cpu": 370 * 2**20,
}


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of one parameter by cause. ``assumed``: why a number was assumed, "" if none was; say it in the plan."""

    parameter: int
    gradient: int
    optimizer_state: int
    assumed: str = ""

    @property
    def total(self) -> int:
        """The sum of the three."""
        return self.parameter + self.gradient + self.optimizer_state


def state_tensors(optimizer: str) -> tuple[int, str]:
    """(state tensors per parameter, what was assumed) for a torch.optim class name; an unknown optimizer is taken to
    keep two, aloud. Masters are not among them."""
    known = {name.lower(): count for name, count in OPTIMIZER_STATE.items()}
    name = optimizer.removesuffix(MASTERS).removesuffix(FUSED).lower()
    if name in known:
        return known[name], ""
    return 2, f"the state of optimizer {optimizer!r} is not known: two tensors per parameter are assumed, as for Adam"


def parameter_bytes(
    numel: int,
    dtype: torch.dtype,
    optimizer: str | float = "AdamW",
    mixed_precision: bool = False,
    summed: torch.dtype | None = None,
) -> ParameterBytes:
    """Bytes of a trained parameter of ``numel`` elements whose weight and gradient are ``dtype``, but the gradient
    ``summed`` if that is given.

    optimizer: a class name of ``OPTIMIZER_STATE``, or the number of state tensors (a fraction for factored states).
    Without mixed precision the states have the parameter's dtype; with it, or with ``MASTERS``, they are fp32 and a
    fp32 master weight joins them (where the weight is not fp32 already). Raises ValueError on a negative size or count.
    """
    count, assumed = state_tensors(optimizer) if isinstance(optimizer, str) else (optimizer, "")
    if numel < 0 or count < 0:
        raise ValueError(f"sizes and state counts are never negative, but got {numel} and {count}; check the parameter")
    weight, gradient = numel * dtype.itemsize, numel * (summed or dtype).itemsize
    if not mixed_precision and not (isinstance(optimizer, str) and optimizer.endswith(MASTERS)):
        return ParameterBytes(weight, gradient, round(count * weight), assumed)
    master = numel * 4 if dtype.itemsize < 4 else 0
    return ParameterBytes(weight, gradient, round(count * numel * max(4, dtype.itemsize)) + master, assumed)


def updated_itemsize(dtype: torch.dtype, optimizer: str, mixed: bool) -> int:
    """Bytes of an element of the tensor that the optimizer updates: the weight of ``dtype``, or its fp32 master."""
    return 4 if dtype.itemsize == 2 and (mixed or optimizer.endswith(MASTERS)) else dtype.itemsize


_TABLE = 4 * (2**20 + TILE)


def state_bytes(codec: Codec, n: int, group: int, shapes: Sequence[Sequence[int]] = ()) -> int:
    """Of what ``state_dict`` gives, without its count of steps. shapes: as ``sent_bytes`` has them."""
    payload, residuals = codec.payload, codec.residuals
    if isinstance(payload, QuantizationLevels):
        return sum(4 * residuals * (chunk + payload.part(chunk, group)) for chunk in _chunks(n))
    warm = 0
    if isinstance(payload, LowRankFactors) and codec.pattern == "all_reduce":
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
    if isinstance(payload, LowRankFactors) and codec.pattern == "all_reduce":
        sizes = payload.sizes(shapes or [(n,)])
        return held + 4 * sum(payload.rank * r if payload.pays(r, c) else r * c for r, c in sizes)
    if isinstance(payload, QuantizationLevels):
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


def usable_bytes(cluster: Cluster) -> list[float]:
    """Usable bytes per device: its memory less what the framework itself takes."""
    return [
        host.device.memory_bytes - FRAMEWORK_BYTES[host.device.kind]
        for host in cluster.hosts
        for _ in range(host.num_devices)
    ]
