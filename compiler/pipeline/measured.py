"""A measured step: when every rank did every action, on one clock. ``runtime`` makes it, reports draw it.

Grammar of the document::

    trace  ::= {"version": 1, "model", "step_s", "ranks": [rank]}
    rank   ::= {"rank", "stage", "peak_bytes", "spans": [span]}       stage: null where the rank is idle
    span   ::= [name, start_s, end_s, wait_s, exchange_s, repeat_s, send_s]

A span is an action, named as in a schedule ("F0", "B3", "I3c1"), or a part of the end of the step ("gradient", "drain",
"loss", "tied", "optimizer", "gather"). ``wait_s`` lies before ``start_s``: the action waited for messages so long. The
other three are parts of the span: collectives, what a backward runs once more, starting messages. Second 0 is when the
first rank began.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...costmodel.files import parse_json, read_document
from ...costmodel.forms import limited, listed, maybe, number, record, shown, text, whole

__all__ = ["MeasuredStep", "RankSpans", "Span"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class Span:
    """One action, or a part of the end of the step."""

    name: str
    start_s: float
    end_s: float
    wait_s: float = 0.0
    exchange_s: float = 0.0
    repeat_s: float = 0.0
    send_s: float = 0.0


@dataclass(frozen=True)
class RankSpans:
    """The spans of one rank, in order."""

    rank: int
    #: None if the rank is idle
    stage: int | None
    spans: tuple[Span, ...]
    #: the most memory that its process or device has held
    peak_bytes: int = 0


def _span(path: str, value: Any) -> Iterator[str]:
    if not isinstance(value, list) or len(value) != 7:
        yield f"{path} is a list of a name and six times, but got {str(value)[:60]}"
        return
    yield from text(f"{path}[0]", value[0])
    yield from listed(limited(1e12, -1e12))(f"{path}[1:]", value[1:])


_RANK = record({"rank": whole(), "stage": maybe(whole()), "peak_bytes": whole(), "spans": listed(_span)})
_TRACE = record({"version": whole(), "model": text, "step_s": number, "ranks": listed(_RANK)})


@dataclass(frozen=True)
class MeasuredStep:
    """One step of all ranks."""

    #: the fingerprint of the graph, as in the plan
    model: str
    step_s: float
    ranks: tuple[RankSpans, ...]

    @classmethod
    def of(cls, model: str, ranks: Sequence[RankSpans]) -> MeasuredStep:
        """The step with second 0 where the first rank began."""
        starts = [span.start_s - span.wait_s for rank in ranks for span in rank.spans]
        zero = min(starts, default=0.0)
        moved = tuple(
            RankSpans(
                rank.rank,
                rank.stage,
                tuple(
                    Span(s.name, s.start_s - zero, s.end_s - zero, s.wait_s, s.exchange_s, s.repeat_s, s.send_s)
                    for s in rank.spans
                ),
                rank.peak_bytes,
            )
            for rank in ranks
        )
        return cls(model, max((span.end_s for rank in moved for span in rank.spans), default=0.0), moved)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        ranks = [
            {
                "rank": rank.rank,
                "stage": rank.stage,
                "peak_bytes": rank.peak_bytes,
                "spans": [list(asdict(span).values()) for span in rank.spans],
            }
            for rank in self.ranks
        ]
        return {"version": VERSION, "model": self.model, "step_s": self.step_s, "ranks": ranks}

    @classmethod
    def from_json(cls, data: Any) -> MeasuredStep:
        """The inverse of ``to_json``; ValueError that says what is wrong with the document."""
        if not isinstance(data, Mapping) or data.get("version") != VERSION:
            raise ValueError(
                f"a trace is a JSON object of version {VERSION}, as Parallel.trace writes it, but got another "
                "document; measure again"
            )
        if faults := shown(_TRACE("", data)):
            raise ValueError(f"the trace does not follow its format: {faults}; measure again")
        return cls(
            data["model"],
            data["step_s"],
            tuple(
                RankSpans(rank["rank"], rank["stage"], tuple(Span(*span) for span in rank["spans"]), rank["peak_bytes"])
                for rank in data["ranks"]
            ),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MeasuredStep:
        """Read a document that ``Parallel.trace`` wrote. Raises ValueError that names the file and the fault."""
        return read_document(path, lambda text: cls.from_json(parse_json(text, "trace")))
