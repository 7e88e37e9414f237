"""Exceptions of the runtime::

ValueError
├── NonFiniteLoss        a loss is NaN or infinite
└── NonFiniteGradient    a gradient is NaN or infinite
RuntimeError
└── PeerError            a rank sent or took nothing in time
TimeoutError
└── AbsentRankError      ranks did not answer the start barrier
"""

from __future__ import annotations

__all__ = ["MissingRankError", "NonFiniteGradient", "NonFiniteLoss", "PeerError"]


class PeerError(RuntimeError):
    """A rank of the group sent or took nothing within the group's time-out, or its connection is gone."""


class NonFiniteGradient(ValueError):  # noqa: N818 - named for what it is
    """A gradient is NaN or infinite; ``codec``, ``rank`` (None: some rank) and ``step`` say where and when."""

    def __init__(self, codec: str, rank: int | None, step: int) -> None:
        where = "their sum" if rank is None else f"rank {rank} of the group"
        super().__init__(
            f"gradients must be finite to be summed in code {codec}, but got NaN or infinity in {where} at step "
            f"{step} of this sum; lower the learning rate or clip gradients, and drop this step or load a checkpoint"
        )
        self.codec, self.rank, self.step = codec, rank, step


class MissingRankError(TimeoutError):
    """Ranks did not answer in time."""


class NonFiniteLoss(ValueError):  # noqa: N818 - named for what it is, like StopIteration
    """The loss is NaN or infinite; ``rank`` and ``step`` say where and when."""

    def __init__(self, value: float, rank: int, stage: int, step: int) -> None:
        super().__init__(
            f"the loss must be finite, but got {value} on rank {rank} (stage {stage}) at step {step}; "
            "lower the learning rate, clip gradients, or look at this step's data"
        )
        self.value, self.rank, self.stage, self.step = value, rank, stage, step
