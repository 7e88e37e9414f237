"""Writes ``docs/gallery.md`` and its pictures: ``make pictures``. The plans of built-in models are those that
``tests/golden_plans`` has recorded, and holds the search to.

``python docs/gallery.py --check`` writes nothing; exit status 1 if something is not what it would be.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from pictures import IMAGES, KINDS, box, document, text, write_or_check

RECORDED = Path(__file__).parents[1] / "tests" / "golden_plans"
PAGE = Path(__file__).with_name("gallery.md")
WIDTH, BAR, ROW = 760, 250, 22
HEAD = """# A gallery of plans

What the search finds for built-in models on clusters of data sheets, optimizer AdamW, all else open. Each row of a
picture is a stage, or stages that are alike: on the left what it does during the step (forward blue, backward orange,
once per step green; the rest is waiting), on the right its memory. Each text is the beginning of what the command
prints. `make pictures` writes this page, from plans to which the tests hold the search.

"""


def alike(stage: dict[str, Any]) -> tuple[Any, ...]:
    """What stages that share a row agree in."""
    layers = sum(chunk["layers"][1] - chunk["layers"][0] for chunk in stage["chunks"])
    busy = tuple(float(f"{seconds:.2g}") for seconds in stage["forward_backward_step_s"])
    return len(stage["devices"]), tuple(stage["mesh"]), layers, busy


def rows(plan: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(words, stage) of each row: stages beside each other that are alike are one."""
    found = []
    for _, same in groupby(enumerate(plan["stages"]), key=lambda pair: alike(pair[1])):
        numbers, stages = zip(*same)
        devices, mesh, layers, _ = alike(stages[0])
        name = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]}–{numbers[-1]}"
        lies = " × ".join(map(str, mesh)) or "1"
        found.append((f"{name}: {devices} devices as {lies}, {layers} layers", stages[0]))
    return found


def picture(name: str, plan: dict[str, Any]) -> str:
    """The stages of a plan: seconds and bytes."""
    lines, step_s, m = rows(plan), plan["step_s"], plan["microbatches"]
    most = max(sum(stage["memory_bytes"]) for _, stage in lines)
    left, right = 290, 290 + BAR + 20
    parts = [
        text(left, 16, f"forward, backward, once per step: {step_s:.3g} s", "quiet"),
        text(right, 16, f"memory, at most {most / 2**30:.3g} GiB", "quiet"),
    ]
    for number, (words, stage) in enumerate(lines):
        y = 26 + ROW * number
        forward_s, backward_s, once_s = stage["forward_backward_step_s"]
        parts += [text(8, y + 12, words), box(left, y, BAR, ROW - 6, look="idle")]
        x = float(left)
        for kind, seconds in (("F", m * forward_s), ("B", m * backward_s), ("W", once_s)):
            parts.append(box(x, y, BAR * seconds / step_s, ROW - 6, KINDS[kind]))
            x += BAR * seconds / step_s
        held = sum(stage["memory_bytes"])
        parts.append(box(right, y, (WIDTH - right - 10) * held / most, ROW - 6, "#0072b2"))
    return document(parts, WIDTH, 30 + ROW * len(lines), f"The stages of {name}")


def section(name: str, command: str, words: list[str]) -> str:
    """A plan of the page."""
    head = "\n".join(words[1 : words.index("", 1)])
    return f"## {name}\n\n![The stages of {name}](images/gallery-{name}.svg)\n\n```text\n$ {command}\n{head}\n```\n"


def documents() -> dict[Path, str]:
    """The page and its pictures."""
    made, sections = dict[Path, str](), []
    for path in sorted(RECORDED.glob("large-*.json")):
        record = json.loads(path.read_text())
        plan, question = record["decisions"]["plans"][0], record["question"]
        name, cluster = question["model"]["name"], question["cluster"]["text"]
        made[IMAGES / f"gallery-{name}.svg"] = picture(name, plan)
        command = f"meshwright plan {name} --cluster {cluster} --global-batch {plan['global_batch']}"
        sections.append(section(name, command, record["words"]["explain"]))
    return {**made, PAGE: HEAD + "\n".join(sections)}


if __name__ == "__main__":
    sys.exit(write_or_check(documents()))
