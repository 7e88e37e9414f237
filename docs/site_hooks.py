"""Hooks of MkDocs: the reference pages, made from the code, and links and fences as the site needs them.

``reference-api.md`` lists the public names of the package with their docstrings, ``reference-cli.md`` the help of every
command. Documents outside of ``docs/`` to which pages link become pages of their own.
"""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: documents outside of this folder → their pages
OUTSIDE = {
    "README.md": "about.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    made = {"reference-api.md": api_page(), "reference-cli.md": cli_page()}
    made |= {page: (ROOT / path).read_text() for path, page in OUTSIDE.items()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text with links to pages of the site, and fences without the words that are for the tests."""
    source = page.file.src_uri
    inside_out = {page: path for path, page in OUTSIDE.items()}
    folder = Path("docs", source).parent if source not in inside_out else Path(inside_out[source]).parent
    depth = "../" * source.count("/")

    def moved(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        if re.match(r"[a-z]+:", target) or not target:
            return found[0]
        path = _normal(folder / target)
        anchor = f"#{anchor}" if anchor else ""
        if path in OUTSIDE:
            return f"{found[1]}{depth}{OUTSIDE[path]}{anchor})"
        if path.startswith("docs/") and path.endswith((".md", ".svg", ".png")):
            return f"{found[1]}{depth}{path.removeprefix('docs/')}{anchor})"
        return f"{found[1].removesuffix('](')}]({depth}about.md)"  # a file of the repository

    markdown = re.sub(r"(!?\[[^\]]*\]\()([^)\s]+)\)", moved, markdown)
    return re.sub(r"^(\s*```\w+) [^\n`]*$", r"\1", markdown, flags=re.MULTILINE)


def _normal(path: Path) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def api_page() -> str:
    """The public names, each by mkdocstrings."""
    meshwright = importlib.import_module("meshwright")
    homes = meshwright._HOMES
    lines = ["# Python", "", "The public names of `meshwright`, and what they return."]
    for name in sorted(meshwright.__all__, key=lambda name: (name[0].isupper(), name)):
        lines += ["", f"::: meshwright.{homes[name]}.{name}"]
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """The help of every command."""
    parser = importlib.import_module("meshwright.cli.commands")._parser()
    lines = ["# Command line", "", "```text", parser.format_help().rstrip(), "```"]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                lines += ["", f"## meshwright {name}", "", "```text", command.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"
