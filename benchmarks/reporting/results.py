"""What a benchmark leaves: the raw document of its run, and records of its figures, which docs/measured.md shows.

    run     ::= date, commit, command, machine, torch, records     one command on one machine; null: not recorded
    record  ::= row, value, unit [, decimals, spread, peer, even, better, note]

A record is one figure. ``save_records`` keeps the newest figure of every row in ``results/BENCHMARK.json``, which is
committed; ``measured.py`` makes the page of all of them.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "RESULTS",
    "ROOT",
    "Record",
    "Run",
    "Spread",
    "computed",
    "dump_runs",
    "load_runs",
    "save_records",
    "write_results",
]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Spread:
    """From ``low`` to ``high``; of: what lies between them, such as "95 % interval" or "3 runs"."""

    low: float
    high: float
    of: str


def computed(value: float) -> Spread:
    """Of a figure that was computed and not measured: the next run has the same."""
    return Spread(value, value, "computed")


@dataclass(frozen=True)
class Record:
    """One figure of a benchmark.

    row: what was measured, unique within its benchmark; value: None where nothing came out, which ``note`` explains;
    decimals: how many are shown (None: four significant digits); peer: what ours is held against; even: the value at
    which ours equals the peer or meets a target of ours; better: whether "less" or "more" is better than that.
    """

    row: str
    value: float | None
    unit: str
    decimals: int | None = None
    spread: Spread | None = None
    peer: str = ""
    even: float | None = None
    better: str = "less"
    note: str = ""

    def __post_init__(self) -> None:
        if self.better not in ("less", "more"):
            raise ValueError(f"better is 'less' or 'more', but got {self.better!r}")

    @property
    def verdict(self) -> str:
        """How ours stands: "behind", "even" (the spread holds the even value), "ahead", or "" without a peer or target.

        Equal to the even value counts as ahead: a target that is met, a tie with a peer.
        """
        if self.even is None:
            return ""
        if self.value is None:
            return "behind"
        sign = 1 if self.better == "less" else -1
        known = self.spread
        if known is not None and known.low < known.high and known.low <= self.even <= known.high:
            return "even"
        return "behind" if sign * (self.value - self.even) > 0 else "ahead"


@dataclass(frozen=True)
class Run:
    """One command on one machine and the records that it left. transcribed: the document from which the figures were
    taken over, where the benchmark did not write records yet; date and commit are then those of the figures' entry into
    that document."""

    date: str | None
    commit: str | None
    command: str | None
    machine: Mapping[str, Any] | None
    torch: str | None
    records: tuple[Record, ...]
    transcribed: str | None = None


def write_results(path: Path, found: Mapping[str, Any]) -> None:
    """Write ``found`` below a header that says how, when and where it ran. Called again and again, an interrupted run
    keeps what it has finished."""
    header = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": f"{os.cpu_count()} cores, {processor()}",
        "torch": torch.__version__,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(header | dict(found), indent=1))


def save_records(benchmark: str, records: Sequence[Record], quick: bool = False, folder: Path = RESULTS) -> None:
    """Put the figures of this run in the place of older ones of the same rows. A quick run is no measurement: nothing
    is kept of it. ValueError if two records have the same row."""
    if quick or not records:
        return
    rows = [record.row for record in records]
    if twice := {row for row in rows if rows.count(row) > 1}:
        raise ValueError(f"{benchmark}: every figure needs a row of its own, but got {sorted(twice)} twice")
    run = Run(time.strftime("%Y-%m-%d"), _commit(), _command(), _machine(), torch.__version__, tuple(records))
    kept = [_without(old, set(rows)) for old in load_runs(benchmark, folder)]
    dump_runs(benchmark, [*(old for old in kept if old.records), run], folder)


def load_runs(benchmark: str, folder: Path = RESULTS) -> list[Run]:
    """The runs whose figures are kept, oldest first; none if there is no file."""
    path = folder / f"{benchmark}.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    return [
        Run(**{**run, "records": tuple(_record(record) for record in run["records"])})
        for run in found["runs"]
    ]  # fmt: skip


def dump_runs(benchmark: str, runs: Iterable[Run], folder: Path = RESULTS) -> None:
    """Write the file of a benchmark, a record a line, so that a diff shows which figures moved."""
    texts = []
    for run in runs:
        head = {f.name: getattr(run, f.name) for f in fields(Run) if f.name != "records"}
        lines = ",\n".join(f"   {_dumped(_brief(record))}" for record in run.records)
        texts.append(f'  {_dumped(head)[:-1]}, "records": [\n{lines}\n  ]}}')
    folder.mkdir(parents=True, exist_ok=True)
    text = f'{{\n "benchmark": {_dumped(benchmark)},\n "runs": [\n' + ",\n".join(texts) + "\n ]\n}\n"
    (folder / f"{benchmark}.json").write_text(text)


def processor() -> str:
    """The model of this machine's processor, as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _record(found: Mapping[str, Any]) -> Record:
    spread = found.get("spread")
    return Record(**{**found, "spread": None if spread is None else Spread(**spread)})


def _brief(record: Record) -> dict[str, Any]:
    """The record's fields, without those that say nothing; a spread that is not known stays, as null. Numbers have six
    significant digits."""
    found = _rounded(asdict(record))
    for name, nothing in (("decimals", None), ("peer", ""), ("note", ""), ("even", None)):
        if found[name] == nothing:
            del found[name]
    if "even" not in found:
        del found["better"]
    return found


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: float(f"{value:.6g}") for name, value in found.items() if isinstance(value, float)}
    parts = {name: _rounded(value) for name, value in found.items() if isinstance(value, dict)}
    return {**found, **numbers, **parts}


def _without(run: Run, rows: set[str]) -> Run:
    left = tuple(record for record in run.records if record.row not in rows)
    return Run(run.date, run.commit, run.command, run.machine, run.torch, left, run.transcribed)


def _machine() -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": processor(), "cores": os.cpu_count(), "system": platform.system()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _command() -> str:
    script = Path(sys.argv[0]).resolve()
    where = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    words = sys.argv[1:]
    while "--json" in words:  # where the raw document went says nothing
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(["python", str(where), *words])


def _commit() -> str | None:
    """The commit that ran, "+" behind it where other files than results differed from it; None outside a clone."""
    commit = _git("rev-parse", "--short=7", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return commit and commit + ("+" if changed else "")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
