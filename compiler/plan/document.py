"""A plan's document: its form, and the seal that ties its prices to its decisions.

*Form.* ``document_faults`` names what is missing, unknown, of another type, negative or not finite, by its place.

*Seal.* Two digests are made when a plan is priced: of its decisions (all that a price depends on) and of its prices.
Notes, provenance and the outline of the model are in neither. Where the first does not fit the document the decisions
were edited, and the prices are of another plan; where the second does not, somebody wrote other prices. Documents
without a seal are older: theirs is made when they are loaded, and ``known`` is false, since it cannot tell what was
edited before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...costmodel.forms import (
    anything,
    choice,
    flag,
    listed,
    maybe,
    number,
    parsed,
    positive,
    record,
    table,
    text,
    whole,
)  # fmt: skip
from ..ir.precision import PRECISIONS
from ..ir.spec import parse_pair, parse_spec

__all__ = ["Seal", "document_faults", "sealed"]


# ---- the form


_SPEC, _PAIR = parsed(parse_spec, "a spec"), parsed(parse_pair, "a pair of specs")
_FREQUENCY = choice("step", "microbatch")
_SHARDING = record({
    "compute": _PAIR, "stored": _SPEC, "gradient": _SPEC, "optimizer": _SPEC, "gather": _FREQUENCY,
    "reduce": _FREQUENCY,
})  # fmt: skip
_CHUNK = record({
    "layers": listed(whole(), (2,)), "recompute": listed(text), "ops": table(text), "parameters": table(_SHARDING),
    "sources": table(_PAIR), "receives": table(_PAIR), "sends": table(_SPEC),
})  # fmt: skip
_WIRE = record({"axes": listed(whole())}, {"algorithm": text, "compressor": text, "bytes": number})
_STAGE = record(
    {"devices": listed(whole()), "mesh_shape": listed(whole(1)), "chunks": listed(_CHUNK), "wire": listed(_WIRE)}
)
_TRANSFER = record(
    {"node": text, "source": whole(), "target": whole()},
    {"forward_s": number, "backward_s": number, "source_chunk": whole(), "target_chunk": whole()},
)
_STAGE_PRICES = record(
    {
        "forward_s": number, "backward_s": number, "step_s": number, "seconds": table(number),
        "memory_bytes": table(number), "collectives": table(whole()),
    },
    {"chunk_s": listed(listed(number, (3,)))},
)  # fmt: skip
_ALTERNATIVE = record({"name": text}, {"step_s": maybe(positive), "microbatches": maybe(whole(1)), "why": text})
_PREDICTION = record(
    {
        "step_s": number, "bound_s": number, "stages": listed(_STAGE_PRICES), "flops": number,
        "replicated_flops": number,
    },
    {"alternatives": listed(_ALTERNATIVE), "notes": listed(text), "sources": table(number)},
)  # fmt: skip
_SEAL = record({"decisions": text, "prices": text, "known": flag})
_PROVENANCE = {
    "meshwright": text, "torch": text, "passes": table(number), "cluster": text, "constraints": listed(text),
    "clocks": listed(listed(number, (2,))), "target": text,
}  # fmt: skip
_PLAN = record(
    {
        "version": anything, "model": text, "model_ops": table(whole(1)), "cluster": table(anything),
        "global_batch": whole(1), "microbatches": whole(1), "schedule": text, "optimizer": text,
        "precision": choice("model", *PRECISIONS), "codes": table(text), "layers": listed(text),
        "stages": listed(_STAGE), "transfers": listed(_TRANSFER), "prediction": _PREDICTION,
        "provenance": table(anything),
    },
    {"outline": table(anything), "seal": _SEAL},
)  # fmt: skip


def document_faults(document: Any) -> Iterator[str]:
    """The faults in the form of a plan's document of version 2, a sentence each."""
    yield from _PLAN("", document)
    provenance = document.get("provenance") if isinstance(document, Mapping) else None
    if isinstance(provenance, Mapping):  # anybody may add to it
        for name, form in _PROVENANCE.items():
            if name in provenance:
                yield from form(f"provenance.{name}", provenance[name])
        strategy = provenance.get("strategy")
        if (
            not isinstance(strategy, str | None)
            and any(table(text)("", strategy))
            and any(table(whole())("", strategy))
        ):
            yield f"provenance.strategy is a strategy, but got {strategy!r}"


# ---- the seal


@dataclass(frozen=True)
class Seal:
    """Digests of the decisions and of the prices, made together; ``known``: when the plan was priced."""

    decisions: str
    prices: str
    known: bool = True


def sealed(document: Mapping[str, Any], known: bool = True) -> Seal:
    """The seal of a document as it stands."""
    messages = ("forward_s", "backward_s")
    transfers = document["transfers"]
    prediction = {name: value for name, value in document["prediction"].items() if name != "notes"}
    prices = [prediction, [[one.get(name, 0.0) for name in messages] for one in transfers]]
    others = ("version", "prediction", "provenance", "transfers", "outline", "seal")
    decisions = [
        {name: value for name, value in document.items() if name not in others},
        [{name: value for name, value in one.items() if name not in messages} for one in transfers],
    ]
    return Seal(_digest(decisions), _digest(prices), known)


def _digest(value: Any) -> str:
    """16 hex digits that do not depend on the order of keys, nor on whether a number is written 1 or 1.0."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
