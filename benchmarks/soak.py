"""A long run under a mixed plan whose ranks are killed and stopped at random: nothing is lost, and nothing is left.

python benchmarks/soak.py [--steps 2000] [--blows 16] [--seed 0] [--json out/soak.json]

Four ranks on loopback (two stages of two data-parallel ranks, ZeRO-1, AdamW with a schedule of its rate) train a small
GPT under ``torchrun``, with a checkpoint on its way every 25 steps. From outside, a random rank gets SIGKILL, or one in
four times SIGSTOP, every few seconds; each time torchrun starts all ranks again, and they go on from the last complete
checkpoint. A second run is left alone. The script fails unless

- every loss of the broken run equals the unbroken one's of that step, to the last bit, however often a step was done;
- in the unbroken run no rank holds more memory, open files or threads at the end than after a tenth of its steps;
- no process, listening port, file in /dev/shm, or temporary file of either run is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reporting.results import Record, save_records, write_results

RANKS, TIMEOUT_S, EVERY, LIMIT_S = 4, 5, 25, 3600
GROWTH = 1.05  # of the resident set, in which an allocator's free lists show

SCRIPT = """
import gc, json, os, sys, time
import torch
import meshwright as mw
from meshwright.models import GPT

run, steps, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
open(f"{run}/pid-{rank}", "w").write(str(os.getpid()))

def batch(step):
    tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

torch.manual_seed(0)
parallel = mw.parallelize(
    GPT(vocab=256, layers=4, hidden=32, heads=4, sequence=32, dropout=0.1), mw.Cluster.local(world),
    example_inputs=batch(0), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    strategy="pp2,dp2", zero=1, schedule="1f1b", microbatches=2,
)
rate = torch.optim.lr_scheduler.CosineAnnealingLR(parallel.optimizer, steps)
first = 0
if mw.latest_checkpoint(f"{run}/saved"):
    first = parallel.load_checkpoint(f"{run}/saved", extra={"rate": rate})["step"]
