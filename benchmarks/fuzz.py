"""Damaged and hostile files of every kind that meshwright reads: each is refused in one line, or read.

python benchmarks/fuzz.py [--cases 10000] [--only plan,cluster] [--case 1234] [--json out/fuzz.json]

A case takes a good file, changes it (a value, a key, a number of 5,000 digits, brackets 100,000 deep, a path, bits,
bytes, its length) and reads it as users do: by a command, or by the function that loads it. It is a fault if anything
but a ValueError or an OSError comes out, if its text is not one line, if reading takes more than ten times the bytes of
the file in memory (and 32 MiB), or more than ten seconds. ``--case`` repeats one and shows where it fails.
The script fails if a case does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # ``tests``

from fuzzing.mutants import mutant
from fuzzing.readers import Reader, readers
from reporting.results import Record, save_records, write_results

MOST_S, MOST_BYTES, MOST_TIMES = 10.0, 32 * 2**20, 10


@dataclass
class Row:
    """What became of the cases of one kind of file."""

    verdicts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    most_bytes: int = 0


def judge(reader: Reader, number: int, row: Row) -> None:
    """Make a case, read it, and keep what came of it."""
    changed, how = mutant(reader.good[number % len(reader.good)], number, reader.seal)
    place = reader.write(changed, number)
    tracemalloc.reset_peak()
    before, begin = tracemalloc.get_traced_memory()[0], time.perf_counter()
    wrong = ""
    try:
        verdict = reader.read(place, number)
    except (ValueError, OSError) as error:
        text, verdict = str(error), "refused"
        if isinstance(error, UnicodeError) or not text or "\n" in text or len(text) > 2000:
            wrong = f"its text is {type(error).__name__}: {text[:200]!r}"
    except (Exception, SystemExit) as error:
        wrong, verdict = f"{type(error).__name__}: {str(error)[:200]}", "fault"
        if "-v" in sys.argv:
            traceback.print_exc()
    seconds, used = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1] - before
    if seconds > MOST_S:
        wrong = wrong or f"took {seconds:.0f} s"
    if used > MOST_BYTES + MOST_TIMES * len(changed):
        wrong = wrong or f"took {used:,} bytes of memory for a file of {len(changed):,}"
    row.verdicts["fault" if wrong else verdict] += 1
    row.slowest_s, row.most_bytes = max(row.slowest_s, seconds), max(row.most_bytes, used)
    if wrong:
        row.faults.append(f"case {number} ({how}): {wrong}")


def main() -> int:
    """Run the cases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="in all")
    parser.add_argument("--only", default="", help="kinds of file, joined by ','")
    parser.add_argument("--case", type=int, help="repeat this one, of --only")
    parser.add_argument("-v", action="store_true", help="show where a case fails")
    parser.add_argument("--json", type=Path, default=Path("out/fuzz.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chosen = {
            kind: reader
            for kind, reader in readers(Path(folder)).items()
            if not arguments.only or kind in arguments.only.split(",")
        }
        rows = {kind: Row() for kind in chosen}
        tracemalloc.start()
        for kind, reader in chosen.items():
            each = range(-(-arguments.cases // len(chosen))) if arguments.case is None else [arguments.case]
            for number in each:
                judge(reader, number, rows[kind])
            row = rows[kind]
            print(
                f"{kind:<24} {row.verdicts.total():>6,} cases: {row.verdicts['refused']:,} refused, "
                f"{row.verdicts['read']:,} read, {len(row.faults)} faults; slowest {row.slowest_s:.2f} s, most "
                f"{row.most_bytes / 2**20:.1f} MiB",
                flush=True,
            )
            for fault in row.faults[:10]:
                print(f"    {fault}")
    faults = sum(len(row.faults) for row in rows.values())
    write_results(
        arguments.json,
        {
            "cases": {kind: dict(row.verdicts) for kind, row in rows.items()},
            "faults": {kind: row.faults for kind, row in rows.items() if row.faults},
        },
    )
    records = [
        Record(f"{kind}: faults of {row.verdicts.total():,} cases", len(row.faults), "cases", decimals=0, even=0)
        for kind, row in rows.items()
    ]
    save_records("fuzz", records, quick=bool(arguments.only) or arguments.cases < 10_000)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
