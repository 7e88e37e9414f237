"""The fenced blocks of a document that are run."""

from __future__ import annotations

import re
from dataclasses import dataclass

FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the words after it, where its first line stands, and its text."""

    language: str
    words: dict[str, str]
    line: int
    text: str


def blocks_of(document: str) -> list[Block]:
    """The fenced blocks that are run, in order."""
    found = []
    for match in FENCE.finditer(document):
        words = dict(word.split("=", 1) for word in match[2].split() if "=" in word)
        line = document.count("\n", 0, match.start(3))
        found.append(Block(match[1], words, line, match[3]))
    return [block for block in found if block.language in ("python", "console")]


def commands_of(block: Block) -> list[str]:
    """The commands of a console block, continued lines joined."""
    text = block.text.replace("\\\n", " ")
    return [line[2:] for line in text.splitlines() if line.startswith(("$ meshwright", "$ python"))]
