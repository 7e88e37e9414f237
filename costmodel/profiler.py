"""The engine of the profiler: measures what it is given within a budget, and remembers what it has measured.

It knows no graph and no process group. A ``Task`` makes a call that takes a few samples; where ranks must do the same
at once, ``agree`` (the elementwise maximum over ranks) makes them decide alike and take the slowest rank's time::

    state  ::= records, skipped                                  (JSON; a later run continues it)
    record ::= visits, samples                                   visit = one vector of seconds, itself a median
    run    ::= round*                                            every task once, in order of value, then again

Visits of one task lie a round apart, so a disturbance of a second hits one visit of many tasks, not all of one: the
median over visits is then the time that training pays. Of two in the middle it is the lower: disturbances only add. A
visit that would not fit the budget is left out; what a first visit takes is foreseen from the task of its series before
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median, median_low
from time import perf_counter

import torch

from . import forms
from .files import parse_document, read_document, write_atomically

__all__ = ["Agree", "Engine", "ProfileState", "Progress", "Task", "TaskRecord", "Visit", "out_of_memory"]

FORMAT, SCHEMA = "meshwright-profile-state", 1
_STATE = forms.record(
    {
        "format": forms.text,
        "schema": forms.whole(),
        "about": forms.text,
        "skipped": forms.table(forms.text),
        "records": forms.table(
            forms.record({"visits": forms.listed(forms.listed(forms.number)), "samples": forms.whole()})
        ),
    }
)
_REMEDY = "delete it or profile without resuming"
NO_TIME = "the budget ended before it"
_SAVE_EVERY_S = 2.0
_SAMPLES_AHEAD, _MOST_GROWTH = 4.0, 16.0  # a visit makes about so many calls; small sizes tell little of large ones

Agree = Callable[[Sequence[float]], Sequence[float]]
Progress = Callable[[str, float], None]
Visit = tuple[Sequence[float], int]  # seconds (one or several figures), samples behind them


@dataclass(frozen=True)
class Task:
    """Something to be measured. key: its name in the state. series, work: tasks of one series differ in ``work`` alone
    and come in rising order. make: allocates what is needed (here memory may end) and returns the call that takes one
    visit. width: figures in a visit."""

    key: str
    series: str
    work: float
    make: Callable[[], Callable[[], Visit]]
    width: int = 1


@dataclass
class TaskRecord:
    """The samples of one task: a vector of seconds per visit, and the number of samples behind them."""

    visits: list[list[float]] = field(default_factory=list)
    samples: int = 0

    def medians(self) -> tuple[float, ...]:
        """The median of each figure over the visits."""
        return tuple(median_low(column) for column in zip(*self.visits))


@dataclass
class ProfileState:
    """All measurements so far. ``about``: what they hold for (a fingerprint); ``skipped``: key → why."""

    about: str
    records: dict[str, TaskRecord] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def seconds(self, key: str) -> tuple[float, ...] | None:
        """The medians of one task; None where it was not measured."""
        record = self.records.get(key)
        return record.medians() if record is not None and record.visits else None

    def to_json(self) -> str:
        """Human-readable, versioned JSON."""
        body = {"format": FORMAT, "schema": SCHEMA, "about": self.about, "skipped": self.skipped}
        records = {key: {"visits": r.visits, "samples": r.samples} for key, r in self.records.items()}
        return json.dumps({**body, "records": records}, indent=0)

    @staticmethod
    def from_json(text: str) -> ProfileState:
        """The inverse of ``to_json``; ValueError on a corrupt or foreign document."""
        data = parse_document(text, "profile that was interrupted", FORMAT, [SCHEMA], _REMEDY)
        if faults := forms.shown(_STATE("", data)):
            raise ValueError(f"{faults}; {_REMEDY}")
        records = {key: TaskRecord(entry["visits"], entry["samples"]) for key, entry in data["records"].items()}
        return ProfileState(data["about"], records, data["skipped"])

    def save(self, path: str | Path) -> None:
        """Write to ``path``: complete or not at all."""
        write_atomically(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> ProfileState:
        """Read an interrupted profile; ValueError names the file."""
        return read_document(path, ProfileState.from_json)


def out_of_memory(error: BaseException) -> bool:
    """True if the error says that memory ran out, on a CPU or an accelerator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "can't allocate memory" in text)


