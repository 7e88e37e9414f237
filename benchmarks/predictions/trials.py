"""Which plans the accuracy benchmark runs: models × shapes × microbatches, in parts of like conditions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["PARTS", "SLEEPING", "TRIALS", "Trial", "select"]

PARTS: dict[str, str] = {
    "real": "real compute, at most one rank per core",
    "sleep": "sleeping compute, real collectives, 4 and 8 ranks",
    "crowd": "real compute, oversubscribed: 4 ranks on fewer cores",
    "gigabit": "sleeping compute over 1 Gbit/s links",
    "slow": "sleeping compute over 100 Mbit/s links with 10 ms of delay",
}

#: the parts whose layers sleep in proportion to their local FLOPs
SLEEPING = frozenset({"sleep", "gigabit", "slow"})


@dataclass(frozen=True)
class Trial:
    """One plan: ``strategy`` as in ``meshwright.plan`` ("" for a single rank), its shape forced, all else searched."""

    part: str
    ranks: int
    target: str
    strategy: str
    microbatches: int
    batch: int
    quick: bool = False

    @property
    def name(self) -> str:
        """Unique within a part."""
        shape = self.strategy.replace(",", "·") or "single"
        return f"{self.target} {shape}" + (f" m{self.microbatches}" if self.microbatches > 1 else "")

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


def _trials(part: str, target: str, batch: int, shapes: str, quick: str = "") -> Iterable[Trial]:
    """``shapes``: words like "pp2,tp2:4" (strategy:microbatches), "1" for a single rank; those in ``quick`` are of the
    quick run."""
    for word in shapes.split():
        strategy, _, count = word.partition(":")
        strategy = "" if strategy == "1" else strategy
        ranks = 1
        for piece in filter(None, strategy.split(",")):
            ranks *= int(piece[2:])
        yield Trial(part, ranks, target, strategy, int(count or 1), batch, word in quick.split())


TRIALS: tuple[Trial, ...] = (
    *_trials("real", "gpt", 8, "1 1:4 dp2 dp2:2 tp2 tp2:2 pp2:2 pp2:4 pp2:8", "1 dp2 tp2 pp2:4"),
    *_trials("real", "gpt-wide", 16, "1 dp2 tp2 pp2:4"),
    *_trials("real", "llama", 8, "1 dp2 tp2 pp2:4", "dp2 tp2"),
    *_trials("real", "mlp", 512, "1 dp2 tp2 pp2:4 pp2:8", "1 tp2"),
    *_trials("real", "convnet", 32, "1 dp2 pp2:4", "dp2"),
    *_trials("real", "moe", 16, "1 dp2 tp2 pp2:4"),
    *_trials(
        "sleep", "sleep-8", 256, "dp4 tp4 pp4:4 pp4:8 pp4:16 dp2,tp2 pp2,dp2:4 pp2,tp2:4 pp2,dp2:8",
        "dp4 tp4 pp4:8 pp2,dp2:4",
    ),
    *_trials("sleep", "sleep-wide", 256, "dp4 tp4 pp4:8 pp2,dp2:8 pp2,tp2:2"),
    *_trials(
        "sleep", "sleep-16", 256, "dp8 tp8 pp8:8 dp4,tp2 pp4,dp2:8 pp2,dp2,tp2:4",
        "pp2,dp2,tp2:4",
    ),
    *_trials("crowd", "gpt", 8, "dp4 tp4 pp4:4 dp2,tp2 pp2,dp2:4", "dp4 pp4:4"),
    *_trials("crowd", "llama", 8, "dp4 tp4 pp4:4"),
    *_trials("crowd", "mlp", 512, "dp4 tp4 pp4:8", "tp4"),
    *(
        trial
        for part in ("gigabit", "slow")
        for trial in _trials(
            part, "sleep-wide", 256, "dp4 tp4 pp4:4 pp4:8 pp4:16 dp2,tp2 pp2,dp2:4 pp2,tp2:4", "dp4 pp4:8 pp2,dp2:4"
        )
    ),
)  # fmt: skip


def select(parts: Iterable[str], quick: bool, words: Iterable[str] = ()) -> list[Trial]:
    """The trials of these parts by rank count; with ``words`` only those whose name contains one of them."""
    order, words = list(parts), list(words)
    found = [trial for trial in TRIALS if trial.part in order and (trial.quick or not quick)]
    found.sort(key=lambda trial: (order.index(trial.part), trial.ranks))
    return [trial for trial in found if not words or any(word in trial.name for word in words)]
