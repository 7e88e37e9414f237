"""What a stage waits for, against the clock of its pipeline."""

from itertools import pairwise

import numpy as np
import pytest
from meshwright.compiler.pipeline.families import generate, in_flight_formula, is_split
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.compiler.pipeline.waits import StageSeconds, end_lines, wait_lines

SCHEDULES = ["gpipe", "1f1b", "eager-1f1b", "zb-h1"]


def pipelines(schedule, count, until_end=False):
    """Of random pipelines, some with slow messages one way or slow actions of one kind: per stage, (seconds from the
    first forward to the last backward, or of any last action, what the lines say of them)."""
    rng, found = np.random.default_rng(7), []
    for _ in range(count):
        p, m = int(rng.integers(1, 6)), int(rng.integers(1, 14))
        scale = np.where(rng.random(5) < 0.4, 0.05, 1.0)  # of F, I, W, messages ahead and back
        f, i, w = (rng.uniform(0.5, 1.5, p) * one for one in scale[:3])
        x, y = (rng.uniform(0.0, 4.0, p - 1) * one for one in scale[3:])
        b = i + w
        edges = list(pairwise(range(p)))
        run = simulate(
            generate(schedule, p, m), f, b, dict(zip(edges, x)) or None, None, dict(zip(edges, y)) or None, w
        )
        trips = f + i if is_split(schedule) else f + b
        rest = 0.0
        for k in reversed(range(p)):
            row = run.timeline[k]
            seconds = max(end for _, end, action in row if until_end or action.kind != "W") - row[0][0]
            q = min(m, p - k) if is_split(schedule) else in_flight_formula(schedule, k, p, m)
            entry, returned = x[k - 1] if k else 0.0, y[k] if k < p - 1 else 0.0
            of = StageSeconds(f[k] + b[k], trips[k], f[k], b[k], entry, returned)
            known = end_lines(schedule, m, q, of) if until_end else wait_lines(schedule, m, q, k, of)
            lines = [slope * rest + constant for slope, constant in known]
            found.append((seconds, lines))
            rest += trips[k] + (x[k - 1] + y[k - 1] if k else 0.0)
    return found


@pytest.mark.parametrize(("schedule", "until_end"), [*((one, False) for one in SCHEDULES), ("zb-h1", True)])
def test_no_stage_is_done_sooner_than_its_lines_say(schedule, until_end):
    reached = {}
    for seconds, lines in pipelines(schedule, 600, until_end):
        assert max(lines) <= seconds * (1 + 1e-9)
        for n, line in enumerate(lines):
            key = len(lines), n
            reached[key] = max(reached.get(key, 0.0), line / seconds)
    assert min(reached.values()) > 0.99, reached  # one that is a little too high would be seen
