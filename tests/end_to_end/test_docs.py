"""Every example in the README and in docs/ is run, a file in one namespace from top to bottom, in an empty folder.

A fenced block is run by the first words after the fence::

    python                      in the file's namespace
    python file=train.py        written to that file
    python ranks=2 file=…       … and run by so many local ranks, as torchrun would
    console                     every line that starts with "$ meshwright" or "$ python"

Other blocks are text. ``docs/examples/*.py`` are compiled here and run by the documents that show them.
"""

from __future__ import annotations

import json
import py_compile
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.document_blocks import FENCE, blocks_of
from tests.support.document_runner import run_document
from tests.support.paths import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(
    "path", [p for p in DOCUMENTS if blocks_of(p.read_text())], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_the_examples_of_a_document_run(path: Path, tmp_path: Path) -> None:
    status, printed = run_document(path, tmp_path, ROOT / "docs" / "examples", timeout_s=180)
    assert status == 0, printed[-6000:]


@pytest.mark.parametrize("name", ["pictures.py", "gallery.py"])
def test_pictures_are_what_the_code_draws(name: str) -> None:
    script = [sys.executable, str(ROOT / "docs" / name), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "examples").glob("*.py")), ids=lambda p: p.name)
def test_an_example_is_a_program(path: Path, tmp_path: Path) -> None:
    py_compile.compile(str(path), cfile=str(tmp_path / "out.pyc"), doraise=True)
    shown = [document.name for document in DOCUMENTS if path.name in document.read_text()]
    assert shown, f"no document speaks of {path.name}"


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "examples").glob("*.ipynb")), ids=lambda p: p.name)
def test_the_cells_of_a_notebook_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)  # it is kept as it was written
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
    assert "<iframe" in names["plan"]._repr_html_()  # type: ignore[attr-defined]


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
