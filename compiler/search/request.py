"""``PlanRequest``: what is asked of the planner, validated once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..cost.gradient_communication import AskedCommunication
from ..frontend.mixed_precision import check_precision
from .constraints import Constraints, layer_modes_of, parse_constraints
from .parallel_shape import Strategy, check_batch, parse_strategy
from .space import Space

__all__ = ["PlanRequest"]

REGULAR = ("prefer", "only", "any")
#: fields that say how to search and how many plans are wanted; the others decide what a plan looks like
_HOW = ("global_batch", "optimizer", "executable", "time_limit_s", "count", "workers", "alternatives", "space")


@dataclass(frozen=True)
class PlanRequest:
    """The question that a search answers, in the words of ``meshwright.plan``.

    Raises ValueError for words that are unknown, for numbers out of range, and for words that exclude each other.
    """

    #: samples per step over all devices; None: those of the example inputs
    global_batch: int | None = None
    microbatches: int | None = None
    #: a Strategy, or what ``parse_strategy`` reads
    strategy: Strategy | Mapping[str, int] | str | None = None
    schedule: str = "auto"
    #: name of a torch.optim class, for the memory of its state
    optimizer: str = "AdamW"
    #: a mode, or modes by pattern of layer names
    recompute: str | Mapping[str, str] = "auto"
    zero: str | int = "auto"
    sequence: bool = True
    #: "prefer", "only" or "any" plan of equal device groups under one mesh
    regular: str = "prefer"
    executable: bool = False
    communication: AskedCommunication = None
    precision: str = "model"
    constraints: Sequence[str] | str | None = None
    time_limit_s: float | None = None
    #: plans that are wanted: of distinct decisions (``top_k``), or points of a Pareto front
    count: int = 1
    #: processes that search; all but the first are forks
    workers: int = 1
    #: whether the best pure data, tensor and pipeline plans are looked for, too
    alternatives: bool = True
    #: the kinds of decision that the words above leave open; a space that is given takes their place
    space: Space | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        strategy = self.strategy if isinstance(self.strategy, Strategy) else parse_strategy(self.strategy)
        object.__setattr__(self, "strategy", strategy)
        if self.space is None:
            words = self.schedule, self.recompute, self.zero, self.sequence, self.executable, self.communication
            object.__setattr__(self, "space", Space.asked(*words))
        check_precision(self.precision)
        if self.regular not in REGULAR:
            raise ValueError(f"regular is one of {', '.join(REGULAR)}, but got {self.regular!r}; use one of these")
        if self.regular == "only" and strategy is not None and strategy.stages:
            raise ValueError(
                f"regular plans have equal stages, but got regular='only' and strategy {strategy}; leave out one"
            )
        self.parsed_constraints()
        if self.global_batch is not None:
            check_batch(self.global_batch, self.microbatches)
        limit = self.time_limit_s
        if limit is not None and not limit > 0:
            raise ValueError(f"time_limit_s is a positive number of seconds, but got {limit}; leave it out for none")
        if self.workers < 1:
            raise ValueError(f"workers is how many processes search, 1 or more, but got {self.workers}")
        if self.count < 1:
            raise ValueError(f"top_k and points are how many plans are wanted, 1 or more, but got {self.count}")

    @classmethod
    def of(cls, words: Mapping[str, Any], **more: Any) -> PlanRequest:
        """The request in ``words``, keywords of a public function of which others are passed over, and ``more``."""
        names = {one.name for one in fields(cls)} - {"space"}
        return cls(**{name: value for name, value in words.items() if name in names}, **more)

    def parsed_constraints(self) -> Constraints:
        """The constraints, with the recompute modes of layers that are named by pattern."""
        return replace(parse_constraints(self.constraints), layer_modes=layer_modes_of(self.recompute))

    @property
    def open_space(self) -> Space:
        """``space``, which is never None after the request was made."""
        assert self.space is not None
        return self.space

    @property
    def forced_strategy(self) -> Strategy | None:
        """``strategy`` as it was parsed."""
        assert self.strategy is None or isinstance(self.strategy, Strategy)
        return self.strategy

    def precisions(self) -> tuple[str, ...]:
        """The precisions to plan for."""
        return check_precision(self.precision)

    def decisions(self) -> list[str]:
        """The names of what a plan decides, where something is asked of it."""
        decided: Iterable[Any] = (one for one in fields(self) if one.name not in _HOW)
        return [one.name for one in decided if getattr(self, one.name) != one.default]
