"""Cuts into stages of one chunk each, by the paths through their schedule.

The actions and messages of a *path* follow on each other, so that a step takes at least n · x, with x the seconds of
the stages' actions, of their messages and of their ends of a step, and n how often each of them is on the path. That is
so whatever the cuts, which x depends on. Cuts are sought whose longest path is the least of those paths that are known:
runs of neighbouring borders are moved by a layer, as long as that helps. Then the schedule is played. Either it takes
as long as is said, or its longest path is a new one, and the search goes on (as the rounds of ``cutting_planes``).
It begins from several cuts, and knows on each way what it learned on those before.

Cuts found so let stages wait less, where messages are slow: there they hold few layers. Regular pipelines are cut so
(``regular_solver``), and the fastest irregular one of a table is cut again (``stage_dp.cut_again``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from .families import generate, is_split
from .simulate import longest_path
from .table import PHASE_SHARE, Floats, Ints

__all__ = ["CutCosts", "cuts_by_paths"]

_PLAYS = 40  # times that a schedule is played
_IN_VAIN = 12  # of these after the best one
_WORTH = 1e-4  # of the seconds: what counts as better
_TIE = 1e-9  # of the seconds: what rounding may be
_PERIODS = 4  # microbatches per stage of the schedule that is played


@dataclass(frozen=True, eq=False)
class CutCosts:
    """Seconds of stages: pace and step [stages, L, L + 1] per microbatch and at the end of a step, inf where a stage
    cannot hold these layers; ahead and back [stages − 1, L + 1] of the messages across each border; end [stages] at
    the end of a step beside."""

    pace: Floats
    step: Floats
    ahead: Floats
    back: Floats
    end: Floats

    def of(self, cuts: Ints) -> Floats:
        """The seconds under these cuts [stages + 1]: paces, messages ahead, messages back, ends."""
        stage, first, end, borders = np.arange(len(self.end)), cuts[:-1], cuts[1:], cuts[1:-1]
        messages = self.ahead[stage[:-1], borders], self.back[stage[:-1], borders]
        return np.concatenate([self.pace[stage, first, end], *messages, self.step[stage, first, end] + self.end])


def cuts_by_paths(
    schedule: str, m: int, costs: CutCosts, starts: Sequence[Sequence[int]], most_s: float = inf
) -> list[int]:
    """The cuts of the least seconds that were found from ``starts`` on, while there may be such of less than
    ``most_s``."""
    best, best_s, stages = tuple(starts[0]), inf, len(costs.end)
    each = np.eye(stages)
    paths = np.concatenate([m * each, np.zeros((2 * stages - 2, stages)), each])  # each stage's own work
    played = set[tuple[int, ...]]()
    for start in starts:
        cuts, in_vain = tuple(start), 0
        while in_vain < _IN_VAIN and len(played) < _PLAYS:
            if cuts not in played:
                played.add(cuts)
                seconds = costs.of(np.array(cuts))
                paths = np.concatenate([paths, _longest_path(schedule, m, seconds, stages)[:, None]], axis=1)
                step_s = float((seconds @ paths).max())
                in_vain = 0 if step_s < best_s * (1 - _WORTH) else in_vain + 1
                if step_s < best_s:
                    best, best_s = cuts, step_s
            cuts, least_s = _descended(costs, cuts, paths)
            if cuts in played or least_s >= min(most_s, best_s * (1 - _WORTH)):
                break
    return list(best)


def _longest_path(schedule: str, m: int, seconds: Floats, stages: int) -> Floats:
    """How often each of these seconds is on the longest path of a step. What a long step adds to one of fewer
    microbatches is that by which two of those differ."""

    def played(count: int) -> Floats:
        pace, ahead, back, end = np.split(seconds, np.cumsum([stages, stages - 1, stages - 1]))
        shares = dict.fromkeys("FIW", PHASE_SHARE) if is_split(schedule) else {"F": PHASE_SHARE, "B": 1 - PHASE_SHARE}
        by_kind = dict.fromkeys("FBIW", [0.0] * stages)
        by_kind |= {kind: (share * pace).tolist() for kind, share in shares.items()}
        edges = list(pairwise(range(stages)))
        path = longest_path(
            generate(schedule, stages, count), by_kind, dict(zip(edges, ahead)), dict(zip(edges, back)), end.tolist()
        )
        paces = [sum(share * path[kind, stage] for kind, share in shares.items()) for stage in range(stages)]
        messages = [path[way, edge] for way in ("forward", "backward") for edge in edges]
        return np.array([*paces, *messages, *(path["end", stage] for stage in range(stages))], dtype=np.float64)

    short = _PERIODS * stages + m % stages
    if m <= short + stages:
        return played(m)
    first = played(short)
    return first + (played(short + stages) - first) * ((m - short) / stages)


def _descended(costs: CutCosts, cuts: Sequence[int], paths: Floats) -> tuple[tuple[int, ...], float]:
    """Cuts from which no move of neighbouring borders by a layer makes the longest of these paths shorter, and that."""
    now = np.array(cuts)
    now_s = float((costs.of(now) @ paths).max())
    while True:
        least_s, sign, first, end = min(_least_move(costs, now, paths, sign) for sign in (-1, 1))
        if not least_s < now_s * (1 - _TIE):
            return tuple(now.tolist()), now_s
        now[first:end] += sign
        now_s = least_s


def _least_move(costs: CutCosts, cuts: Ints, paths: Floats, sign: int) -> tuple[float, int, int, int]:
    """(seconds, sign, first, end): the longest path after the best move of borders [first, end) by a layer, up or down.

    A move of borders i + 1 to j changes the end of stage i, the beginning of stage j, and both of all between, whose
    sums are differences of two sums from the first stage on."""
    stage, layers = np.arange(len(costs.end)), costs.pace.shape[1]
    first, end, borders = cuts[:-1], cuts[1:], cuts[1:-1]
    on_pace, on_ahead, on_back, on_end = np.split(paths, np.cumsum([len(stage), len(borders), len(borders)]))

    def changed(i: Ints, j: Ints) -> tuple[Floats, Ints]:
        """[stages, paths] what stages with layers [i, j) add, and where they cannot be."""
        there = np.clip(i, 0, layers - 1), np.clip(j, 0, layers)
        now, then = ((stage, first, end), (stage, *there))
        possible = (i >= 0) & (i < j) & (j <= layers) & np.isfinite(costs.pace[then])
        pace, step = (np.where(possible, some[then] - some[now], 0.0)[:, None] for some in (costs.pace, costs.step))
        return pace * on_pace + step * on_end, (~possible).astype(np.intp)

    (ended, no_end), (moved, no_move), (begun, no_begin) = (
        changed(first + i * sign, end + j * sign) for i, j in ((0, 1), (1, 1), (1, 0))
    )
    ahead, back = (some[stage[:-1], borders + sign] - some[stage[:-1], borders] for some in (costs.ahead, costs.back))
    until = np.concatenate([0 * moved[:1], np.cumsum(moved, axis=0)])
    none_until = np.concatenate([[0], np.cumsum(no_move)])
    sent = np.cumsum(np.concatenate([0 * moved[:1], ahead[:, None] * on_ahead + back[:, None] * on_back]), axis=0)
    i, j = np.triu_indices(len(stage), 1)
    seconds = costs.of(cuts) @ paths + ended[i] + until[j] - until[i + 1] + begun[j] + sent[j] - sent[i]
    possible = no_end[i] + none_until[j] - none_until[i + 1] + no_begin[j] == 0
    longest = np.where(possible, seconds.max(axis=1), inf)
    least = int(longest.argmin())
    return float(longest[least]), sign, int(i[least]) + 1, int(j[least]) + 1
