"""The action of this rank: noted by those that do it, and told where a rank stands still."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PROGRESS", "Progress"]

_ACTION = re.compile(r"(\d+)([FBW])(\d+)(?:c(\d+))?")
_KINDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
_SPANS = {
    "drain": "the last messages", "gradient": "the sum of gradients", "loss": "the sum of losses",
    "optimizer": "the update",
}  # fmt: skip


class Progress:
    """The calls that a rank is in, its step, and its last action."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.step: int | None = None
        self.action: object = "the start"
        self.count = 0  # of actions
        self.steps = 0  # that are through
        self.told_why = False  # whether the line was printed that says why this process ends
        self.folder: str | os.PathLike[str] | None = None  # of the run

    def note(self, action: object) -> None:
        """The rank begins this."""
        self.action = action
        self.count += 1

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """The rank is in a call."""
        self.calls.append(name)
        self.count += 1
        try:
            yield
        finally:
            self.calls.pop()
            self.count += 1
            if name in ("train_step", "optimizer_step"):
                self.steps += 1

    def told(self) -> str:
        """The action of this rank, or its last one, in words."""
        action = str(self.action)
        if match := _ACTION.fullmatch(action):
            stage, kind, microbatch, chunk = match.groups()
            part = f", chunk {chunk}" if chunk else ""
            action = f"{_KINDS[kind]} of microbatch {microbatch} on stage {stage}{part}"
        action = _SPANS.get(action, action) + ("" if self.step is None else f" of step {self.step}")
        return f"in {self.calls[-1]}, at {action}" if self.calls else f"in the caller's code, after {action}"


PROGRESS = Progress()  # of this process
