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

import re
from collections.abc import Sequence

__all__ = ["MissingRankError", "NonFiniteGradient", "NonFiniteLoss", "PeerError", "lost_peer"]


class PeerError(RuntimeError):
    """A rank of the group sent or took nothing within the group's time-out, or its connection is gone."""


def lost_peer(what: str, ranks: Sequence[int], why: object) -> PeerError:
    """The PeerError of something that came from no peer. ranks: who may be lost, in the world; none: unknown."""
    names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "another rank"
    first = str(why).splitlines()[0] if str(why) else type(why).__name__
    first = re.sub(r"^\[[^\]]*\.cc:\d+\] |\. This is typically .*", "", first)  # Gloo's source line and its advice
    return PeerError(
        f"{what}: got nothing from or through to {names}, which may have died or stand still ({first}); see its own "
        "messages, then start all ranks again"
    )


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
