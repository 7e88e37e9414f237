"""Random models under random plans against one device, for as long as you like.

    python benchmarks/equivalence.py [--seconds 120] [--first 0]

Prints every case that differs or fails, with its seed, and at the end how many were compared. Exit status 1 if any
differs. ``tests/end_to_end/test_random_plans.py`` does the same for a few cases.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # ``tests``

import meshwright as mw
from reporting.results import Record, save_records

from tests.support.random_plans import random_plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    arguments = parser.parse_args()
    end, seed = time.monotonic() + arguments.seconds, arguments.first
    cases = tensors = wrong = 0
    worst = 0.0
    while time.monotonic() < end:
        case = random_plan(seed)
        seed += 1
        if case is None:
            continue
        cases += 1
        try:
            found = mw.verify(case.plan, case.model, example_inputs=case.inputs)
        except Exception as error:
            wrong += 1
            print(f"{case.text}\n  {type(error).__name__}: {error}", flush=True)
            continue
        tensors, worst = tensors + found.compared, max(worst, found.worst if found.ok else 0.0)
        if not found.ok:
            wrong += 1
            print(f"{case.text}\n{found}", flush=True)
    print(f"seeds {arguments.first} to {seed - 1}: {cases} plans, {tensors} tensors, {wrong} plans differ or fail; "
          f"the others are {worst:.1e} apart at most")  # fmt: skip
    note = f"seeds {arguments.first} to {seed - 1}, {tensors} tensors"
    save_records("equivalence", [
        Record("plans that differ or fail", float(wrong), "plans", 0, None, "one device", 0.0, "less", note),
        Record("plans compared", float(cases), "plans", 0, note=note),
        Record("largest difference of the equal ones", worst, "relative", note="float64"),
    ])  # fmt: skip
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
