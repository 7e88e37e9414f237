"""What a search may not do, as the problems of stages read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["FREE", "Restriction"]


@dataclass(frozen=True)
class Restriction:
    """What a search may not do. roles: per mesh axis "data" (cuts the batch of everything that has one), "tensor" (cuts
    no batch, but the work of every heavy op that it can, by its weights where it has any) or None.

    pinned: op or parameter or source node → the only choice label (labels joined by ",", a pair's text, or for a
    parameter a pair and a pattern: "R|P zero2"). executable_only: leave out choices that the runtime cannot run yet.
    residencies: patterns of ``residency.PATTERNS`` that a parameter may take if it is not pinned; "replicated" it may
    where it can take none of them. loose: replicas along the "data" axes send each other nothing but gradients and the
    loss (``loose_choices``). replicated: parameter nodes that are whole on every device. split: op node → labels
    each of which some axis must carry; where none can, the op is impossible. modes: class of a layer → the recompute
    modes that its layers may take, where these are not all that the search has.
    """

    roles: tuple[str | None, ...] = ()
    pinned: Mapping[str, str] | None = None
    executable_only: bool = False
    residencies: tuple[str, ...] = ("replicated",)
    replicated: frozenset[str] = frozenset()
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    loose: bool = False

    @property
    def loose_axes(self) -> tuple[int, ...]:
        """The axes over which replicas are to step by themselves."""
        return tuple(axis for axis, role in enumerate(self.roles) if self.loose and role == "data")

    def splits(self, op: str, labels: Sequence[str]) -> bool:
        """Whether a choice with these labels keeps to ``split``."""
        return set(self.split.get(op, ())) <= set(labels)


FREE = Restriction()
