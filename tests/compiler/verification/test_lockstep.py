"""Devices as threads, in a process that was forked."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import os, threading
import torch
from meshwright.compiler.verification.lockstep import LockstepGroup
torch.set_num_threads(1)
torch.ones(100_000).sum()
wrong = 0
for _ in range(150):
    if (child := os.fork()) == 0:
        together = threading.Barrier(8)
        def device(comm):
            together.wait()
            torch.arange(70_000).float().add_(1)
        try:
            LockstepGroup((8,)).run(device)
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    wrong += os.waitpid(child, 0)[1] != 0
print("wrong", wrong)
"""


def test_devices_of_a_forked_process_do_not_race_for_its_thread_pool() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "wrong 0\n"
