"""Sends are settled by later messages only."""

from __future__ import annotations

import itertools

import pytest
from meshwright.compiler.pipeline.families import generate
from meshwright.runtime.execution.boundary_metadata import find_settled_sends


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_sends_are_settled_only_by_later_messages(name: str) -> None:
    schedule = generate(name, 4, 16)
    edges = [((a, 0), (b, 0)) for a, b in ((0, 1), (1, 2), (2, 3), (0, 3))]
    for stage in range(4):
        seen: set[int] = set()
        held = most_held = 0
        for index, done in enumerate(find_settled_sends(schedule.actions, stage, edges, edges[:3])):
            assert all(earlier < index for earlier in done)
            assert not seen & set(done)
            seen |= set(done)
            sends = stage < 3 if schedule.actions[stage][index].kind == "F" else stage > 0
            held += sends - len(done)
            most_held = max(most_held, held)
        # stage 3 never answers stage 0 (nothing goes back along their edge); it is heard of through the others
        assert most_held <= (8 if name == "1f1b" else 17), (stage, most_held)


# ---- the parts
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v"])
def test_sends_of_chunks_are_settled_by_later_messages(schedule: str) -> None:
    made = generate(schedule, 4, 9)
    places = made.places()
    edges = [(a, b) for a, b in itertools.pairwise(places) if a[0] != b[0]]
    for stage in range(4):
        found = find_settled_sends(made.actions, stage, edges, edges)
        done = [index for row in found for index in row]
        assert len(set(done)) == len(done)
        assert all(earlier < index for index, row in enumerate(found) for earlier in row)
        row = made.actions[stage]
        assert all(row[index].kind != "W" for index in done)
        assert len(done) > len(row) // 4