log = open(f"{run}/losses", "a") if rank == 0 else None
for step in range(first, steps):
    loss = parallel.train_step(*batch(step))
    rate.step()
    if rank == 0:
        print(step, float(loss).hex(), file=log, flush=True)
    if (step + 1) % every == 0:
        parallel.save_checkpoint(f"{run}/saved", extra={"step": step + 1, "rate": rate}, keep=3, asynchronous=True)
    if step + 1 in (steps // 10, steps):
        parallel.wait_for_checkpoint()
        gc.collect()
        status = open("/proc/self/status").read()
        held = {key: int(status.split(key + ":")[1].split()[0]) for key in ("VmRSS", "Threads")}
        held["files"] = len(os.listdir("/proc/self/fd"))
        json.dump(held, open(f"{run}/held-{rank}-{step + 1}", "w"))
"""


def trained(script: Path, run: Path, steps: int, blows: int, draw: random.Random) -> Counter[str]:
    """Train to the end under torchrun, with ``blows`` at random ranks; how many of each there were."""
    run.mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
        "--max-restarts", str(blows + 1), "--log-dir", str(run / "logs"), str(script), str(run), str(steps), str(EVERY),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MESHWRIGHT_TIMEOUT_S": str(TIMEOUT_S)}
    given, until = Counter[str](), time.time() + LIMIT_S
    with open(run / "output", "w") as output:
        job = subprocess.Popen(command, env=environment, cwd=run, stdout=output, stderr=output)
        try:
            while given.total() < blows and _wait(job, until, _lines(run) + draw.randrange(1, 2 * steps // blows), run):
                sent = draw.choice([signal.SIGKILL] * 3 + [signal.SIGSTOP])
                victim = int((run / f"pid-{draw.randrange(RANKS)}").read_text())
                os.kill(victim, sent)
                given[sent.name] += 1
                print(f"    step {_lines(run, distinct=True):,}: {sent.name}", flush=True)
                while job.poll() is None and time.time() < until and Path(f"/proc/{victim}").exists():
                    time.sleep(0.1)
            _wait(job, until, None, run)
        finally:
            job.kill()
    if job.returncode:
        raise SystemExit(f"the run ended with {job.returncode}: {(run / 'output').read_text()[-3000:]}")
    return given


def _wait(job: subprocess.Popen[Any], until: float, lines: int | None, run: Path) -> bool:
    """Wait until the log has so many lines, or the job has ended; True if the job still runs."""
    while job.poll() is None and time.time() < until and (lines is None or _lines(run) < lines):
        time.sleep(0.05)
    return job.poll() is None


def _losses(run: Path) -> list[tuple[int, str]]:
    path = run / "losses"
    found = re.findall(r"^(\d+) (\S+)$", path.read_text() if path.exists() else "", re.MULTILINE)
    return [(int(step), loss) for step, loss in found]


def _lines(run: Path, distinct: bool = False) -> int:
    losses = _losses(run)
    return len(dict(losses)) if distinct else len(losses)


def leavings(seen: Callable[[Path], bool]) -> dict[str, set[str]]:
    """What this machine has of our processes, ports and files. seen: files that are none of ours."""
    ports = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=False).stdout
    processes = subprocess.run(["pgrep", "-f", "soak-train"], capture_output=True, text=True, check=False).stdout
    return {
        "ports": {line.split()[3] for line in ports.splitlines()},
        "processes": set(processes.split()),
        "shared memory": {path.name for path in Path("/dev/shm").iterdir()},
        "temporary files": {str(path) for path in Path(tempfile.gettempdir()).iterdir() if not seen(path)},
    }


def main() -> int:
    """Run both, compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--blows", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("out/soak.json"), help="where the results go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        before = leavings(lambda path: path == home)
        script = home / "soak-train.py"
        script.write_text(SCRIPT)
        begun = time.time()
        trained(script, home / "unbroken", options.steps, 0, random.Random(options.seed))
        middle = time.time()
        given = trained(script, home / "broken", options.steps, options.blows, random.Random(options.seed))
        ended = time.time()
        expected, found = _losses(home / "unbroken"), _losses(home / "broken")
        wrong = sum(loss != dict(expected)[step] for step, loss in found) + (len(dict(found)) != options.steps)
        growth = {"resident set": 0.0, "open files": 0.0, "threads": 0.0}
        for rank in range(RANKS):
            early, late = (
                json.loads((home / f"unbroken/held-{rank}-{step}").read_text())
                for step in (options.steps // 10, options.steps)
            )
            for name, key in (("resident set", "VmRSS"), ("open files", "files"), ("threads", "Threads")):
                growth[name] = max(growth[name], late[key] / early[key])
        saved = len(list((home / "broken/saved").iterdir()))
        time.sleep(2)  # sockets of processes that have ended
        after = leavings(lambda path: path == home)
    left = {kind: sorted(after[kind] - before[kind]) for kind in after}
    rows = [
        ("losses of the broken run that differ", wrong, "losses", 0),
        *((f"{name} at the end over a tenth of the way", value, "times", GROWTH) for name, value in growth.items()),
        *((f"{kind} left behind", len(names), "", 0) for kind, names in left.items()),
        ("folders beside the checkpoints to keep", saved - 3, "", 0),
    ]
    print(f"{options.steps:,} steps; {' and '.join(f'{n} × {name}' for name, n in given.items()) or 'no blows'}")
    print(f"{middle - begun:.0f} s unbroken, {ended - middle:.0f} s broken, in which {len(found):,} steps were done")
    for row, value, unit, most in rows:
        print(f"{row:<50} {value:>8.4g} {unit:<7} {'' if value <= most else 'NOT ' + str(most)}")
    for kind, names in left.items():
        print(*(f"    {kind}: {name}" for name in names[:5]), sep="\n", end="\n" if names else "")
    write_results(
        options.json, {"rows": rows, "left": left, "blows": dict(given), "seconds": [middle - begun, ended - middle]}
    )
    full = options.steps >= 2000 and options.blows >= 16
    save_records(
        "soak",
        [Record(row, value, unit or "", 3 if unit == "times" else 0, even=most) for row, value, unit, most in rows],
        quick=not full,
    )
    return 0 if all(value <= most for _, value, _, most in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
