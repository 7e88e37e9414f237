"""The form of JSON documents: which keys an object has, and of which kind each value is.

A *form* is a function (path, value) → the faults of the value, a sentence each: ``"link.alpha_s is a number from 0 to
1e+30, but got -1"``. Forms are put together of smaller ones::

    form    ::= text | flag | anything | number | positive | whole(least, most) | choice(words) | parsed(parser, name)
              | maybe(form) | listed(form) | table(form) | record(required, optional)

``record`` refuses keys that it does not know, with the one that may be meant. NaN, infinite and huge numbers are no
numbers here, and ``true`` is none either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from math import isfinite
from typing import Any

__all__ = [
    "Form", "anything", "choice", "flag", "limited", "listed", "maybe", "number", "parsed", "positive", "record",
    "shown", "table", "text", "whole",
]  # fmt: skip

Form = Callable[[str, Any], Iterator[str]]

HUGE = 1e30  # nothing that is measured or counted here comes near it
MOST_FAULTS = 4  # that ``shown`` spells out


def _got(value: Any) -> str:
    words = repr(value)
    return words if len(words) < 60 else words[:57] + "..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def anything(path: str, value: Any) -> Iterator[str]:
    """Any JSON value."""
    return iter(())


def text(path: str, value: Any) -> Iterator[str]:
    """A string."""
    if not isinstance(value, str):
        yield f"{path} is a text, but got {_got(value)}"


def flag(path: str, value: Any) -> Iterator[str]:
    """True or false."""
    if not isinstance(value, bool):
        yield f"{path} is true or false, but got {_got(value)}"


def limited(most: float, least: float = 0.0, *, open: bool = False) -> Form:
    """A finite number from ``least`` (``open``: above it) to ``most``."""

    def form(path: str, value: Any) -> Iterator[str]:
        inside = _is_number(value) and (isinstance(value, int) or isfinite(value)) and least <= value <= most
        if not inside or (open and value == least):
            words = f"above {least:g}, at most {most:g}" if open else f"from {least:g} to {most:g}"
            yield f"{path} is a number {words}, but got {_got(value)}"

    return form


number = limited(HUGE)
positive = limited(HUGE, open=True)


def whole(least: int = 0, most: int = 2**63) -> Form:
    """A whole number from ``least`` to ``most``."""

    def form(path: str, value: Any) -> Iterator[str]:
        if not (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most):
            yield f"{path} is a whole number from {least} to {most:,}, but got {_got(value)}"

    return form


def choice(*words: str) -> Form:
    """One of these texts."""

    def form(path: str, value: Any) -> Iterator[str]:
        if value not in words:
            yield f"{path} is one of {', '.join(words)}, but got {_got(value)}"

    return form


def parsed(parse: Callable[[str], Any], name: str) -> Form:
    """A text that ``parse`` reads without a ValueError; ``name`` says what it is."""
    known: dict[str, str] = {}  # a document repeats a few of them thousands of times

    def form(path: str, value: Any) -> Iterator[str]:
        if not isinstance(value, str):
            yield f"{path} is {name}, but got {_got(value)}"
            return
        if value not in known:
            try:
                parse(value)
                fault = ""
            except ValueError as error:
                fault = str(error)
            if len(known) < 1000:
                known[value] = fault
        else:
            fault = known[value]
        if fault:
            yield f"{path} is {name}, but got {_got(value)}: {fault}"

    return form


def maybe(form: Form) -> Form:
    """``form``, or null."""
    return lambda path, value: iter(()) if value is None else form(path, value)


def listed(form: Form, sizes: tuple[int, ...] = ()) -> Form:
    """A list of values of a form; of one of these sizes, if any is given."""

    def check(path: str, value: Any) -> Iterator[str]:
        if not isinstance(value, list | tuple):
            yield f"{path} is a list, but got {_got(value)}"
            return
        if sizes and len(value) not in sizes:
            yield f"{path} is a list of {' or '.join(map(str, sizes))}, but got {len(value)} values"
        for index, one in enumerate(value):
            yield from form(f"{path}[{index}]", one)

    return check


def table(form: Form) -> Form:
    """An object with any keys, whose values have one form."""

    def check(path: str, value: Any) -> Iterator[str]:
        if not isinstance(value, Mapping):
            yield f"{path} is an object, but got {_got(value)}"
            return
        for key, one in value.items():
            yield from form(f"{path}.{key}" if path else str(key), one)

    return check


def record(required: Mapping[str, Form], optional: Mapping[str, Form] | None = None) -> Form:
    """An object with all ``required`` keys, any of the ``optional`` ones, and no others."""
    known = {**required, **(optional or {})}

    def check(path: str, value: Any) -> Iterator[str]:
        if not isinstance(value, Mapping):
            yield f"{path or 'the document'} is an object, but got {_got(value)}"
            return
        where = f"{path} " if path else ""
        if missing := [key for key in required if key not in value]:
            yield f"{where}lacks {', '.join(map(repr, missing))}"
        for key in value:
            if key not in known:
                close = get_close_matches(str(key), known, 1)
                meant = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
                yield f"{where}has an unknown key {key!r} ({meant})"
        for key, form in known.items():
            if key in value:
                yield from form(f"{path}.{key}" if path else key, value[key])

    return check


def shown(faults: Iterator[str]) -> str:
    """The first faults as one line, and whether there are more; "" for none."""
    found = [fault for fault, _ in zip(faults, range(MOST_FAULTS + 1))]
    more = "; and more" if len(found) > MOST_FAULTS else ""
    return "; ".join(found[:MOST_FAULTS]) + more
