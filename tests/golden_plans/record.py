"""Plans that must stay as they are: the answers to planning questions, recorded to all digits, one JSON file each.

    python tests/golden_plans/record.py                    write the files of the quick questions anew
    python tests/golden_plans/record.py --check            plan them again and compare
    python tests/golden_plans/record.py --check --all      the large ones, too (published models: minutes)
    python tests/golden_plans/record.py --check gpt moe    these only

``test_golden_plans.py`` compares the quick questions (``questions.QUICK``) in some 75 CPU seconds; those of
``questions.LARGE`` (files ``large-*.json``) are compared here only. What a file has, and what it leaves out because it
varies, is in ``answers.py``.

A change that means to alter plans or words writes the files anew, and its diff shows what it did: a rename touches only
``words``. Whoever restructures the code writes nothing anew but words. Digits hold for the versions of torch, numpy and
ortools that ``constraints.txt`` pins.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # ``tests``

from tests.golden_plans.answers import answer, as_text, differences
from tests.golden_plans.questions import BY_NAME, LARGE, QUICK

__all__ = ["PARTS", "main", "path_of", "recorded"]

FOLDER = Path(__file__).parent
PARTS = ("question", "decisions", "words")
SHOWN = 12  # differences printed for each question


def path_of(name: str) -> Path:
    """The file of a question."""
    return FOLDER / f"{name}.json"


def recorded(name: str) -> dict[str, Any]:
    """What was recorded of a question."""
    found: dict[str, Any] = json.loads(path_of(name).read_text())
    return found


def main(arguments: list[str] | None = None) -> int:
    """Record or compare; the exit status is 1 where something differs."""
    parser = argparse.ArgumentParser(description="Record the answers to planning questions, or compare them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="questions (default: the quick ones)")
    parser.add_argument("--check", action="store_true", help="compare; write nothing")
    parser.add_argument("--all", action="store_true", help="the large questions, too")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that search; the same plans")
    parser.add_argument("--show", type=int, default=SHOWN, metavar="N", help="differences to print per question")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.names) - set(BY_NAME):
        parser.error(f"a question is one of {', '.join(BY_NAME)}, but got {', '.join(sorted(unknown))}")
    chosen = asked.names or [question.name for question in (*QUICK, *(LARGE if asked.all else ()))]
    total = changed = 0.0
    for name in chosen:
        before = time.process_time()
        found = answer(BY_NAME[name], asked.workers)
        seconds = time.process_time() - before
        total += seconds
        if not asked.check:
            path_of(name).write_text(as_text(found) + "\n")
        lines = differences(recorded(name), found)
        changed += bool(lines)
        print(f"{seconds:7.2f} s  {name}  {'DIFFERS' if lines else 'same' if asked.check else 'written'}", flush=True)
        for line in lines[: asked.show]:
            print(f"             {line}")
        if len(lines) > asked.show:
            print(f"             and {len(lines) - asked.show} more")
    print(f"{total:7.2f} CPU seconds for {len(chosen)} questions, {changed:.0f} of which differ")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
