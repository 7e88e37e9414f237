"""Every example in the README and in docs/ is run, a file in one namespace from top to bottom, in an empty folder.

A fenced block is run by the first words after the fence::

    python                      in the file's namespace
    python file=train.py        written to that file
    python ranks=2 file=…       … and run by so many local ranks, as torchrun would
    console                     every line that starts with "$ meshwright" or "$ python"

Other blocks are text. ``docs/examples/*.py`` are compiled here and run by the documents that show them.
"""

from __future__ import annotations

import os
import py_compile
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.document_blocks import FENCE, blocks_of
from tests.support.paths import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


# Runs in a process of its own: one namespace for all plain blocks of a document. Commands and ranks are forked from it,
# since importing torch takes longer than most of them.
RUNNER = """
import os, runpy, shlex, signal, socket, sys, traceback
from pathlib import Path
sys.path.append({root!r})
import meshwright
from tests.support.document_blocks import blocks_of, commands_of

def start(run, arguments, **environment):
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

def end(children, what):
    running = set(children)
    while running:
        child, status = os.wait()
        running.discard(child)
        if status:
            for other in running:  # they would wait for this one
                os.kill(other, signal.SIGKILL)
            sys.exit(f"{{what}} ended with {{os.waitstatus_to_exitcode(status)}}")

def on_ranks(script, number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(number), LOCAL_WORLD_SIZE=str(number))
    run = lambda: runpy.run_path(script, run_name="__main__")
    return [start(run, [script], RANK=str(r), LOCAL_RANK=str(r), **world) for r in range(number)]

def command(words):
    if words[0] == "python":
        assert words[1] == "-m", words
        return start(lambda: runpy.run_module(words[2], run_name="__main__"), words[2:])
    return start(lambda: runpy.run_module("meshwright", run_name="__main__"), words)

document, namespace = Path({path!r}), dict(__name__="__main__")
for block in blocks_of(document.read_text()):
    where = f"{{document.name}}:{{block.line + 1}}"
    print("----", where, flush=True)
    if block.language == "console":
        for line in commands_of(block):
            end([command(shlex.split(line))], f"{{where}}: {{line}}")
        continue
    if "file" in block.words:
        Path(block.words["file"]).write_text(block.text)
    if "ranks" in block.words:
        end(on_ranks(block.words["file"], int(block.words["ranks"])), where)
    elif "file" not in block.words:
        exec(compile("\\n" * block.line + block.text, str(document), "exec"), namespace)
"""


@pytest.mark.parametrize(
    "path", [p for p in DOCUMENTS if blocks_of(p.read_text())], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_the_examples_of_a_document_run(path: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "docs" / "examples"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    script = RUNNER.format(root=str(ROOT), path=str(path))
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-6000:]


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "examples").glob("*.py")), ids=lambda p: p.name)
def test_an_example_is_a_program(path: Path, tmp_path: Path) -> None:
    py_compile.compile(str(path), cfile=str(tmp_path / "out.pyc"), doraise=True)
    shown = [document.name for document in DOCUMENTS if path.name in document.read_text()]
    assert shown, f"no document speaks of {path.name}"


def anchors_of(document: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]:
        text = FENCE.sub("", document.read_text())
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
            if "://" in target:
                continue
            path = document.parent / target if target else document
            assert path.exists(), f"{document.name} links to {target}, which is not there"
            if anchor:
                assert anchor in anchors_of(path), f"{document.name} links to {target}#{anchor}, which is not there"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert [page for page in pages if f"({page})" not in index] == []
