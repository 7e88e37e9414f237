"""The best plan of a tiny instance by looking at every plan document, with no code of the search.

    document ::= microbatches, schedule, stage+
    stage    ::= submesh, chunk  |  submesh, chunk, chunk        (interleaved and zb-v: all stages under one submesh)
    chunk    ::= layers [first, end), state of what enters and leaves, recompute mode per layer,
                 label per op, residency per parameter, pair per input

Documents are those of the printed space (docs/search.md): labels that ``rules`` and ``prune`` offer, cuts between
layers, submeshes of ``space``, border states of equal S or R placements. A document is priced as ``reprice`` prices it;
``Exhaustive.best`` checks this for the one that it returns. Devices hide nothing of a reduction (``overlap`` is 0).

Nothing is left out of this but what cannot matter:

1. A stage's seconds and bytes depend on its own part of a document alone, messages on the states at both of their ends,
   and the makespan grows with every stage's forward, backward and end of step (a fixed order of actions is a system of
   maxima and sums). So of a stage's parts with equal border states and equal placement of shared weights only those
   matter whose (forward, backward, step, bytes) no other undercuts.
2. The same holds while the ops of a stage are gone through in program order: two beginnings with equal placements of
   all that is still to be read, and equal gradients to reduce, have the same continuations at the same further price
   (seconds and bytes add up; the peak of a layer is a sum that only grows until the layer ends).
3. A stage is busy m(f + b) + step, so no makespan is below this; and with messages between all neighbours none is below
   Σ_{j<k} (f_j + b_j) + m (f_k + b_k) + step_0. Pipelines whose bound is not below a makespan at hand are not timed.

With several chunks per stage this is said of chunks: what they do adds up, and what they hold does but for temporaries.
The clock of zb-h1 and zb-v grows with the two halves of a backward, so that (forward, inputs, weights, step, bytes)
matter there. Two chunks of a stage have a tensor that one makes for the other, and a weight that both read, in one
placement. There are at most as many stages as microbatches then.

A tensor that crosses a border between layers inside a stage is in some border state there: documents are those in which
this costs nothing, that is, where every reader's conversion takes as long by way of that state as directly.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf, prod
from typing import Any

import numpy as np
from meshwright.compiler.frontend.layers import Layering, cluster_layers
from meshwright.compiler.intra_op.stage import SolvedStage
from meshwright.compiler.ir.graph import Graph, op_name
from meshwright.compiler.pipeline.families import generate, in_flight_formula, virtual_order
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.compiler.plan.plan import Chunk, Plan, Prediction, Stage, StagePrediction, Transfer
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.rules import MeshChoice
from meshwright.compiler.search.predict import predict
from meshwright.compiler.search.space import CHUNKED, Space, Submesh, submeshes
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.memory import usable_bytes

from tests.oracles.frontier import TooLarge
from tests.oracles.plan_difference import text
from tests.oracles.stage_documents import StageDocuments
from tests.oracles.stage_parts import StagePart

__all__ = ["Exhaustive", "Found"]

MAX_TIMED = 60_000
MAX_ASKED = 300
MAX_CHAINS = 200_000
CHUNKS = 2  # per stage, where a family has several
EPS = 1e-9
PLAIN = Space()


@dataclass(frozen=True)
class Found:
    """The best document, priced by ``reprice``; None where nothing fits. timed: pipelines that were simulated."""

    plan: Plan | None
    step_s: float
    documents: int
    timed: int


# per chunk of the model, in the order of the layers: layers, submesh, first device
Pipeline = tuple[tuple[tuple[int, int], Submesh, int], ...]


def _places(schedule: str, chunks: int) -> tuple[tuple[int, int], ...]:
    """(stage, chunk of the stage) of every chunk of the model."""
    if schedule in CHUNKED:
        return virtual_order(schedule, chunks // CHUNKS, CHUNKS)
    return tuple((stage, 0) for stage in range(chunks))


class Exhaustive:
    """All documents of one instance. limited: whether memory counts at all."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        global_batch: int,
        space: Space = PLAIN,
        optimizer: str = "AdamW",
        limited: bool = False,
    ) -> None:
        assert not any(host.device.overlap for host in cluster.hosts), "devices hide nothing of a reduction here"
        self.graph, self.cluster, self.global_batch, self.space = graph, cluster, global_batch, space
        self.optimizer, self.limited = optimizer, limited
        self.split = any(name.startswith("zb") for name in space.schedules)
        assert "interleaved" not in space.schedules or space.chunks == (CHUNKS,), "stages have one or two chunks here"
        self.layering = cluster_layers(graph, sequence=space.sequence)
        self.graphs: dict[int, Graph] = {}
        for m in (m for m in range(1, global_batch + 1) if global_batch % m == 0):
            try:
                self.graphs[m] = graph.with_batch(global_batch // m)
            except ValueError:
                continue
        self.shared = self._shared()
        self.submeshes = submeshes(cluster, space)
        self._stages: dict[tuple, StageDocuments] = {}
        self._orders: dict[tuple[str, int, int], Any] = {}
        self.documents = self.timed = self.asked = 0
        self._accept: Callable[[Plan], bool] | None = None

    def offered(self, layering: Layering, node: Any, batch: int, mesh: tuple[int, ...]) -> list[MeshChoice]:
        """What ``prune`` keeps of an op's choices."""
        return layering.pruner.choices(node, batch, mesh)

    def _shared(self) -> frozenset[str]:
        """Parameters that several layers read."""
        layer_of = {name: k for k, layer in enumerate(self.layering.layers) for name in layer.ops}
        return frozenset(
            node.name
            for node in self.graph.placeholders("parameter")
            if len({layer_of[user.name] for user in node.users if user.name in layer_of}) > 1
        )

    # ---- pipelines

    def pipelines(self, schedule: str = "1f1b") -> Iterator[Pipeline]:
        """Every way to cut the layers and to give the parts devices in their order, some of which may stay idle."""
        return self._divided(schedule) if schedule in CHUNKED else self._cut(0, 0)

    def _cut(self, layer: int, device: int) -> Iterator[Pipeline]:
        """The layers from this one on, a run per stage, on the devices from this one on."""
        total = len(self.layering.layers)
        if layer == total:
            yield ()
            return
        for end, mesh in itertools.product(range(layer + 1, total + 1), self.submeshes):
            for offset in mesh.offsets:
                if offset >= device:
                    for others in self._cut(end, offset + mesh.num_devices):
                        yield (((layer, end), mesh, offset), *others)

    def _divided(self, schedule: str) -> Iterator[Pipeline]:
        """Stages of several runs each, all under one submesh."""
        total = len(self.layering.layers)
        for mesh in self.submeshes:
            for p in range(2, total // CHUNKS + 1):
                for offsets in itertools.combinations(mesh.offsets, p):
                    if any(b - a < mesh.num_devices for a, b in itertools.pairwise(offsets)):
                        continue
                    homes = [offsets[stage] for stage, _ in virtual_order(schedule, p, CHUNKS)]
                    for cuts in itertools.combinations(range(1, total), p * CHUNKS - 1):
                        runs = itertools.pairwise((0, *cuts, total))
                        yield tuple((layers, mesh, offset) for layers, offset in zip(runs, homes))

    def parts(self, m: int, schedule: str, layers: tuple[int, int], mesh: Submesh) -> list[StagePart]:
        """All parts of a stage, in every recompute mode."""
        out = []
        offered = self.space.recompute if self.limited else ("none",)  # it saves bytes and costs seconds
        for modes in itertools.product(offered, repeat=layers[1] - layers[0]):
            plain = all(mode == "none" for mode in modes)
            key = m, "" if plain else schedule, layers, mesh.shape, mesh.site, modes
            if key not in self._stages:
                self._stages[key] = StageDocuments(self, m, layers, mesh, modes, schedule)
                self.documents += len(self._stages[key].parts)
            out += self._stages[key].parts
        return out

    def best(self, accept: Callable[[Plan], bool] | None = None) -> Found:
        """The document of the least makespan that fits; accept: what else it must pass."""
        self._accept = accept
        jobs = []
        for schedule in self.space.schedules:
            for pipeline, m in itertools.product(list(self.pipelines(schedule)), self.graphs):
                if schedule in CHUNKED and len(pipeline) > m * CHUNKS:
                    continue  # a pipeline of more stages than microbatches
                chunks = [self._fitting(m, schedule, pipeline, k) for k in range(len(pipeline))]
                if all(chunks):
                    least = [min(part.busy_s(m) for part in parts) for parts in chunks]
                    bound = max(_by_stage(schedule, least))
                    jobs.append((bound, len(jobs), m, schedule, pipeline, chunks))
        jobs.sort(key=lambda job: job[:2])
        best: tuple[float, int, str, Pipeline, tuple[StagePart, ...]] | None = None
        for bound, _, m, schedule, pipeline, stages in jobs:
            if best is not None and bound >= best[0]:
                break
            best = self._pipeline(m, schedule, pipeline, stages, best)
        if best is None:
            return Found(None, inf, self.documents, self.timed)
        return Found(self._plan(*best), best[0], self.documents, self.timed)

    def _fitting(self, m: int, schedule: str, pipeline: Pipeline, index: int) -> list[StagePart]:
        layers, mesh, offset = pipeline[index]
        parts = self.parts(m, schedule, layers, mesh)
        if not self.limited:
            return parts
        limit = min(usable_bytes(self.cluster)[offset : offset + mesh.num_devices])
        flight = self._in_flight(m, schedule, len(pipeline))[index]
        return [part for part in parts if part.bytes(flight) <= limit]

    def _in_flight(self, m: int, schedule: str, chunks: int) -> list[int]:
        """Microbatches of each chunk of the model that ``reprice`` counts: those of its stage, evenly."""
        places, each = _places(schedule, chunks), CHUNKS if schedule in CHUNKED else None
        num = chunks // (each or 1)
        return [-(-in_flight_formula(schedule, stage, num, m, each) // (each or 1)) for stage, _ in places]

    def _pipeline(
        self, m: int, schedule: str, pipeline: Pipeline, stages: Sequence[Sequence[StagePart]], best: Any
    ) -> Any:
        """The best of ``best`` and all documents of this pipeline."""
        groups: list[list[list[StagePart]]] = []
        for parts in stages:
            found: dict[tuple, list[StagePart]] = defaultdict(list)
            for part in parts:
                found[part.receives, part.sends, part.shared].append(part)
            groups.append([self._quickest(group, schedule) for group in found.values()])
        bounds = [[min(part.busy_s(m) for part in group) for group in stage] for stage in groups]
        if prod(map(len, groups)) > MAX_CHAINS:
            raise TooLarge(f"{prod(map(len, groups)):,} chains of messages")
        chains = sorted(
            (max(_by_stage(schedule, [bounds[k][g] for k, g in enumerate(chain)])), chain)
            for chain in itertools.product(*(range(len(stage)) for stage in groups))
            if _agree(schedule, [stage[g][0] for stage, g in zip(groups, chain)])
        )
        for bound, chain in chains:
            if best is not None and bound >= best[0]:
                break
            best = self._chain(m, schedule, pipeline, [stage[g] for stage, g in zip(groups, chain)], best)
        return best

    def _chain(
        self, m: int, schedule: str, pipeline: Pipeline, stages: Sequence[Sequence[StagePart]], best: Any
    ) -> Any:
        """Documents whose messages and shared weights are all alike."""
        places, num = _places(schedule, len(pipeline)), len(stages)
        extra = self._together(m, schedule, pipeline, [parts[0] for parts in stages])
        posts = [extra.stages[s].chunk_s[c] for s, c in places]
        shapes = [tuple(len(parts) if k == j else 1 for j in range(num)) for k, parts in enumerate(stages)]
        forward, backward, weight, once = (
            [np.array([getattr(part, name) for part in parts]).reshape(shape) for parts, shape in zip(stages, shapes)]
            for name in ("forward_s", "backward_s", "weight_s", "step_s")
        )
        forward = [one + ahead for one, (ahead, _, _) in zip(forward, posts)]
        backward = [one + back for one, (_, back, _) in zip(backward, posts)]
        ahead, back = _messages(places, [parts[0] for parts in stages], extra.transfers)
        linked = schedule not in CHUNKED and all((k, k + 1) in ahead and back[k, k + 1] > 0 for k in range(num - 1))
        linked = linked and not schedule.startswith("zb")
        ends = [one + stage.step_s for one, stage in zip(_by_stage(schedule, once), extra.stages)]
        works = _by_stage(schedule, [m * (f + b) for f, b in zip(forward, backward)])
        bound, before = np.zeros(tuple(map(len, stages))), np.zeros(())
        for k, (busy, end) in enumerate(zip(works, ends)):
            bound = np.maximum(bound, busy + end)
            if linked:
                bound = np.maximum(bound, before + busy + ends[0])
                before = before + forward[k] + backward[k]
                before = before + (ahead[k, k + 1] + back[k, k + 1] if k + 1 < num else 0.0)
        if self.limited and schedule in CHUNKED:
            bound = np.where(self._fit_together(m, schedule, pipeline, stages), bound, inf)
        order = self._order(schedule, num, m)
        for flat in np.argsort(bound, axis=None):
            cell = np.unravel_index(flat, bound.shape)
            if bound[cell] >= (inf if best is None else best[0]):
                break
            self.timed += 1
            if self.timed > MAX_TIMED:
                raise TooLarge(f"more than {MAX_TIMED:,} pipelines to time")
            f, b, w, s = (
                [float(a.reshape(-1)[i]) for a, i in zip(arrays, cell)] for arrays in (forward, backward, weight, once)
            )
            s = [
                sum(some) + stage.step_s for some, stage in zip(_by_stage(schedule, [[one] for one in s]), extra.stages)
            ]
            step = simulate(order, f, b, dict(ahead) or None, s, dict(back) if ahead else None, list(map(min, w, b)))
            if best is None or step.makespan_s < best[0]:
                parts = tuple(options[i] for options, i in zip(stages, cell))
                found = step.makespan_s, m, schedule, pipeline, parts
                best = found if self._accepted(found) else best
        return best

    def _accepted(self, found: tuple[float, int, str, Pipeline, tuple[StagePart, ...]]) -> bool:
        if self._accept is None:
            return True
        self.asked += 1
        if self.asked > MAX_ASKED:
            raise TooLarge(f"more than {MAX_ASKED} documents fit by estimate and not by a run without data")
        return self._accept(self._plan(*found))

    def _order(self, schedule: str, num: int, m: int) -> Any:
        key = schedule, num, m
        if key not in self._orders:
            several = schedule in CHUNKED
            self._orders[key] = generate(schedule, num // CHUNKS if several else num, m, CHUNKS if several else None)
        return self._orders[key]

    def _together(self, m: int, schedule: str, pipeline: Pipeline, parts: Sequence[StagePart]) -> Any:
        """What stages cost each other: a prediction of stages that themselves cost nothing."""
        graph, chunks = self.graphs[m], []
        losses = {result.node for result in graph.results if result.kind == "loss"}
        nodes = graph.by_name()
        for part, (layers, _, _) in zip(parts, pipeline):
            here = dict.fromkeys(losses & part.stage.members, ())
            held = {nodes[name].meta["source"].name: residency for name, residency in part.shared}
            sends = {name: pair.value for name, pair in part.sends}
            chunks.append(Chunk(layers, here, held, {}, dict(part.receives), sends))
        assembled = []
        for stage in self._stages_of(schedule, pipeline, chunks):
            nothing = StagePrediction(0.0, 0.0, 0.0, {}, {}, {}, ((0.0, 0.0, 0.0),) * len(stage.chunks))
            assembled.append(SolvedStage(stage, nothing, {}, 0.0))
        grad = self.layering.needs_grad
        return predict(graph, self.cluster, grad, schedule, m, self.optimizer, assembled)

    def _stages_of(self, schedule: str, pipeline: Pipeline, chunks: Sequence[Chunk]) -> tuple[Stage, ...]:
        """The stages that hold these chunks of the model."""
        found: dict[int, Stage] = {}
        for (stage, _), (_, mesh, offset), chunk in sorted(
            zip(_places(schedule, len(chunks)), pipeline, chunks), key=_place
        ):
            here = found.get(stage, Stage(tuple(range(offset, offset + mesh.num_devices)), mesh.shape, ()))
            found[stage] = replace(here, chunks=(*here.chunks, chunk))
        return tuple(found.values())

    def _fit_together(
        self, m: int, schedule: str, pipeline: Pipeline, stages: Sequence[Sequence[StagePart]]
    ) -> np.ndarray:
        """Where all chunks of every stage fit, as ``describe_stage`` and ``together`` estimate: [parts of each]."""
        flights, num = self._in_flight(m, schedule, len(stages)), len(stages)
        fits = np.ones((1,) * num, bool)
        kept, briefly = [], []
        for k, (parts, flight) in enumerate(zip(stages, flights)):
            shape = tuple(len(parts) if k == j else 1 for j in range(num))
            kept.append(np.array([part.kept(flight) for part in parts]).reshape(shape))
            briefly.append(np.array([2 * part.largest for part in parts]).reshape(shape))
        usable = usable_bytes(self.cluster)
        for stage in {place[0] for place in _places(schedule, num)}:
            mine = [k for k, place in enumerate(_places(schedule, num)) if place[0] == stage]
            _, mesh, offset = pipeline[mine[0]]
            total = sum((kept[k] for k in mine), np.zeros(())) + reduce(np.maximum, [briefly[k] for k in mine])
            fits = fits & (total <= min(usable[offset : offset + mesh.num_devices]))
        return fits

    def _quickest(self, parts: Sequence[StagePart], schedule: str) -> list[StagePart]:
        """Those that no other undercuts in seconds (and bytes, where other chunks of the stage need some as well)."""

        def value(part: StagePart) -> tuple[float, ...]:
            seconds = part.forward_s, part.backward_s - part.weight_s, part.weight_s, part.step_s
            if not schedule.startswith("zb"):
                seconds = part.forward_s, part.backward_s, part.step_s
            together = self.limited and schedule in CHUNKED
            nbytes = part.resident, part.saved, part.transient, part.largest
            return (*seconds, *nbytes) if together else seconds

        kept: list[tuple[tuple[float, ...], StagePart]] = []
        for part in sorted(parts, key=lambda p: (p.forward_s + p.backward_s + p.step_s, value(p))):
            mine = value(part)
            if not any(all(a <= b for a, b in zip(other, mine)) for other, _ in kept):
                kept.append((mine, part))
        return [part for _, part in kept]

    def priced(self, m: int, schedule: str, pipeline: Pipeline, parts: Sequence[StagePart]) -> Plan:
        """The document that these parts make, by ``reprice``; AssertionError if that is not what it costs here."""
        best = self._chain(m, schedule, pipeline, [[part] for part in parts], None)
        return self._plan(*best)

    def _plan(self, step_s: float, m: int, schedule: str, pipeline: Pipeline, parts: Sequence[StagePart]) -> Plan:
        stages = self._stages_of(schedule, pipeline, [part.document() for part in parts])
        plan = Plan(
            model=self.graph.fingerprint(),
            model_ops=dict(Counter(op_name(node) for node in self.graph.ops())),
            cluster=json.loads(self.cluster.to_json()),
            global_batch=self.global_batch,
            microbatches=m,
            schedule=schedule,
            optimizer=self.optimizer,
            layers=tuple(layer.name for layer in self.layering.layers),
            stages=stages,
            transfers=(),
            prediction=Prediction(0.0, 0.0, (), 0.0, 0.0),
        )
        priced = reprice(plan, self.graph, self.cluster)
        assert abs(priced.prediction.step_s - step_s) <= EPS * step_s, (
            f"a document costs {priced.prediction.step_s!r} s by reprice and {step_s!r} s here: {text(priced)}"
        )
        return priced


def _place(entry: tuple[Any, ...]) -> tuple[int, int]:
    return entry[0]


def _by_stage(schedule: str, values: Sequence[Any]) -> list[Any]:
    """The sum over the chunks of each stage; values: one per chunk of the model."""
    found: dict[int, Any] = {}
    for (stage, _), value in zip(_places(schedule, len(values)), values):
        found[stage] = found[stage] + value if stage in found else value
    return [found[stage] for stage in sorted(found)]


def _agree(schedule: str, parts: Sequence[StagePart]) -> bool:
    """Whether chunks of one stage find what they have in common, tensors and weights, in one placement."""
    if schedule not in CHUNKED:
        return True
    by_stage: dict[int, list[StagePart]] = defaultdict(list)
    for (stage, _), part in zip(_places(schedule, len(parts)), parts):
        by_stage[stage].append(part)
    for one, other in itertools.chain.from_iterable(itertools.combinations(some, 2) for some in by_stage.values()):
        for there, here in ((one.sends, other.receives), (one.receives, other.receives), (one.shared, other.shared)):
            known = dict(there)
            if any(known.get(name, value) != value for name, value in here):
                return False
    return True


def _messages(
    places: Sequence[tuple[int, int]], parts: Sequence[StagePart], transfers: Sequence[Transfer]
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Seconds of the messages between chunks of the model, there and back; what stays on a stage takes none."""
    number = {place: k for k, place in enumerate(places)}
    ahead: dict[tuple[int, int], float] = defaultdict(float)
    back: dict[tuple[int, int], float] = defaultdict(float)
    for (k, one), (j, other) in itertools.combinations(enumerate(parts), 2):
        if places[k][0] == places[j][0] and {name for name, _ in one.sends} & {name for name, _ in other.receives}:
            ahead[k, j] = back[k, j] = 0.0
    for transfer in transfers:
        source = number[transfer.source, transfer.source_chunk]
        target = number[transfer.target, transfer.target_chunk]
        ahead[source, target] += transfer.forward_s
        back[source, target] += transfer.backward_s
    return ahead, back
