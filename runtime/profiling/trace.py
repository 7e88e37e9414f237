"""The measured times of training steps on this rank: per action the wait for messages, the work and the sends; and the
end of the step.

Grammar of a record::

    step    ::= action* span* wall                 one optimizer step, whose wall time is the library's own work
    action  ::= label wait work exchange send      "F0", "B3", "I3c1", "W3c1" (c: chunk, if not 0)
                                                   exchange: collectives inside the work (Gloo blocks there)
    work    ::= (op | repeat)*                     repeat: what a backward runs once more, its collectives included
    span    ::= "gradient" | "drain" | "loss" | "tied" | "optimizer" | "gather"
                drain: until peers took the last messages; gather: of what the optimizer made, to where ops read it

A mark is a reading of the clock on a CPU and a recorded event on a CUDA stream; events are read when somebody asks for
the figures, so that a step never waits for its own measurement. The last steps are kept, older ones are forgotten.
"""

from __future__ import annotations

import resource
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import mean
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from ...compiler.ir.comm import Arrival, Comm
from ...compiler.pipeline.measured import Span
from ...costmodel.measured import RankTimes
from ..transport.progress import PROGRESS

__all__ = [
    "ActionTimes",
    "StepTimes",
    "TimedComm",
    "Trace",
    "meeting_times",
    "middle_steps",
    "named",
    "peak_bytes",
    "rank_times",
]

T = TypeVar("T")

KEEP_STEPS = 64
KEEP_STEPS_CUDA = 8  # events are kept until they are read

Mark = Any  # float seconds, or torch.cuda.Event


_NOTHING = nullcontext()


def named(name: str) -> AbstractContextManager[Any]:
    """Note the action of this rank, for whoever waits for it; and a record named "meshwright …" in the trace of
    a ``torch.profiler``, where one runs."""
    PROGRESS.note(name)
    return record_function(f"meshwright {name}") if torch.autograd.profiler._is_profiler_enabled else _NOTHING


@dataclass(frozen=True, slots=True)
class ActionTimes:
    """Seconds of one action: blocked until its messages were there; its program without the collectives in it and what
    it repeats; these collectives; starting its sends; what it repeats, with the collectives there."""

    label: str
    wait_s: float
    compute_s: float
    exchange_s: float
    send_s: float
    repeat_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Everything together."""
        return self.wait_s + self.compute_s + self.exchange_s + self.send_s + self.repeat_s


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step. ``gradient_s``: what was left of the reduction after the last backward, and the gather of
    what the optimizer made; ``peers_s``: until other stages took the last messages, exchanged tied weights and told the
    loss; ``wall_s``: all of it; ``batches``: accumulated calls."""

    actions: tuple[ActionTimes, ...]
    gradient_s: float
    peers_s: float
    optimizer_s: float
    wall_s: float
    batches: int

    @property
    def other_s(self) -> float:
        """The seconds that no other figure holds: the library between actions."""
        known = self.gradient_s + self.peers_s + self.optimizer_s
        return max(0.0, self.wall_s - known - sum(action.seconds for action in self.actions))

    def sum_s(self, kinds: str, part: str) -> float:
        """One field of all actions of these kinds ("F", "BI", ""; "": of all), seconds."""
        return sum(float(getattr(action, part)) for action in self.actions if not kinds or action.label[0] in kinds)


@dataclass(slots=True)
class _Record:
    actions: list[tuple[str, tuple[Mark, Mark, Mark, Mark], Any, Any]] = field(default_factory=list)
    spans: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    wall_s: float = 0.0
    batches: int = 0


