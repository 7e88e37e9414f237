"""The page of a plan: the data of ``picture`` put into the templates of ``page/``, as one file that needs no network.

``page/shell.html`` has a slot ``{{name}}`` for each of the parts; the sections are those of ``page.html``, or of
``run.html``, the page of a run. Text of a plan (names of modules, notes, a cluster's name) reaches the page only as
JSON in a script element that is not run, with "<", ">" and "&" escaped. The scripts of the page set it as text, never
as markup.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...costmodel.files import write_atomically
from ..ir.graph import Graph
from ..pipeline.measured import MeasuredStep
from ..plan.plan import Plan
from .picture import picture

__all__ = ["filled", "notebook_html", "page_html", "to_html"]

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def to_html(
    plan: Plan,
    path: str | os.PathLike[str] | None = None,
    graph: Graph | None = None,
    trace: MeasuredStep | None = None,
    others: Sequence[Plan] = (),
) -> str:
    """The page of a plan, written to ``path`` where one is given; the arguments are those of ``picture``. The plan's
    own graph serves where none is given."""
    text = page_html(picture(plan, plan.graph if graph is None else graph, trace, others))
    if path is not None:
        write_atomically(path, text)
    return text


def page_html(document: Mapping[str, Any]) -> str:
    """The page that draws a document of ``picture``."""
    scripts = ("words.js", "timeline.js", "model.js", "page.js")
    return filled("page.html", f"Plan for {document['title']}", document, scripts)


def filled(sections: str, title: str, document: Mapping[str, Any], scripts: Sequence[str]) -> str:
    """The shell with these sections. title: plain text; document: the data that the scripts draw."""
    parts = {
        "title": html.escape(title),
        "body": _part(sections),
        "style": _part("page.css"),
        "data": re.sub(
            "[<>&\u2028\u2029]", lambda found: _ESCAPES[found[0]], json.dumps(document, separators=(",", ":"))
        ),
        "charts": _part("echarts.min.js"),
        "license": html.escape(_part("echarts.LICENSE")),
        "script": "\n".join(_part(name) for name in scripts),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("shell.html"))


def notebook_html(plan: Plan) -> str:
    """The page in a frame of its own, which shares nothing with the notebook around it. Choices of layers are left out
    as they take seconds."""
    text = html.escape(page_html(picture(plan)), quote=True)
    return (
        f'<iframe srcdoc="{text}" sandbox="allow-scripts" title="Picture of a plan" '
        'style="width:100%;height:760px;border:1px solid #8888"></iframe>'
    )


@cache
def _part(name: str) -> str:
    return Path(str(files(__package__) / "page" / name)).read_text(encoding="utf-8")
