"""The interface of a sum over a group of ranks, whatever its algorithm and its compression.

A ``Sum`` is *persistent*: made once, on every rank of a group alike, for a length and a dtype, and used in every step.
Ranks start the same sums in the same order. Sums, not means: nothing is divided. All ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

__all__ = ["Pending", "Submit", "Sum"]


class Pending(Protocol):
    """Something on its way."""

    def wait(self) -> None:
        """Return when it is done. Raises what went wrong on the way."""
        ...


Submit = Callable[[Callable[[], object]], Pending]
"""Has a call made after those that were submitted before it, in a communication thread"""


class Sum(Protocol):
    """The sum over a group's ranks of flat tensors of one length and dtype."""

    def start(self, x: torch.Tensor) -> Pending:
        """Start summing ``x`` ([n], contiguous) in place, without blocking on the network. It holds the sum once the
        returned ``wait`` has come back, and is left alone until then."""
        ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors that must survive a checkpoint: residuals, warm-start factors, step counts; empty for a
        stateless sum."""
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what ``state_dict`` gave."""
        ...

    def close(self) -> None:
        """No more sums: receives that still stand are left harmless."""
        ...
