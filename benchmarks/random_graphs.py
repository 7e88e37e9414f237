"""Random graphs of 36 kinds of op through plan, verify, and two ranks, against eager PyTorch on one device.

python benchmarks/random_graphs.py [--cases 500] [--first 0] [--json out/random_graphs.json]

A case is a graph of 4 to 11 ops with tied modules among them, in fp64, and a strategy, ZeRO level, schedule, number of
microbatches and recompute mode for two devices. Its plan is verified without ranks, then two local ranks train three
steps by a plan of the same question; the losses are to be equal within 1e-9. The script fails if one differs, or ends
in anything but a refusal.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # ``tests``
os.environ.setdefault("OMP_NUM_THREADS", "1")

import meshwright as mw
from reporting.results import Record, save_records, write_results

from tests.support.random_graphs import graph_case, losses_of, one_device
from tests.support.ranks import RankPool


def judged(pool: RankPool, seed: int) -> tuple[str, str]:
    """("equal", "refused" or "wrong"; why) of a case."""
    case = graph_case(seed)
    try:
        plan = mw.plan(case.model, mw.Cluster.local(2), example_inputs=case.batch(0), executable=True, **case.wishes)
    except (ValueError, mw.InfeasibleError) as error:
        return "refused", str(error)
    found = mw.verify(plan, case.model, example_inputs=case.batch(0))
    if not found.ok:
        return "wrong", f"verify: {found}"
    expected, (first, second) = one_device(seed), pool.run(2, losses_of, seed)
    if isinstance(first, str):
        return "wrong", f"planned here, but on ranks {first}"
    same = all(math.isclose(a, b, rel_tol=1e-9) for losses in (first, second) for a, b in zip(losses, expected))
    return ("equal", "") if same and len(first) == len(expected) else ("wrong", f"{first} instead of {expected}")


def main() -> int:
    """Run the cases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--json", type=Path, default=Path("out/random_graphs.json"), help="where the results go")
    options = parser.parse_args()
    pool, verdicts, told, begun = RankPool(), Counter[str](), dict[int, str](), time.time()
    for seed in range(options.first, options.first + options.cases):
        try:
            verdict, why = judged(pool, seed)
        except Exception as error:
            verdict, why = "wrong", f"{type(error).__name__}: {str(error)[-1500:]}"
        verdicts[verdict] += 1
        if verdicts.total() % 50 == 0:
            print(f"{verdicts.total()} cases: {dict(verdicts)}", flush=True)
        if verdict != "equal":
            told[seed] = f"{verdict}: {why}"
            print(f"case {seed}, {graph_case(seed).wishes}, {graph_case(seed).model.text}: {told[seed]}", flush=True)
    pool.close()
    print(f"{verdicts.total()} cases in {time.time() - begun:.0f} s: {dict(verdicts)}")
    write_results(options.json, {"verdicts": dict(verdicts), "cases": told})
    rows = [Record("graphs that differ from one device", verdicts["wrong"], "graphs", 0, even=0)]
    rows += [Record(f"graphs that were {name}", verdicts[name], "graphs", 0) for name in ("equal", "refused")]
    save_records("random_graphs", rows, quick=options.cases < 500)
    return 1 if verdicts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