class Trace:
    """The records of the last ``keep`` steps of one rank.

    A step is ``begin`` (once per optimizer step), then any number of ``call`` blocks with actions and spans in them,
    then ``close``. A record that is begun and never closed is dropped.
    """

    def __init__(self, device: torch.device | str = "cpu", keep: int | None = None) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self.mark: Callable[[], Mark] = _event if self._cuda else perf_counter
        self._kept: deque[_Record] = deque(maxlen=keep or (KEEP_STEPS_CUDA if self._cuda else KEEP_STEPS))
        self._open = self._last = _Record()
        self._exchanges: list[tuple[Mark, Mark]] = []
        self._repeats: list[tuple[Mark, Mark]] = []
        self._repeating = False
        self.enabled = True
        self.count = 0  # steps closed so far

    # ---- while the step runs

    def begin(self) -> None:
        """A new step."""
        self._open, self._exchanges, self._repeats = _Record(), [], []

    def close(self) -> None:
        """The step is done; it is kept unless ``enabled`` is off."""
        if self._open.batches and self.enabled:
            self._kept.append(self._open)
            self.count += 1
        self._last, self._open = self._open, _Record()

    @contextmanager
    def call(self, batches: int = 0) -> Iterator[None]:
        """A stretch of the library's own work, which counts as the step's wall time."""
        started = perf_counter()
        yield
        self._open.wall_s += perf_counter() - started
        self._open.batches += batches

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A part of the end of the step, by its name in the grammar."""
        begin = self.mark()
        with named(name):
            yield
        self._open.spans.append((name, begin, self.mark()))

    def action(self, label: str, begin: Mark, arrived: Mark, done: Mark, sent: Mark) -> None:
        """One action, by four marks: before its messages, when they were there, after its work, after its sends."""
        exchanges, repeats = self._taken(self._exchanges), self._taken(self._repeats)
        self._open.actions.append((label, (begin, arrived, done, sent), exchanges, repeats))

    def exchanged(self, begin: Mark) -> None:
        """A collective inside the running action, from ``begin`` until now."""
        if not self._repeating:
            self._exchanges.append((begin, self.mark()))

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Time a recomputation inside the running backward."""
        begin, self._repeating = self.mark(), True
        try:
            yield
        finally:
            self._repeating = False
            self._repeats.append((begin, self.mark()))

    def _taken(self, spans: list[tuple[Mark, Mark]]) -> Any:
        """Their seconds, or where these are not known yet the spans themselves; ``spans`` is empty again."""
        if not spans:
            return 0.0
        seconds = spans.copy() if self._cuda else sum(after - before for before, after in spans)
        spans.clear()
        return seconds

    # ---- afterwards

    def actions(self) -> list[ActionTimes]:
        """Of the step that runs, or of the last."""
        record = self._open if self._open.batches else self._last
        self._settle()
        return [self._action(*entry) for entry in record.actions]

    def steps(self) -> list[StepTimes]:
        """The kept steps, oldest first. On CUDA this waits for the device."""
        self._settle()
        return [self._times(record) for record in self._kept]

    def spans(self, origin: Mark) -> list[Span]:
        """The last kept step, in seconds after the mark ``origin``; empty before the first."""
        self._settle()
        if not self._kept:
            return []
        record, out = self._kept[-1], list[Span]()
        for entry in record.actions:
            label, (_, arrived, _, sent), *_ = entry
            times = self._action(*entry)
            start, end = self._between(origin, arrived), self._between(origin, sent)
            out.append(Span(label, start, end, times.wait_s, times.exchange_s, times.repeat_s, times.send_s))
        out += [Span(name, self._between(origin, a), self._between(origin, b)) for name, a, b in record.spans]
        return sorted(out, key=lambda span: span.start_s)

    def usable(self) -> list[StepTimes]:
        """The kept steps but the very first, which fills buffers and caches, and those that accumulated several
        batches; a single step stands for itself."""
        steps = self.steps()
        later = steps[1:] if self.count == len(steps) else steps
        ones = [step for step in later if step.batches == 1]
        return ones or [step for step in steps if step.batches == 1]

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _times(self, record: _Record) -> StepTimes:
        spans = dict.fromkeys(("gradient", "drain", "loss", "tied", "optimizer", "gather"), 0.0)
        for name, begin, end in record.spans:
            spans[name] += self._between(begin, end)
        actions = tuple(self._action(*entry) for entry in record.actions)
        peers_s = spans["drain"] + spans["tied"] + spans["loss"]
        gradient_s = spans["gradient"] + spans["gather"]
        return StepTimes(actions, gradient_s, peers_s, spans["optimizer"], record.wall_s, record.batches)

    def _action(self, label: str, marks: Sequence[Mark], *spans: Any) -> ActionTimes:
        wait, work, send = (self._between(a, b) for a, b in pairwise(marks))
        exchange, repeat = (sum(self._between(a, b) for a, b in x) if isinstance(x, list) else x for x in spans)
        return ActionTimes(label, wait, max(0.0, work - exchange - repeat), exchange, send, repeat)

    def _between(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._cuda else end - begin


def middle_steps(walls: Sequence[Sequence[float]]) -> list[int]:
    """The indices of the steps to count: the middle half of them by what they took, the mean over ranks. walls: rank →
    step → seconds. Means of the same steps, unlike medians, add up."""
    count = min(map(len, walls))
    means = [mean(rank[len(rank) - count + step] for rank in walls) for step in range(count)]
    cut = (count + 1) // 4
    return sorted(sorted(range(count), key=means.__getitem__)[cut : count - cut])


def rank_times(
    rank: int, stage: int | None, steps: Sequence[StepTimes], resident_bytes: int, live_bytes: int | None = None
) -> RankTimes:
    """The means of these steps."""

    def over(read: Callable[[StepTimes], float]) -> float:
        return mean(map(read, steps)) if steps else 0.0

    return RankTimes(
        rank, stage, len(steps),
        step_s=over(lambda step: step.wall_s),
        forward_s=over(lambda step: step.sum_s("F", "compute_s")),
        backward_s=over(lambda step: step.sum_s("BI", "compute_s")),
        weights_s=over(lambda step: step.sum_s("W", "compute_s")),
        recompute_s=over(lambda step: step.sum_s("BI", "repeat_s")),
        forward_exchange_s=over(lambda step: step.sum_s("F", "exchange_s")),
        backward_exchange_s=over(lambda step: step.sum_s("BIW", "exchange_s")),
        sends_s=over(lambda step: step.sum_s("", "send_s")),
        waiting_s=over(lambda step: step.sum_s("", "wait_s") + step.peers_s),
        gradient_s=over(lambda step: step.gradient_s),
        optimizer_s=over(lambda step: step.optimizer_s),
        host_s=over(lambda step: step.other_s),
        resident_bytes=resident_bytes,
        live_bytes=live_bytes,
    )  # fmt: skip


def meeting_times(steps: Sequence[StepTimes]) -> list[list[tuple[str, float]]]:
    """Step → every time that ranks of a stage meet: ("F", "B" or "G" for the gradients, seconds)."""
    return [
        [*(("F" if a.label[0] == "F" else "B", a.exchange_s) for a in step.actions), ("G", step.gradient_s)]
        for step in steps
    ]


def peak_bytes(device: torch.device | str = "cpu") -> int:
    """The most memory that this process has held so far: its resident set; of a CUDA device what was allocated."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _event() -> Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class _Timed:
    wait: Callable[[], torch.Tensor]


class TimedComm:
    """A ``Comm`` whose collectives are noted in a trace; everything else is the inner one's."""

    def __init__(self, inner: Comm, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    def size(self, axis: int) -> int:
        """Number of devices along ``axis``."""
        return self._inner.size(axis)

    def index(self, axis: int) -> int:
        """This device's coordinate along ``axis``."""
        return self._inner.index(axis)

    def all_reduce(self, x: torch.Tensor, axis: int, op: str = "sum") -> torch.Tensor:
        """The sum (or "max") over the axis, on every device of it."""
        return self._timed(self._inner.all_reduce, x, axis, op)

    def all_gather(self, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        """The blocks of the axis concatenated along ``dim``."""
        return self._timed(self._inner.all_gather, x, axis, dim)

    def reduce_scatter(self, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        """This device's block along ``dim`` of the sum over the axis; the extent divides evenly."""
        return self._timed(self._inner.reduce_scatter, x, axis, dim)

    def all_to_all(self, x: torch.Tensor, axis: int, split_dim: int, concat_dim: int) -> torch.Tensor:
        """From sharded along ``concat_dim`` to sharded along ``split_dim``."""
        return self._timed(self._inner.all_to_all, x, axis, split_dim, concat_dim)

    def all_to_all_uneven(
        self, x: torch.Tensor, axis: int, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Rows in pieces of these counts to and from the devices of the axis."""
        return self._timed(self._inner.all_to_all_uneven, x, axis, sent, received)

    def exchange(
        self, before: torch.Tensor | None, after: torch.Tensor | None, axis: int, cyclic: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Exchange tensors with the neighbours along the axis."""
        return self._timed(self._inner.exchange, before, after, axis, cyclic)

    def start_send(self, x: torch.Tensor, axis: int, to: int, source: int) -> Callable[[], torch.Tensor]:
        """One message to a device of the axis and one from another; the wait for it is what counts."""
        return partial(self._timed, self._inner.start_send(x, axis, to, source))

    def start_sum(self, x: torch.Tensor, axes: Sequence[int]) -> Arrival:
        """A sum on its way; the wait for it is what counts."""
        return _Timed(partial(self._timed, self._inner.start_sum(x, axes).wait))

    def start_all_gather(self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none") -> _Timed:
        """Rows on their way; the wait for them is what counts."""
        return _Timed(partial(self._timed, self._inner.start_all_gather(x, axes, code).wait))

    def start_reduce_scatter(
        self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none", draw: tuple[int, ...] = ()
    ) -> _Timed:
        """Sums on their way; the wait for them is what counts."""
        return _Timed(partial(self._timed, self._inner.start_reduce_scatter(x, axes, code, draw).wait))

    def _timed(self, call: Callable[..., T], *arguments: Any) -> T:
        begin = self._trace.mark()
        out = call(*arguments)
        self._trace.exchanged(begin)
        return out
