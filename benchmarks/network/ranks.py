"""One world of ranks over shaped links, a rank per namespace; as a script, what each of these ranks runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.runtime.transport.launch import ensure_initialized, leave, resolve

from .links import Links

__all__ = ["EVERY_LINK", "FAR_LINKS", "LINKS", "run_over_links"]

#: name → bits per second up and down, seconds of delay one way
LINKS: dict[str, tuple[float, float]] = {"gigabit": (1e9, 0.0), "slow": (1e8, 0.010)}
#: the same, of a wide area
FAR_LINKS: dict[str, tuple[float, float]] = {"hundred": (1e8, 0.0), "far": (1e8, 0.050)}
#: all of them, and "loopback": all ranks in one namespace, which nobody else uses
EVERY_LINK: dict[str, tuple[float, float]] = {"loopback": (0.0, 0.0), **LINKS, **FAR_LINKS}


def run_over_links(path: str, arguments: Sequence[Any], ranks: int, links: str, timeout_s: float) -> Any:
    """What ``"module:function"`` returns on rank 0 of a world over ``links``; arguments and result travel as JSON.

    OSError where this machine cannot shape links, RuntimeError if a rank fails, TimeoutError.
    """
    rate, delay_s = EVERY_LINK[links]
    alone = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks)}
    shaped = Links(ranks, rate, delay_s) if rate else Links(1, 1e9)
    with tempfile.TemporaryDirectory(prefix="meshwright-links-") as folder, shaped as made:
        task, answer = Path(folder) / "task.json", Path(folder) / "answer.json"
        task.write_text(json.dumps({"path": path, "arguments": list(arguments)}))
        words = [sys.executable, "-P", "-m", "network.ranks", str(task), str(answer)]
        here = str(Path(__file__).parents[1])
        path_of = {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
        if rate:
            processes = [made.start(rank, words, path_of) for rank in range(ranks)]
        else:
            each = [{**path_of, **alone, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
            processes = [made.start(0, words, environment) for environment in each]
        try:
            _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return json.loads(answer.read_text())


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            raise RuntimeError(f"rank {failed[0]} over shaped links failed; its message stands above")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks over shaped links did not finish in {timeout_s:g} s")
        time.sleep(0.1)
    if failed := [rank for rank, process in enumerate(processes) if process.poll()]:
        raise RuntimeError(f"rank {failed[0]} over shaped links failed; its message stands above")


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    rank, _ = ensure_initialized()
    result = resolve(task["path"])(*task["arguments"])
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
