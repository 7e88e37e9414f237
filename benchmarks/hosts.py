"""Three hosts under torchrun: a slow link, lost packets, a host that is cut off, and one whose rank dies.

python benchmarks/hosts.py [--only "cut off,killed"] [--json out/hosts.json]

The hosts are network namespaces of this machine (Linux, root), with one rank and one torchrun each, which meet by its
c10d rendezvous. They train a small GPT, with a checkpoint at every second step. Losses are held against those of a run
on links of 1 Gbit/s that nothing disturbs, to the last bit; where a host is lost for good, the two that are left plan
anew, load the checkpoint, and go on within 1e-4. The script fails if a row is not right.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from network.links import Links, missing
from reporting.results import Record, save_records, write_results

HOSTS, STEPS, TIMEOUT_S, LIMIT_S = 3, 12, 8.0, 150.0
#: row → (bits/s, delay in seconds, loss)
NETWORKS = {
    "undisturbed": (1e9, 0.0, 0.0),
    "100 Mbit/s and 5 ms": (1e8, 0.005, 0.0),
    "1 % of packets lost": (1e8, 0.001, 0.01),
    "cut off": (1e9, 0.0, 0.0),
    "killed": (1e9, 0.0, 0.0),
    "one host fewer": (1e9, 0.0, 0.0),
}

#: torchrun notices a host that is gone after six seconds, and waits ten for more hosts than it needs
_RENDEZVOUS = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=10"

SCRIPT = """
import os, signal, subprocess, sys
import torch
import meshwright as mw
from meshwright.models import GPT

what, run, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
tokens = torch.randint(256, (12, 33))
batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
parallel = mw.parallelize(
    GPT(vocab=256, layers=3, hidden=64, heads=4, sequence=32), mw.Cluster.local(world), example_inputs=batch,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), strategy={"dp": world}, microbatches=2, zero=1,
)
first = parallel.load_checkpoint(run)["step"] if mw.latest_checkpoint(run) else 0
for step in range(first, steps):
    if step == 5 and os.environ["HOST"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if what == "cut off":
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            print("struck", flush=True)
        if what == "one host fewer":
            os.kill(os.getppid(), signal.SIGKILL)  # its torchrun, and so the host for the others
        if what in ("killed", "one host fewer"):
            os.kill(os.getpid(), signal.SIGKILL)
    loss = float(parallel.train_step(*batch))
    if rank == 0:
        print("loss", step, loss.hex(), flush=True)
    if step % 2:
        parallel.save_checkpoint(run, extra={"step": step + 1}, keep=2)
"""


def trained(what: str, script: Path, folder: Path) -> dict[str, Any]:
    """One run: its losses, seconds, and what each host said."""
    rate, delay_s, loss = NETWORKS[what]
    said, begun = [], time.time()
    with Links(HOSTS, rate, delay_s, loss) as links:
        jobs = []
        for host in range(HOSTS):
            words = [
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1",
                "--nnodes", f"{HOSTS - (what == 'one host fewer')}:{HOSTS}", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"{links.address(0)}:29400",
                "--rdzv-id", "hosts", "--rdzv-conf", f"is_host={int(host == 0)},{_RENDEZVOUS}",
                "--local-addr", links.address(host), "--log-dir", str(folder / "logs"),
                "--max-restarts", "1" if what in ("killed", "one host fewer") else "0",
                str(script), what, str(folder / what.replace(" ", "-")), str(STEPS),
            ]  # fmt: skip
            environment = {
                **os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
                "MESHWRIGHT_HOST": links.namespace(host), "MESHWRIGHT_TIMEOUT_S": str(TIMEOUT_S), "HOST": str(host),
            }  # fmt: skip
            output = open(folder / f"{host}", "w+")  # noqa: SIM115 - read when the job has ended
            jobs.append(
                (subprocess.Popen(links.command(host, words), env=environment, stdout=output, stderr=output), output)
            )
        until, struck, ended = begun + LIMIT_S, 0.0, [0.0] * HOSTS
        while time.time() < until and not all(ended):
            for host, (job, output) in enumerate(jobs):
                # the torchrun of a host that is cut off waits for its rendezvous: its rank must have ended
                out = "meshwright: rank 1 stops" in Path(output.name).read_text() and what == "cut off" and host == 1
                if not ended[host] and (out or job.poll() is not None):
                    ended[host] = time.time()
                if not struck and "struck" in Path(output.name).read_text():
                    struck = time.time()
            time.sleep(0.1)
        for job, _ in jobs:
            job.kill()
        for _, output in jobs:
            output.seek(0)
            said.append(output.read())
            output.close()
    losses = {int(step): value for step, value in re.findall(r"loss (\d+) (\S+)", "".join(said))}
    return {
        "what": what, "losses": losses, "said": said, "seconds": time.time() - begun, "ended": all(ended),
        "after_s": max(ended) - struck if struck and all(ended) else None,
    }  # fmt: skip


def judged(row: dict[str, Any], expected: dict[int, str]) -> tuple[bool, str]:
    """Whether a run is as it must be, and why."""
    if row["what"] == "cut off":
        lines = [line for text in (row["said"][0], row["said"][2]) for line in text.splitlines()]
        named = next((line.strip() for line in lines if line.startswith("meshwright") and "rank" in line), "")
        right = row["after_s"] is not None and "rank" in named
        return right, f"all ranks ended after {row['after_s'] or float('nan'):.1f} s: {named[:150]}"
    found = {step: float.fromhex(value) for step, value in row["losses"].items()}
    if row["what"] == "one host fewer":  # two ranks add up in another order than three
        near = len(found) == STEPS and all(
            abs(value / float.fromhex(expected[step]) - 1) < 1e-4 for step, value in found.items()
        )
        return near and row[
            "ended"
        ], f"{len(found)} losses, the last ones of two ranks, {'' if near else 'NOT '}within 1e-4"
    same = row["losses"] == expected and len(expected) == STEPS
    return same and row["ended"], f"{len(row['losses'])} losses {'equal' if same else 'NOT equal'}"


def main() -> int:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NETWORKS), help="rows, beside the undisturbed one")
    parser.add_argument("--json", type=Path, default=Path("out/hosts.json"), help="where the results go")
    options = parser.parse_args()
    if why := missing():
        print(why)
        return 0
    names, rows, expected = ["undisturbed", *options.only.split(",")], list[dict[str, Any]](), dict[int, str]()
    print(f"{'network or blow':20} {'seconds':>7}  right  what came of it")
    for what in dict.fromkeys(names):
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "train.py"
            script.write_text(SCRIPT)
            row = trained(what, script, Path(folder))
        expected = expected or row["losses"]
        right, words = judged(row, expected)
        print(f"{what:20} {row['seconds']:>7.1f}  {'yes' if right else 'NO':5}  {words}", flush=True)
        if not right:
            print(*(text[-1500:] for text in row["said"]), sep="\n---\n")
        rows.append({**row, "right": right, "words": words})
    write_results(options.json, {"rows": rows})
    records = [Record(f"{row['what']}: right", float(row["right"]), "", 0, even=1, better="more") for row in rows]
    records += [
        Record("cut off: all ranks have ended after", row["after_s"], "s", 1, None,
               f"twice the time-out and 2 s: {2 * TIMEOUT_S + 2:.0f} s", 2 * TIMEOUT_S + 2)
        for row in rows if row["what"] == "cut off"
    ]  # fmt: skip
    save_records("hosts", records, quick=len(rows) < len(NETWORKS))
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
