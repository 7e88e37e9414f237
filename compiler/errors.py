"""The exceptions of the compiler::

ValueError
├── CaptureError         frontend: the model cannot be captured
│   └── OpaqueError      frontend: a module cannot be one op
├── InfeasibleError      search: no plan fits
│   └── OverfullError    search: a plan fits by its tables, but its stages do not
├── ScheduleError        pipeline: a schedule that cannot be run
└── StageError           memory: a stage of a plan whose program fails
RuntimeError
└── UnlikeError          verification: devices asked for unlike collectives
Exception                (caught inside of the compiler)
├── UnprovableError      frontend: blocks of a model that cannot be compared
├── UnsoundError         frontend: blocks that cannot be copied after all
├── HiddenError          frontend: something read a tensor of a hidden block
├── TooWide              intra_op: a problem with too large a treewidth for elimination
└── FailedError          verification: an error on one device
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CaptureError", "FailedError", "HiddenError", "InfeasibleError", "OpaqueError", "OverfullError", "ScheduleError",
    "StageError", "TooWide", "UnlikeError", "UnprovableError", "UnsoundError",
]  # fmt: skip


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message lists what is wrong with it."""


class StageError(ValueError):
    """The program of a stage fails on tensors without data, so that the plan could not train. ``stage``: its number."""

    def __init__(self, stage: int, cause: Exception) -> None:
        why = str(cause).strip().split("\n")[0][:300]
        super().__init__(
            f"the program of each stage must run on tensors without data before a plan is handed out, but got "
            f"{type(cause).__name__}: {why} in stage {stage}; this is a fault of a sharding rule or of an op of the "
            "model: `mw.verify` names the op, and a constraint or strategy= avoids the split"
        )
        self.stage = stage


class CaptureError(ValueError):
    """The model cannot be captured; the message names the line and what to change. module: whose forward that is, where
    only the line is known."""

    module: str = ""


class OpaqueError(CaptureError):
    """The module at ``path`` cannot be one op of the graph."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"one op follows from its arguments and its module's tensors, but got {path!r}: {why}")
        self.path = path


class UnprovableError(Exception):
    """Something that cannot be compared, or that could differ at the next call."""


class UnsoundError(Exception):
    """Blocks that cannot be copied after all: ``kinds`` are to be traced each by itself."""

    def __init__(self, kind: int, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class HiddenError(Exception):
    """Something read a tensor that ``Blocks.hide`` has taken away."""


class TooWide(Exception):  # noqa: N818 — an answer about the problem's shape rather than an error of the caller
    """A table would have more cells than allowed. Solvers catch it, and solve a smaller problem or another way."""


class UnlikeError(RuntimeError):
    """Devices asked for unlike collectives at once; every one of them raises it."""


class InfeasibleError(ValueError):
    """No plan fits: the message names the stage, the bytes missing and what would fit."""


class OverfullError(InfeasibleError):
    """A plan fits by its cost tables, but its stages do not fit in memory.

    beside: (logical shape, level, bytes) of each stage that holds more than its tables said. leaner: ``limits_bytes``
    with which the stages may fit; empty where chunks share a stage.
    """

    def __init__(
        self, text: str, beside: Sequence[tuple[tuple[int, ...], int, float]], leaner: Sequence[float] = ()
    ) -> None:
        super().__init__(text)
        self.beside, self.leaner = tuple(beside), tuple(leaner)


class FailedError(Exception):
    """An error of one device at a node, or (None) in the backward of a chunk."""

    def __init__(self, node: str | None, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}".splitlines()[0])
        self.node = node
