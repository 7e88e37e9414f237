"""What happens when a rank is killed or stopped, in every phase of a run: who names it, and how soon all have ended.

python benchmarks/failures.py [--quick] [--only save,bind] [--json out/failures.json]

Three ranks on loopback train a small GPT; one of them sends itself SIGKILL or SIGSTOP. A row is right if every other
rank ended by itself and one of them named the rank. The last row runs two ranks under ``torchrun --max-restarts 1``,
kills one, and compares the losses with those of a run that nothing broke, to the last bit. The script fails if a row is
not right.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reporting.results import Record, save_records, write_results

RANKS, TIMEOUT_S, LIMIT_S = 3, 5.0, 90.0
PHASES = ("profile", "capture", "bind", "forward", "collective", "optimizer", "save", "own code")

SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import meshwright as mw
from meshwright.models import GPT

phase, sent, run = sys.argv[1:4]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def strike():
    if rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        print("struck", time.time(), file=sys.stderr, flush=True)
        os.kill(os.getpid(), int(sent))

def before(owner, name, when=lambda: True):
    real = getattr(owner, name)
    def striking(*args, **options):
        if when():
            strike()
        return real(*args, **options)
    setattr(owner, name, striking)

training = False
if phase == "profile":
    from meshwright.runtime.profiling import cluster_profile
    before(cluster_profile, "await_all_ranks")
    mw.profile()
elif phase == "capture":
    import meshwright.parallel as module
    before(module, "capture_padded")
elif phase == "bind":
    from meshwright.runtime.parameters.state import ParameterState
    before(ParameterState, "__init__")
elif phase == "forward":
    from meshwright.runtime.execution.chunk import BoundChunk
    before(BoundChunk, "run", lambda: training)
elif phase == "collective":
    before(dist, "all_reduce", lambda: training)
elif phase == "optimizer":
    before(torch.optim.AdamW, "step", lambda: training)
elif phase == "save":
    from meshwright.runtime.checkpoint import training_state
    before(training_state, "write_part")

torch.manual_seed(0)
tokens = torch.randint(256, (12, 33))
batch = tokens[:, :-1], tokens[:, 1:]
parallel = mw.parallelize(
    GPT(vocab=256, layers=3, hidden=64, heads=4, sequence=32), mw.Cluster.local(world), example_inputs=batch,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), strategy={"dp": world}, microbatches=2,
)
first = parallel.load_checkpoint(run)["step"] if mw.latest_checkpoint(run) else 0
for step in range(first, 8):
    training = step == 5
    if training and phase in ("own code", "restart"):
        strike()
    loss = float(parallel.train_step(*batch))
    if rank == 0:
        print("loss", step, loss.hex(), flush=True)
    if phase in ("restart", "unbroken") or (phase == "save" and step == 3):
        parallel.save_checkpoint(run, extra={"step": step + 1}, keep=2)
"""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def struck(phase: str, sent: signal.Signals, script: Path, folder: str) -> dict[str, Any]:
    """One run of which rank 1 is struck: a row of the table."""
    environment = {
        **os.environ, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1", "MESHWRIGHT_TIMEOUT_S": str(TIMEOUT_S),
    }  # fmt: skip
    command = [sys.executable, str(script), phase, str(int(sent)), f"{folder}/{phase}-{sent.name}"]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    until = time.time() + LIMIT_S
    others = [process for rank, process in enumerate(ranks) if rank != 1]
    while time.time() < until and any(process.poll() is None for process in others):
        time.sleep(0.05)
    ended, ended_by_themselves = time.time(), all(process.poll() is not None for process in others)
    for process in ranks:
        process.kill()
    told = [process.communicate()[1] for process in ranks]
    at = re.search(r"struck ([\d.]+)", told[1])
    words = " ".join(told[0::2])
    return {
        "phase": phase, "signal": sent.name, "seconds": ended - float(at[1]) if at else None,
        "right": bool(at) and ended_by_themselves and re.search(r"rank 1\b", words) is not None,
        "line": next((line.strip() for line in words.splitlines() if "rank 1" in line), words[-300:]),
    }  # fmt: skip


def restarted(script: Path, folder: str) -> dict[str, Any]:
    """A run that torchrun starts again, against one that nothing breaks: equal losses, to the last bit."""
    losses, seconds = [], 0.0
    for phase in ("unbroken", "restart"):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", str(script),
            phase, str(int(signal.SIGKILL)), f"{folder}/{phase}",
        ]  # fmt: skip
        begun = time.time()
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder, text=True, capture_output=True, timeout=180
        )
        seconds = time.time() - begun
        losses.append(dict(re.findall(r"loss (\d+) (\S+)", done.stdout)))
    same = losses[0] == losses[1] and len(losses[0]) == 8
    line = f"8 losses {'equal' if same else 'differ'} from those of a run without a break"
    return {"phase": "restart", "signal": "SIGKILL", "seconds": seconds, "right": same, "line": line}


def records(rows: list[dict[str, Any]]) -> list[Record]:
    """Seconds from the blow until the last of the others has ended; none where a row is not right."""
    within_s = TIMEOUT_S + 2
    return [
        Record(
            f"{row['signal']} in {row['phase']}", row["seconds"] if row["right"] else None, "s", 1, None,
            f"the time-out and 2 s: {within_s:.0f} s", within_s, note="" if row["right"] else row["line"],
        )
        for row in rows
        if row["phase"] != "restart"
    ]  # fmt: skip


def main() -> int:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one phase")
    parser.add_argument("--only", default=",".join([*PHASES, "restart"]), help="phases")
    parser.add_argument("--json", type=Path, default=Path("out/failures.json"), help="where the results go")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'phase':12} {'signal':8} {'ended after':>11}  right  what the others say")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        for phase in ["forward"] if options.quick else options.only.split(","):
            signals = (signal.SIGKILL,) if phase == "restart" else (signal.SIGKILL, signal.SIGSTOP)
            for sent in signals:
                row = restarted(script, folder) if phase == "restart" else struck(phase, sent, script, folder)
                rows.append(row)
                after = "never" if row["seconds"] is None else f"{row['seconds']:.1f} s"
                right = "yes" if row["right"] else "NO"
                print(f"{phase:12} {sent.name:8} {after:>11}  {right:5}  {row['line'][:150]}", flush=True)
                write_results(options.json, {"time_out_s": TIMEOUT_S, "ranks": RANKS, "rows": rows})
    save_records("failures", records(rows), options.quick)
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
