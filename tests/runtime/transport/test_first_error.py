"""What ranks print when one of them fails: one block for the first error, one line from each other."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.runtime.transport.launch import spawn_local

from tests.support.paths import ROOT
from tests.support.small_net import BATCHES, net, sgd

SCRIPT = """
import os, sys
import torch
import meshwright as mw
from meshwright.runtime.execution.chunk import BoundChunk

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)
    def forward(self, x, y):
        if sys.argv[1] == "capture" and x.sum() > 0:
            x = -x
        return ((self.down(self.up(x).relu()) - y) ** 2).mean()

def fail(*rest):
    raise RuntimeError("no luck in this forward")

rank = int(os.environ["RANK"])
x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
parallel = mw.parallelize(Net(), mw.Cluster.local(2), example_inputs=(x, y), strategy="dp2", microbatches=2,
                          optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
parallel.train_step(x, y)
if sys.argv[1] == "forward" and rank == 1:
    BoundChunk.run = fail
if sys.argv[1] == "exit" and rank == 1:
    os._exit(3)
parallel.train_step(x, y)
"""

CASES = {
    "capture": ("rank 0 failed first", r"CaptureError: \S*train.py:\d+: `if sys.*torch.where", "rank 1 stops, because"),
    "forward": ("rank 1 failed first", "RuntimeError: no luck in this forward", "rank 0 stops, because"),
    "exit": ("rank 0 lost a peer", "PeerError: .* got nothing from or through to rank 1, which may have died", None),
}  # fmt: skip


def start(script: Path, case: str) -> subprocess.Popen[str]:
    """Both ranks of ``script``. torchrun starts them where all ranks know the error; where they find out one after
    another its agent would end the second as soon as it sees the first one's end, so a shell starts them."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MESHWRIGHT_SHARED_MEMORY": "0"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(script), case]
    if case != "capture":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environment |= {"MASTER_PORT": str(free.getsockname()[1])}
        environment |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        rank = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))} {case}"
        command = ["sh", "-c", f"RANK=0 LOCAL_RANK=0 {rank} & RANK=1 LOCAL_RANK=1 {rank}; ended=$?; wait; exit $ended"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_the_first_error_is_one_block_and_one_line_elsewhere(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    runs = {case: start(script, case) for case in CASES}
    for case, run in runs.items():
        _, printed = run.communicate(timeout=120)
        assert run.returncode != 0, case
        mine = "\n".join(line for line in printed.splitlines() if "torch/distributed/elastic" not in line)
        verdict, first, other = CASES[case]
        assert mine.count("all ranks stop") == 1, (case, mine)
        assert f"meshwright: {verdict}, all ranks stop" in mine, (case, mine)
        assert re.search(first, mine), (case, mine)
        assert mine.split('File "<frozen runpy>"')[0].count("Traceback") <= 2, mine  # the agent's own is the second
        if other is not None:
            (line,) = [line for line in mine.splitlines() if other in line]
            assert verdict in line
            assert re.search(first, line), (case, line)
        if case == "capture":
            assert "torch/export" not in mine
            assert "_dynamo" not in mine


# ---- errors that are caught


def both_fail_then_train() -> tuple[bool, bool]:
    """One rank: errors that all ranks raise and catch are forgotten."""
    parallel = mw.parallelize(net(), mw.Cluster.local(2), example_inputs=BATCHES[0], strategy="dp2", optimizer=sgd)
    parallel.train_step(*BATCHES[0])
    with pytest.raises(ValueError, match="5"):
        parallel.train_step(*(x[:5] for x in BATCHES[0]))
    loss = parallel.train_step(*BATCHES[1])
    store: Any = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    dist.barrier()
    return bool(torch.isfinite(loss)), store.get("meshwright/first_error") == b""


def fail_alone() -> None:
    """One rank of ``spawn_local``: rank 1 fails, and rank 0 because of it."""
    parallel = mw.parallelize(net(), mw.Cluster.local(2), example_inputs=BATCHES[0], strategy="dp2", microbatches=2)
    parallel.forward_backward(*BATCHES[0])
    if dist.get_rank() == 1:
        raise KeyError("of rank 1 alone")
    parallel.forward_backward(*BATCHES[0])


def test_spawned_ranks_raise_the_first_error() -> None:
    with pytest.raises(RuntimeError, match="rank 1 failed: KeyError: 'of rank 1 alone'"):
        spawn_local("tests.runtime.transport.test_first_error:fail_alone", 2, timeout_s=60)


@pytest.mark.ranks
def test_errors_that_all_catch_are_forgotten(ranks: Any) -> None:
    for finite, forgotten in ranks.run(2, both_fail_then_train):
        assert finite
        assert forgotten
