"""The form of a cluster document: its keys and the kinds of their values. What the numbers must be among each other,
and most of their signs, the values themselves check (``hardware``, ``measured``, ``curves``), in words of their own."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isnan
from typing import Any

import torch

from .forms import HUGE, anything, choice, limited, listed, number, record, table, text, whole

__all__ = ["cluster_faults"]

MOST_DEVICES = 10**7  # of a host, and hosts of a kind
_MODES = ("tfloat32",)  # of computing, that are no dtypes of tensors


def _real(path: str, value: Any) -> Iterator[str]:
    """A number whose sign and finiteness the value that it becomes will check."""
    whatever = isinstance(value, float) and (isnan(value) or value in (inf, -inf))
    if not whatever:
        yield from limited(HUGE, -HUGE)(path, value)


def _dtype(path: str, value: Any) -> Iterator[str]:
    known = isinstance(value, str) and (value in _MODES or isinstance(getattr(torch, value, None), torch.dtype))
    if not known:
        yield f"{path} is the name of a torch dtype, but got {value!r}"


def _pairs(name: Any, value: Any) -> Any:
    """A list of (name, value), as an object is written that stays in order."""

    def check(path: str, rows: Any) -> Iterator[str]:
        yield from listed(listed(anything, (2,)))(path, rows)
        if isinstance(rows, list):
            for index, row in enumerate(rows):
                if isinstance(row, list) and len(row) == 2:
                    yield from name(f"{path}[{index}][0]", row[0])
                    yield from value(f"{path}[{index}][1]", row[1])

    return check


_POINTS = listed(listed(_real, (2,)))
_LINK = record(
    {"name": text, "alpha_s": _real, "bytes_per_s": _real, "source": text},
    {"pair_bytes_per_s": _real, "message_s": _real, "call_s": _real},
)
_CURVE = record({"kind": text, "dtype": text, "variable": text, "points": _POINTS}, {"direction": text})
_SURFACE = record(
    {"kind": text, "dtype": text, **dict.fromkeys(("rows", "inner", "cols", "seconds"), listed(_real))},
    {"direction": text},
)
_OP_TIME = record(
    {"signature": text, "forward_s": _real, "backward_input_s": _real, "backward_weight_s": _real, "samples": whole()}
)
_RATE = {"name": text, "alpha_s": _real, "residual": number, "samples": whole()}
_DEVICE = record(
    {
        "name": text, "memory_bytes": _real, "flops_per_s": _pairs(_dtype, _real), "memory_bytes_per_s": _real,
        "launch_s": _real, "source": text,
    },
    {
        "kind": choice("cuda", "cpu"), "efficiency": _pairs(text, limited(1.0, open=True)),
        **dict.fromkeys(("view_s", "overlap", "action_s", "post_s", "post_s_per_byte"), _real),
        "curves": listed(_CURVE), "surfaces": listed(_SURFACE), "op_times": listed(_OP_TIME),
        "optimizers": listed(record({**_RATE, "beta_s_per_byte": _real}, {"dtype": _dtype})),
        "codings": listed(record({**_RATE, "beta_s_per_element": _real})),
    },
)  # fmt: skip
_WIRE = record({
    "kind": text, "algorithm": text, "size": whole(1), "members": whole(1), "groups": whole(1), "points": _POINTS,
    "pieces": listed(record(dict.fromkeys(("from_bytes", "alpha_s", "beta_s_per_byte"), _real))),
    "residual": number, "samples": whole(),
})  # fmt: skip
_HOST = record(
    {"count": whole(1, MOST_DEVICES), "device": _DEVICE, "num_devices": whole(1, MOST_DEVICES), "link": _LINK,
     "link_kind": text}
)  # fmt: skip
_CLUSTER = record(
    {
        "format": text, "schema": whole(1), "name": text, "backend": text, "oversubscription": _real,
        "link_kind": text, "link": _LINK, "hosts": listed(_HOST),
    },
    {"wires": listed(_WIRE), "provenance": table(text)},
)  # fmt: skip


def cluster_faults(document: Any) -> Iterator[str]:
    """The faults in the form of a cluster document, a sentence each, named by their place in it."""
    yield from _CLUSTER("", document)
    hosts = document.get("hosts") if isinstance(document, dict) else None
    if isinstance(hosts, list):
        sizes = [(h.get("count"), h.get("num_devices")) for h in hosts if isinstance(h, dict)]
        total = sum(a * b for a, b in sizes if type(a) is int and type(b) is int)
        if total > MOST_DEVICES:
            yield f"hosts have at most {MOST_DEVICES:,} devices together, but got {total:,}"
