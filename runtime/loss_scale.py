"""Dynamic loss scaling for fp16, whose smallest gradients would be zero otherwise (Micikevicius et al. 2018, 3.2).

    backward   from S times the loss; gradients are divided by S where they become fp32
    update     left out on every rank where any gradient on any rank is not finite, and S is halved then
    growth     S doubles after ``growth_interval`` updates in a row

With the constants of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LossScale"]


@dataclass
class LossScale:
    """scale: S; good: updates since it changed; skipped: updates that were left out so far."""

    scale: float = 2.0**16
    good: int = 0
    skipped: int = 0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000

    def update(self, finite: bool) -> None:
        """After a step whose gradients were all ``finite``, or not."""
        if not finite:
            self.scale, self.good, self.skipped = self.scale * self.backoff, 0, self.skipped + 1
            return
        self.good += 1
        if self.good == self.growth_interval:
            self.scale, self.good = self.scale * self.growth, 0
