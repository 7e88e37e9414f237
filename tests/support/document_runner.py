"""The runner of a document's examples: a process forked from the server of the ranks, which has imported everything.
Commands and ranks of the document are forked from it in turn."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tests.support.document_blocks import blocks_of, commands_of
from tests.support.ranks import start_fork_server

__all__ = ["run_document"]


def run_document(document: Path, folder: Path, modules: Path, timeout_s: float) -> tuple[int | None, str]:
    """(exit status, or None if it took longer than ``timeout_s``; all that was printed) of the document's blocks, run
    from top to bottom in ``folder``. modules: a folder whose modules they may import."""
    start_fork_server()
    printed = folder / ".printed"
    process: Any = multiprocessing.get_context("forkserver").Process(
        target=_run, args=(document, folder, modules, list(sys.path), printed)
    )
    process.start()
    process.join(timeout_s)
    if (status := process.exitcode) is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return status, printed.read_text()


def _run(document: Path, folder: Path, modules: Path, search_path: list[str], printed: Path) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    os.environ["COLUMNS"] = "120"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(modules), os.environ.get("PYTHONPATH"))))
    sys.path[:] = [str(folder), str(modules), *search_path]
    output = os.open(printed, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(document.read_text()):
        where = f"{document.name}:{block.line + 1}"
        print("----", where, flush=True)
        if block.language == "console":
            for line in commands_of(block):
                _end([_command(shlex.split(line))], f"{where}: {line}")
            continue
        if "file" in block.words:
            Path(block.words["file"]).write_text(block.text)
        if "ranks" in block.words:
            _end(_on_ranks(block.words["file"], int(block.words["ranks"])), where)
        elif "file" not in block.words:
            exec(compile("\n" * block.line + block.text, str(document), "exec"), namespace)
        sys.stdout.flush()


def _start(run: Callable[[], object], arguments: list[str], **environment: str) -> int:
    """The process id of a fork that runs this as a program."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    status = 1
    try:
        os.environ.update(environment)
        sys.argv[:] = arguments
        run()
        status = 0
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _end(children: Iterable[int], what: str) -> None:
    """Wait for all; the first that fails ends the others, which would wait for it, and this process."""
    running = set(children)
    while running:
        child, status = os.wait()
        running.discard(child)
        if status:
            for other in running:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"{what} ended with {os.waitstatus_to_exitcode(status)}")


def _on_ranks(script: str, number: int) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number),
    }  # fmt: skip
    return [
        _start(lambda: runpy.run_path(script, run_name="__main__"), [script], RANK=str(r), LOCAL_RANK=str(r), **world)
        for r in range(number)
    ]


def _command(words: list[str]) -> int:
    if words[0] == "python":
        assert words[1] == "-m", words
        return _start(lambda: runpy.run_module(words[2], run_name="__main__"), words[2:])
    return _start(lambda: runpy.run_module("meshwright", run_name="__main__"), words)