def _alone(values: Sequence[float]) -> Sequence[float]:
    return values


class Engine:
    """Runs tasks into ``state``. With ``agree``, every rank runs the same tasks with its own engine.

    clock: seconds, for tests. save: called with the state every few seconds and at the end.
    """

    def __init__(
        self,
        state: ProfileState,
        *,
        agree: Agree = _alone,
        clock: Callable[[], float] = perf_counter,
        save: Callable[[ProfileState], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.state, self.agree, self.clock, self.save, self.progress = state, agree, clock, save, progress
        self._costs: dict[str, float] = {}  # of a visit, by key
        self._reached: dict[str, tuple[float, float, float]] = {}  # series → work, cost and seconds of its last task
        self._ended: dict[str, float] = {}  # series → smallest work that memory did not hold
        self._saved = clock()

    def run(self, tasks: Sequence[Task], budget_s: float, *, title: str = "profile", visits: int = 5) -> None:
        """Give every task one visit, in order, then a second, up to ``visits``, as far as ``budget_s`` goes.

        Tasks that a state already has enough visits of are not measured again. Raises what a task raises, but for the
        end of memory: that size and the larger ones of its series are skipped and recorded.
        """
        started, spent = self.clock(), False
        for number in range(1, visits + 1):
            for task in tasks:
                record = self.state.records.get(task.key)
                if (record is not None and len(record.visits) >= number) or self._memory_ended(task):
                    continue
                if spent:
                    if number == 1:
                        self.state.skipped[task.key] = NO_TIME
                    continue
                elapsed, cost = self.agree([self.clock() - started, self._foreseen(task)])
                spent = elapsed > budget_s  # nothing more fits: agreeing on every other task would take time as well
                if elapsed + cost > budget_s:
                    if number == 1:
                        self.state.skipped[task.key] = NO_TIME
                    continue
                if self.progress is not None:
                    self.progress(f"{title}: {task.key}", min(elapsed / budget_s, 1.0))
                self._visit(task)
                self._save_sometimes()
        if self.save is not None:
            self.save(self.state)

    def _memory_ended(self, task: Task) -> bool:
        if task.work >= self._ended.get(task.series, inf):
            self.state.skipped.setdefault(task.key, f"out of memory at {self._ended[task.series]:.6g} already")
        return self.state.skipped.get(task.key, NO_TIME) != NO_TIME

    def _foreseen(self, task: Task) -> float:
        if task.key in self._costs:
            return self._costs[task.key]
        work, cost, seconds = self._reached.get(task.series, (task.work, 0.0, 0.0))
        growth = min(task.work / work, _MOST_GROWTH) - 1.0 if work > 0 else 0.0
        if self._costs:  # a first visit may have waited for connections, which are there now
            cost = min(cost, 2.0 * median(self._costs.values()))
        return cost + _SAMPLES_AHEAD * seconds * max(growth, 0.0)

    def _visit(self, task: Task) -> None:
        before, fault = self.clock(), 0.0
        call: Callable[[], Visit] | None = None
        try:
            call = task.make()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            fault = 1.0
        if self.agree([fault])[0]:
            self._skip(task)
            return
        assert call is not None
        seconds: Sequence[float] = [0.0] * task.width
        samples = 0
        try:
            seconds, samples = call()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            fault = 1.0
        del call
        cost = self.clock() - before
        fault, cost, *together = self.agree([fault, cost, *seconds])
        if fault:
            self._skip(task)
            return
        record = self.state.records.setdefault(task.key, TaskRecord())
        record.visits.append(list(together))
        record.samples += samples
        self.state.skipped.pop(task.key, None)
        self._costs[task.key] = cost
        self._reached[task.series] = (task.work, cost, max(together))

    def _skip(self, task: Task) -> None:
        self._ended[task.series] = min(task.work, self._ended.get(task.series, inf))
        self.state.skipped[task.key] = f"out of memory at {task.work:.6g}"

    def _save_sometimes(self) -> None:
        if self.save is not None and self.clock() - self._saved > _SAVE_EVERY_S:
            self.save(self.state)
            self._saved = self.clock()
