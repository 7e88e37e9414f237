"""Planning questions have the answers that were recorded, to all digits; see ``record.py``."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.golden_plans.answers import answer, differences
from tests.golden_plans.questions import BY_NAME, LARGE, QUICK
from tests.golden_plans.record import FOLDER, PARTS, recorded

NAMES = [question.name for question in QUICK]


@cache
def found(name: str) -> dict[str, Any]:
    return answer(BY_NAME[name])


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_decisions_are_those_recorded(name: str) -> None:
    for part in ("question", "decisions"):
        assert differences(recorded(name)[part], found(name)[part]) == []


@pytest.mark.parametrize("name", NAMES)
def test_words_are_those_recorded(name: str) -> None:
    assert differences(recorded(name)["words"], found(name)["words"]) == []


def test_every_question_has_a_file_and_every_file_a_question() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(BY_NAME)
    assert len(BY_NAME) == len(QUICK) + len(LARGE)
    assert all(tuple(recorded(name)) == PARTS for name in BY_NAME)
