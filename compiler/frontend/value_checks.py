"""Checks of values that only raise are left out of a capture: ``if labels.max() >= size: raise …``, or
``assert x.isfinite().all()``.

A trace cannot follow a branch on a tensor's value. Where the branch does nothing but raise, the code goes on as if the
value were fine. While ``ValueChecks`` is active, ``bool`` of a tensor without data is what lets it pass, in the test of
an ``if`` whose body is one ``raise`` and that has no ``else``, and in that of an ``assert``. ``lines``: their places,
for the plan's notes.
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .source_errors import short_path

__all__ = ["ValueChecks"]

_Range = tuple[int, int, int, int]  # first and last line, first and last column


class ValueChecks:
    """The context of a capture in which checks of values pass."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}

    def __enter__(self) -> ValueChecks:
        original, self.own = Tensor.__bool__, vars(Tensor).get("__bool__")

        def decided(x: Tensor) -> bool:
            frame = sys._getframe(1)
            passes = _value_that_passes(frame) if isinstance(x, FakeTensor) and x.numel() == 1 else None
            if passes is None:
                return original(x)
            self.lines[f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"] = None
            return passes

        Tensor.__bool__ = decided  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        if self.own is None:
            del Tensor.__bool__
        else:
            Tensor.__bool__ = self.own  # type: ignore[method-assign]

    @property
    def notes(self) -> tuple[str, ...]:
        """One note on all of them, if there are any."""
        if not self.lines:
            return ()
        return (f"checks of values that only raise are left out: {', '.join(self.lines)}",)


def _value_that_passes(frame: FrameType) -> bool | None:
    """The truth of the operand that this frame tests now by which its check passes; None if that is no check."""
    # of the instruction that made the operand: the place of a jump behind ``not`` is another operand's
    at = list(frame.f_code.co_positions())[frame.f_lasti // 2 - 1]
    if None in at:
        return None
    place: Any = at[0], at[1], at[2], at[3]
    for test, passes in _checks(frame.f_code.co_filename):
        found = _truth(test, passes, place) if _holds(test, place) else None
        if found is not None:
            return found
    return None


@lru_cache(maxsize=64)
def _checks(filename: str) -> list[tuple[ast.expr, bool]]:
    """(test, whether it passes where it is true) of all checks in a file."""
    try:
        tree = ast.parse(Path(filename).read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []
    checks = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            checks.append((node.test, True))
        elif isinstance(node, ast.If) and not node.orelse and [type(x) for x in node.body] == [ast.Raise]:
            checks.append((node.test, False))
    return checks


def _truth(node: ast.expr, passes: bool, place: _Range) -> bool | None:
    """The truth of the operand of this test at ``place`` that makes the test ``passes``."""
    if isinstance(node, ast.BoolOp):
        inside = next((value for value in node.values if _holds(value, place)), None)
        return None if inside is None else _truth(inside, passes, place)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _truth(node.operand, not passes, place) if _holds(node.operand, place) else None
    return passes if _range(node) == place else None


def _range(node: ast.expr) -> _Range:
    return node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0


def _holds(node: ast.expr, place: _Range) -> bool:
    (top, bottom, left, right), (first, last, start, end) = _range(node), place
    return (top, left) <= (first, start) and (last, end) <= (bottom, right)
