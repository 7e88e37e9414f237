"""Cost tables of stages per (submesh, microbatch count, memory multiplier), and the best pipelines on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from math import inf

import numpy as np
from torch.fx import Node

from ..cost.gradient_reduction import max_bucket_seconds, max_overlap, max_reduction_seconds, raise_by_overlap
from ..ir.spec import Spec, parse_pair
from ..pipeline.bounds import clock_seconds
from ..pipeline.families import PIPEDREAM, is_split
from ..pipeline.stage_dp import RankingLimits, cut_again, describe_pipeline, solve
from ..pipeline.table import InfeasiblePipeline, Mix, Pipeline, PipelineTable, StageChoice
from .lower_bounds import LARGEST_MULTIPLIER, NO_MULTIPLIER, SearchBounds
from .predict import Holder, loss_seconds, tied_seconds
from .space import Submesh
from .state import Candidate, Miss, SearchState, StageRow

__all__ = ["BOUND_TOLERANCE", "NO_LIMIT", "SearchTables", "tables_of"]

BOUND_TOLERANCE = 1e-3  # of the bound: candidates closer than that are as good as proven
MAX_VISITS = 300  # partial pipelines looked at to rank candidates
CANDIDATE_SLACK = 0.05  # by which other pipelines of a table may be slower than its best
NO_LIMIT = 1e9  # of the limit: no estimate is as large
EXPOSED_MESSAGES = (0.8, 0.2)  # fractions of a stage's messages that delay the next microbatch; both are tried


class SearchTables(SearchBounds):
    """Intervals by (submesh, microbatches, level), made for as many cases at once as are asked for."""

    def __init__(self, search: SearchState) -> None:
        super().__init__(search)
        self._reduced: dict[Submesh, list[float]] = {}  # see ``_reductions_until``

    # ---- pipelines

    def rows(self, m: int, prices: Sequence[tuple[float, float]], most_s: float = inf) -> list[tuple[Submesh, int]]:
        """(submesh, level) at these multipliers, with their tables made, of the submeshes of which some stage of a
        pipeline faster than ``most_s`` may be."""
        levels = dict.fromkeys(self.level(m, *one) for one in prices)
        worthwhile = [sub for sub in self.submeshes if m * self.least_pace(sub, m).min() < most_s]
        pairs = [(sub, level) for level in levels for sub in worthwhile]
        with self.search.timed("compose"):
            self.compose([(sub, m, level) for sub, level in pairs])
        return pairs

    def without_memory_limit(
        self, counts: Sequence[int], prices: Sequence[tuple[float, float]], most_s: float, top_k: int
    ) -> Iterator[Candidate]:
        """The best pipelines of these microbatch counts at each multiplier, without a memory limit."""
        schedule = self.search.space.base_schedule
        for m in counts:
            some = (NO_MULTIPLIER,) if self.fits_unconstrained(m) else (*prices, LARGEST_MULTIPLIER)
            pairs = self.rows(m, some, most_s)
            for level in dict.fromkeys(level for _, level in pairs):
                alone = [pair for pair in pairs if pair[1] == level]
                yield from self.solve(m, schedule, alone, most_s, top_k, NO_LIMIT, NO_LIMIT)

    def solve(
        self,
        m: int,
        schedule: str,
        pairs: Sequence[tuple[Submesh, int]],
        most_s: float = inf,
        top_k: int = 5,
        room: float = 1.0,
        slack: float = CANDIDATE_SLACK,
        stages: tuple[int, int | None] | None = None,
    ) -> list[Candidate]:
        """The best irregular pipelines of these (submesh, level) options, fastest first. room: as in ``table``; slack:
        as in ``stage_dp.solve``; stages: as in ``StageConstraints``.

        Messages delay 1F1B even where they overlap with work: a round trip over n stages, each of which waits for the
        next, takes their paces and the messages between them, n times per n microbatches. So a stage's messages count
        in its pace while pipelines are looked for; what is found is timed on a clock without that, and the fastest one
        is cut again.
        """
        search = self.search
        with search.timed("stages"):
            table = self.table(m, pairs, room) if pairs else None
            if table is None:
                return []
            messages = table.transfer_s + (0.0 if table.entry_s is None else table.entry_s)
            limits = RankingLimits(top_k, slack, MAX_VISITS, raise_by_overlap(most_s, m, search.cluster, self.hidden_s))
            cuts = self.cuts if stages is None else replace(self.cuts, stages=stages)
            cut = dict[tuple[StageChoice, ...], None]()
            for exposed in (0.0,) if is_split(schedule) else EXPOSED_MESSAGES:
                delayed = replace(table, pace_s=table.pace_s + exposed * messages)
                answer = solve(delayed, m, schedule, cuts, limits, explain=False)
                cut |= dict.fromkeys(one.stages for one in getattr(answer, "pipelines", ()))

            def clocked(stages: tuple[StageChoice, ...]) -> Candidate:
                return self.candidate(m, schedule, describe_pipeline(table, m, schedule, stages), pairs, table)

            found = sorted(map(clocked, cut), key=lambda candidate: candidate.clock_s)
            fastest = found[0].pipeline.stages if found else ()
            if len(fastest) > 1 and schedule != PIPEDREAM:  # where stages may wait
                again = cut_again(table, m, schedule, cuts, fastest, limits.most)
                found += [clocked(again)] if again not in cut else []
        return sorted(found, key=lambda candidate: candidate.clock_s)

    def candidate(
        self,
        m: int,
        schedule: str,
        pipeline: Pipeline,
        pairs: Sequence[tuple[Submesh, int]],
        table: PipelineTable,
        mixes: Sequence[Mix] = (),
    ) -> Candidate:
        """The candidate that this pipeline of a table is, with its rows. mixes: the options behind those of
        ``pairs``."""
        at = max(
            ((one.option, one.first_layer, one.end_layer) for one in pipeline.stages), key=lambda i: table.pace_s[i]
        )
        rows = self._rows(m, pipeline, pairs, mixes)
        beside, spared_s = self._beside(schedule, pipeline, rows)
        clock_s = clock_seconds(table, m, schedule, pipeline, beside)
        pace_s, once_s = float(table.pace_s[at]), float(table.step_s[at])
        reduced_s = max(self._max_reductions(schedule, pipeline, rows))
        # of one microbatch it costs as much to shard gradients, so a row may have few reductions where a stage has many
        most_s = once_s if m > 1 else inf
        hidden_s = min(max_overlap(self.search.cluster) * min(pace_s, reduced_s), most_s) + spared_s
        return Candidate(m, schedule, pipeline, rows, clock_s, pace_s, once_s, hidden_s)

    def _max_reductions(self, schedule: str, pipeline: Pipeline, rows: Sequence[StageRow]) -> list[float]:
        """The most seconds by device group that the reductions of its gradients take."""
        most_s = [0.0] * len(pipeline.peak_bytes)
        for stage, row, k in zip(pipeline.stages, rows, pipeline.homes(schedule)):
            until = self._reductions_until(row.submesh)
            most_s[k] += until[stage.end_layer] - until[stage.first_layer]
        return most_s

    def _reductions_until(self, sub: Submesh) -> list[float]:
        """By border the most seconds that the reductions of the gradients of all layers before it take there."""
        if sub not in self._reduced:
            pricer = self.search.pricer(sub.offsets[0], sub.shape)
            each = (max_reduction_seconds(pricer, some) for some in self._read)
            self._reduced[sub] = list(accumulate(each, initial=0.0))
        return self._reduced[sub]

    @cached_property
    def _read(self) -> list[list[Node]]:
        """By layer the parameters that it reads."""
        read: list[list[Node]] = [[] for _ in self.search.layering.layers]
        for node, layers in self.search.layering.readers(self.search.graph):
            for layer in layers:
                read[layer].append(node)
        return read

    def _beside(self, schedule: str, pipeline: Pipeline, rows: Sequence[StageRow]) -> tuple[list[float], float]:
        """(seconds by device group at the end of a step that cost tables do not have: of weights that several groups
        hold, and until everyone knows the loss; how much less that may be if all groups hold them as one does, for
        stages choose the layouts of shared weights anew)."""
        search, p = self.search, len(pipeline.peak_bytes)
        home = pipeline.homes(schedule)
        specs: list[dict[str, Spec]] = [{} for _ in range(p)]
        for stage, row, k in zip(pipeline.stages, rows, home) if p > 1 else ():
            here = range(stage.first_layer, stage.end_layer)
            if held := [node for node, layers in self.shared if any(layer in here for layer in layers)]:
                labels = row.labels(self._sharing, stage.first_layer, stage.end_layer)
                for node in held:
                    specs[k][node.meta["source"].name] = parse_pair(labels[node.name].partition(" ")[0]).value
        holders: dict[int, Holder] = {}
        for stage, row, k in zip(pipeline.stages, rows, home):
            devices = range(stage.device_offset, stage.device_offset + row.submesh.num_devices)
            holders[k] = Holder(devices, row.submesh.shape, specs[k])
        told = loss_seconds(search.graph, search.cluster, rows[-1].submesh.num_devices)

        def tied(common: Mapping[str, Spec]) -> list[float]:
            """Seconds by group if the weights of ``common`` lie so."""
            every = [
                one._replace(specs={name: common.get(name, spec) for name, spec in one.specs.items()})
                for _, one in sorted(holders.items())
            ]
            return tied_seconds(search.graph, search.cluster, search.optimizer, search.layering.needs_grad, every)

        now = tied({})
        known = [one for one in specs if one] if len({one.mesh_shape for one in holders.values()}) == 1 else []
        least_s = min([max(now), *(max(tied(one)) for one in known if any(other != one for other in known))])
        return [seconds + told for seconds in now], max(now) - least_s

    @cached_property
    def _sharing(self) -> frozenset[int]:
        """The layers that share weights."""
        return frozenset(layer for _, layers in self.shared for layer in layers)

    def _rows(
        self, m: int, pipeline: Pipeline, pairs: Sequence[tuple[Submesh, int]], mixes: Sequence[Mix]
    ) -> tuple[StageRow, ...]:
        """The rows of the pipeline's stages."""
        rows = []
        for number in (stage.option for stage in pipeline.stages):
            mix = mixes[number - len(pairs)] if number >= len(pairs) else None
            sub, price = pairs[number if mix is None else mix.first]
            group = self.group(sub)
            then = None if mix is None else (mix.cut, group.row(sub, m, pairs[mix.then][1]))
            rows.append(StageRow(group.composer, group.row(sub, m, price), sub, then))
        return tuple(rows)

    # ---- tables

    def table(self, m: int, pairs: Sequence[tuple[Submesh, int]], room: float = 1.0) -> PipelineTable | None:
        """The pipeline table of these options; None if no option can run anything. room: the fraction of the memory
        limit that estimates may fill."""
        arrays: dict[str, list[np.ndarray]] = {
            name: [] for name in ("pace_s", "transfer_s", "entry_s", "step_s", "resident", "saved", "transient")
        }
        numbers = {sub: number for number, sub in enumerate(self.submeshes)}
        for sub, price in pairs:
            group = self.group(sub)
            possible = np.isfinite(group.array("cost", sub, m, price))
            if sub.place is not None:
                only = np.zeros_like(possible)
                only[sub.place] = True
                possible &= only
            for name, values in arrays.items():
                array = group.array(name, sub, m, price)
                if name == "pace_s":
                    array = np.where(possible, array, inf)
                elif name == "step_s":
                    hides = self.levels[price].gradient_share < 1.0
                    array = self._exposed_step(sub, m, price) if hides else array * m
                elif name == "resident":  # every use of a weight counts a copy; at the least they are as fine as can be
                    array = np.maximum(array - self.copies / sub.num_devices, 0.0)
                elif name == "saved":
                    array = array + self.sent_bytes(sub, m)
                elif name == "transfer_s":  # a message is before the stage that receives it
                    array = np.maximum(array - group.array("entry_s", sub, m, price), 0.0)
                values.append(array)
        if not pairs:
            return None
        stacked = {name: np.stack(values) for name, values in arrays.items()}
        if not np.isfinite(stacked["pace_s"]).any():
            return None
        beside = self.search.memory_corrections
        options = tuple(self.option(sub, numbers[sub], n, room, beside.get((sub.shape, m, n), 0.0)) for sub, n in pairs)
        return PipelineTable(self._shape[0], self.search.cluster.num_devices, options, **stacked)

    def max_bucket_seconds(self, sub: Submesh) -> float:
        """The most seconds that the sum of a bucket of gradients takes."""
        return max_bucket_seconds(self.search.pricer(sub.offsets[0], sub.shape))

    def _exposed_step(self, sub: Submesh, m: int, number: int) -> np.ndarray:
        """[L, L + 1] the seconds per step less those that do not count at a level, as far as they may run beside the
        backward of a microbatch: all but those of a bucket, which is full at its end."""
        level, group, share = self.levels[number], self.group(sub), max_overlap(self.search.cluster)
        cost, pace_s, step_s, transfer_s, resident, saved = (
            group.array(name, sub, m, number)
            for name in ("cost", "pace_s", "step_s", "transfer_s", "resident", "saved")
        )
        counted = cost - pace_s - transfer_s - level.byte * resident - level.saved_byte * saved
        uncounted = m * (step_s - np.where(np.isfinite(cost), counted, step_s))
        spared = share * (uncounted / (1.0 - level.gradient_share) - self.max_bucket_seconds(sub))
        backward = np.maximum(pace_s - self.least_phases(sub, m)[0], 0.0)
        return m * step_s - np.clip(spared, 0.0, np.minimum(share * backward, m * step_s))

    # ---- where nothing fits

    def leanest(self, m: int, schedule: str, room: float = 1.0) -> list[Candidate]:
        """The best pipelines at the largest memory multiplier."""
        return self.solve(m, schedule, self.rows(m, (LARGEST_MULTIPLIER,)), top_k=1, room=room)

    def fits(self) -> bool:
        """True if something fits at the largest memory multiplier, the smallest microbatches first."""
        self.compute_pace_bounds()
        return any(self.leanest(m, self.search.space.base_schedule) for m in self.counts[::-1])

    def misses(self) -> list[Miss]:
        """The misses at the largest memory multiplier, for every microbatch count."""
        answers = [self._miss(m) for m in self.counts]
        return [answer for answer in answers if answer is not None]

    def _miss(self, m: int) -> Miss | None:
        pairs = self.rows(m, (LARGEST_MULTIPLIER,))
        table = self.table(m, pairs)
        if table is None:
            return None
        answer = solve(table, m, self.search.space.base_schedule, self.cuts, RankingLimits(top_k=1))
        if not isinstance(answer, InfeasiblePipeline):
            return None
        if answer.choice is None:
            return Miss(answer, m)
        sub, level = pairs[answer.choice.option]
        group = self.group(sub)
        return Miss(answer, m, StageRow(group.composer, group.row(sub, m, level), sub))


def tables_of(search: SearchState) -> SearchTables:
    """The tables of a search, made at the first question and shared by all passes."""
    if search.tables is None:
        search.tables = SearchTables(search)
    assert isinstance(search.tables, SearchTables)
    return search.tables
