"""Markov chain Monte Carlo over plans, as FlexFlow searches (Jia, Zaharia, Aiken 2019, section 6.2), in our space.

A state is a microbatch count and a list of stages: a run of layers, a submesh, and how it works: one label per op of
each layer class (layers of a class work alike in a stage: FlexFlow would have to find each by itself), a state for each
kind of border, a ZeRO pattern, a recompute mode. A proposal changes one of these at random: an op's labels, a border, a
pattern, a mode, where two stages meet, a stage's mesh, the number of stages, the microbatches. It is taken with
probability min(1, exp(β (cost − new cost) / best cost)). The chain begins with data parallelism, then from random
states, and restarts from the best when it found nothing new for half of its share of the time, as FlexFlow does.

Cost: Σ t + (m − 1) max t over the stages, t the sum of its layers, each priced once and remembered; a stage that does
not fit is refused. The best state becomes a document and is priced as such.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import exp, inf
from typing import Any

from meshwright.compiler.cost.pricing import MeshPricer
from meshwright.compiler.frontend.layers import cluster_layers
from meshwright.compiler.intra_op.restriction import Restriction
from meshwright.compiler.intra_op.section import StageContext
from meshwright.compiler.intra_op.solver.problem import evaluate
from meshwright.compiler.intra_op.stage import describe_stage, solve_section, stage_section
from meshwright.compiler.ir.graph import Graph, op_name
from meshwright.compiler.ir.spec import S
from meshwright.compiler.pipeline.families import in_flight_formula
from meshwright.compiler.plan.plan import Plan, Prediction
from meshwright.compiler.plan.recompute import recompute_of
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.search.space import Submesh, submeshes
from meshwright.costmodel.memory import FRAMEWORK_BYTES, usable_bytes

from tests.oracles.scalar_composer import Composer

from .families import Task

__all__ = ["anneal"]

BETA = 200.0  # a proposal that is 0.5 % worse than the best is taken in one of e times
RESTARTS = 4
Labels = tuple[str, ...]


@dataclass(frozen=True)
class _Work:
    """How one stage works: labels by layer class, an index of a state by kind of border."""

    labels: dict[str, Labels]
    borders: dict[Any, int]
    pattern: str
    mode: str


@dataclass(frozen=True)
class _Piece:
    """One stage of a state: where its layers end, where it is, how it works."""

    end: int
    mesh: Submesh
    offset: int
    work: _Work


@dataclass(frozen=True)
class _State:
    microbatches: int
    pieces: tuple[_Piece, ...]


@dataclass(eq=False)
class _Chain:
    """The search of one task."""

    task: Task
    draw: random.Random
    known: dict[tuple, tuple[float, float, float, float]] = field(default_factory=dict)
    composers: dict[tuple, Composer] = field(default_factory=dict)
    offers: dict[tuple, list[str]] = field(default_factory=dict)
    graphs: dict[int, Graph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layering = cluster_layers(self.task.graph, sequence=self.task.space.sequence)
        self.num = len(self.layering.layers)
        self.meshes = submeshes(self.task.cluster, self.task.space)
        self.limits = usable_bytes(self.task.cluster)
        batch = self.task.global_batch
        self.counts = [m for m in range(1, batch + 1) if batch % m == 0]
        first: dict[str, int] = {}
        for index, layer in enumerate(self.layering.layers):
            first.setdefault(layer.class_key, index)
        self.first = first
        self.none = recompute_of(self.task.graph, self.layering, "none", "1f1b")

    # ---- states

    def graph(self, m: int) -> Graph:
        if m not in self.graphs:
            self.graphs[m] = self.task.graph.with_batch(self.task.global_batch // m)
        return self.graphs[m]

    def composer(self, m: int, mesh: Submesh) -> Composer:
        key = m, mesh.shape, mesh.site
        if key not in self.composers:
            pricer = MeshPricer(self.task.cluster, mesh.site, mesh.shape)
            self.composers[key] = Composer(self.graph(m), self.layering, pricer, m)
        return self.composers[key]

    def border(self, boundary: int) -> tuple:
        nodes = self.task.graph.by_name()
        return tuple(
            (str(nodes[t].meta["type"]), self.layering.batch_dims[t][0]) for t in self.layering.crossing[boundary]
        )

    def offered(self, m: int, mesh: Submesh, op: str) -> list[str]:
        """Texts of an op's labels, those that cut the batch everywhere first."""
        key = m, mesh.shape, op
        if key not in self.offers:
            node, batch = self.graph(m).by_name()[op], self.layering.batch_dims[op][0]
            choices = self.layering.pruner.choices(node, self.graph(m).batch, mesh.shape)

            def rank(choice: Any) -> tuple:
                cut = sum(batch is not None and p == S(batch) for p in choice.outputs[0].value)
                return (-cut, choice.work_share)

            self.offers[key] = [",".join(choice.labels) for choice in sorted(choices, key=rank)]
        return self.offers[key]

    def ops(self, key: str) -> list[str]:
        nodes = self.task.graph.by_name()
        return [op for op in self.layering.layers[self.first[key]].ops if op_name(nodes[op]) != "getitem"]

    def data(self, m: int, mesh: Submesh) -> _Work:
        """Everything cut along the batch where that is possible."""
        labels = {key: tuple(self.offered(m, mesh, op)[0] for op in self.ops(key)) for key in self.first}
        borders = {}
        for boundary in range(self.num + 1):
            key = self.border(boundary)
            if key not in borders:
                states = self.composer(m, mesh).states(boundary)
                batch = [dim for _, dim in key]
                cut = lambda state: sum(p == S(d) for pair, d in zip(state, batch) for p in pair.value if d is not None)  # noqa: B023, E731
                borders[key] = max(range(len(states)), key=lambda i: cut(states[i]))
        pattern = self.draw.choice(self.task.space.residencies)
        return _Work(labels, borders, pattern, self.draw.choice(self.task.space.recompute))

    def start(self, whole: bool) -> _State:
        """One stage over all devices, or random stages."""
        m = self.draw.choice(self.counts[len(self.counts) // 3 :])
        total = self.task.cluster.num_devices
        sizes = [total] if whole else self._random_sizes(total)
        cuts = sorted(self.draw.sample(range(1, self.num), len(sizes) - 1)) if len(sizes) > 1 else []
        pieces, offset = [], 0
        for size, end in zip(sizes, [*cuts, self.num]):
            mesh = self.draw.choice([x for x in self.meshes if x.num_devices == size and offset in x.offsets])
            pieces.append(_Piece(end, mesh, offset, self.data(m, mesh)))
            offset += size
        return _State(m, tuple(pieces))

    def _random_sizes(self, total: int) -> list[int]:
        sizes, offset = [], 0
        while offset < total:
            fitting = [x for x in self.meshes if offset in x.offsets and offset + x.num_devices <= total]
            sizes.append(self.draw.choice(fitting).num_devices)
            offset += sizes[-1]
        return sizes if len(sizes) <= self.num else [total]

    # ---- proposals

    def propose(self, state: _State) -> _State | None:
        """A neighbour; None where the drawn change is impossible."""
        kind = self.draw.choices(
            ("op", "border", "pattern", "mode", "cut", "mesh", "split", "merge", "microbatches"),
            (10, 3, 1, 1, 3, 2, 1, 1, 1),
        )[0]
        k = self.draw.randrange(len(state.pieces))
        if kind in ("op", "border", "pattern", "mode"):
            alike = self.draw.random() < 0.5  # all stages of this mesh at once: a step that stages alone cannot make
            work = self._other_work(state, k, kind)
            if work is None:
                return None
            shape = state.pieces[k].mesh.shape
            return replace(state, pieces=tuple(
                replace(piece, work=work) if j == k or (alike and piece.mesh.shape == shape) else piece
                for j, piece in enumerate(state.pieces)
            ))  # fmt: skip
        if kind == "cut" and k + 1 < len(state.pieces):
            moved = replace(state.pieces[k], end=state.pieces[k].end + self.draw.choice((-4, -2, -1, 1, 2, 4)))
            return replace(state, pieces=(*state.pieces[:k], moved, *state.pieces[k + 1 :]))
        if kind == "mesh":
            piece = state.pieces[k]
            size = piece.mesh.num_devices
            mesh = self.draw.choice([x for x in self.meshes if x.num_devices == size and piece.offset in x.offsets])
            other = replace(piece, mesh=mesh, work=self.data(state.microbatches, mesh))
            return replace(state, pieces=(*state.pieces[:k], other, *state.pieces[k + 1 :]))
        if kind in ("split", "merge"):
            return self._resized(state, k, kind)
        if kind == "microbatches":
            at = self.counts.index(state.microbatches) + self.draw.choice((-1, 1))
            return replace(state, microbatches=self.counts[at]) if 0 <= at < len(self.counts) else None
        return None

    def _other_work(self, state: _State, k: int, kind: str) -> _Work | None:
        piece, m = state.pieces[k], state.microbatches
        work, begin = piece.work, state.pieces[k - 1].end if k else 0
        layer = self.draw.randrange(begin, piece.end)
        if kind == "pattern":
            return replace(work, pattern=self.draw.choice(self.task.space.residencies))
        if kind == "mode":
            return replace(work, mode=self.draw.choice(self.task.space.recompute))
        if kind == "border":
            states = self.composer(m, piece.mesh).states(layer)
            return replace(work, borders={**work.borders, self.border(layer): self.draw.randrange(len(states))})
        key = self.layering.layers[layer].class_key
        ops, labels = self.ops(key), list(work.labels[key])
        if not ops:
            return None
        at = self.draw.randrange(len(ops))
        labels[at] = self.draw.choice(self.offered(m, piece.mesh, ops[at]))
        return replace(work, labels={**work.labels, key: tuple(labels)})

    def _resized(self, state: _State, k: int, kind: str) -> _State | None:
        pieces, m = list(state.pieces), state.microbatches
        piece = pieces[k]
        if kind == "split":
            begin, half = pieces[k - 1].end if k else 0, piece.mesh.num_devices // 2
            if half < 1 or piece.mesh.num_devices % 2 or piece.end - begin < 2:
                return None
            offsets, ends = (piece.offset, piece.offset + half), ((begin + piece.end) // 2, piece.end)
            fitting = [[x for x in self.meshes if x.num_devices == half and o in x.offsets] for o in offsets]
            if not all(fitting):
                return None
            meshes = [self.draw.choice(some) for some in fitting]
            new = [_Piece(e, x, o, self.data(m, x)) for e, x, o in zip(ends, meshes, offsets)]
            return replace(state, pieces=(*pieces[:k], *new, *pieces[k + 1 :]))
        if k + 1 >= len(pieces):
            return None
        size = piece.mesh.num_devices + pieces[k + 1].mesh.num_devices
        fitting = [x for x in self.meshes if x.num_devices == size and piece.offset in x.offsets]
        if not fitting:
            return None
        mesh = self.draw.choice(fitting)
        one = _Piece(pieces[k + 1].end, mesh, piece.offset, self.data(m, mesh))
        return replace(state, pieces=(*pieces[:k], one, *pieces[k + 2 :]))

    # ---- prices

    def cost(self, state: _State) -> float:
        """Σ t + (m − 1) max t; inf if a stage is empty or does not fit."""
        m, begin, times = state.microbatches, 0, []
        if m < len(state.pieces):
            return inf
        for index, piece in enumerate(state.pieces):
            if not begin < piece.end <= self.num:
                return inf
            flight = in_flight_formula("1f1b", index, len(state.pieces), m)
            seconds = self._stage(m, begin, piece, flight)
            if seconds == inf:
                return inf
            times.append(seconds)
            begin = piece.end
        return sum(times) + (m - 1) * max(times)

    def _stage(self, m: int, begin: int, piece: _Piece, flight: int) -> float:
        composer, work = self.composer(m, piece.mesh), piece.work
        at = [self._border_state(composer, work, boundary) for boundary in range(begin, piece.end + 1)]
        total = float(composer.entry_seconds(begin)[at[0]] + composer.exit_seconds(piece.end)[at[-1]])
        resident = saved = held = 0.0
        for layer, into, out in zip(range(begin, piece.end), at, at[1:]):
            seconds, r, k, t = self._layer(m, piece.mesh, layer, into, out, work)
            if seconds == inf:
                return inf
            total, resident, saved, held = total + seconds, resident + r, saved + k, max(held, t)
        limit = min(self.limits[piece.offset : piece.offset + piece.mesh.num_devices])
        return total if resident + flight * saved + held <= limit else inf

    def _border_state(self, composer: Composer, work: _Work, boundary: int) -> int:
        return min(work.borders[self.border(boundary)], len(composer.states(boundary)) - 1)

    def _layer(
        self, m: int, mesh: Submesh, layer: int, into: int, out: int, work: _Work
    ) -> tuple[float, float, float, float]:
        key = self.layering.layers[layer].class_key
        index = m, mesh.shape, mesh.site, key, work.labels[key], into, out, work.pattern, work.mode
        if index not in self.known:
            self.known[index] = self._priced(m, mesh, self.first[key], into, out, work)
        return self.known[index]

    def _priced(
        self, m: int, mesh: Submesh, layer: int, into: int, out: int, work: _Work
    ) -> tuple[float, float, float, float]:
        composer = self.composer(m, mesh)
        key = self.layering.layers[layer].class_key
        pinned = dict(zip(self.ops(key), work.labels[key]))
        again = recompute_of(self.task.graph, self.layering, {layer: work.mode}, "1f1b")
        states = composer.states(layer)[into], composer.states(layer + 1)[out]
        restriction = Restriction(pinned=pinned, residencies=(work.pattern,))
        try:
            context = StageContext(self.graph(m), self.layering, composer.pricer, m, restriction, again)
            section = stage_section(context, (layer, layer + 1), states)
        except ValueError:  # labels of another extent
            return inf, 0.0, 0.0, 0.0
        chosen = solve_section(section, 1.0)
        seconds, _ = evaluate(section.problem(1.0), chosen)
        resident = sum(float(r[c]) for r, c in zip(section.resident, chosen))
        saved = sum(float(k[c]) for k, c in zip(section.saved, chosen))
        held = sum(float(t[c]) for t, c in zip(section.transient, chosen))
        return seconds, resident, saved, held

    # ---- the document

    def plan(self, state: _State) -> Plan:
        """The state as a document, priced by ``reprice``."""
        task, m, stages, begin = self.task, state.microbatches, [], 0
        modes = {k: p.work.mode for b, p in _with_begin(state.pieces) for k in range(b, p.end)}
        again = recompute_of(task.graph, self.layering, modes, "1f1b")
        for index, piece in enumerate(state.pieces):
            composer, work = self.composer(m, piece.mesh), piece.work
            pinned = {}
            for layer in self.layering.layers[begin : piece.end]:
                mine = [op for op in layer.ops if op_name(task.graph.by_name()[op]) != "getitem"]
                pinned |= dict(zip(mine, work.labels[layer.class_key]))
            ends = begin, piece.end
            states = tuple(composer.states(b)[self._border_state(composer, work, b)] for b in ends)
            pricer = MeshPricer(task.cluster, piece.offset, piece.mesh.shape)
            restriction = Restriction(pinned=pinned, residencies=(work.pattern,))
            context = StageContext(self.graph(m), self.layering, pricer, m, restriction, again)
            section = stage_section(context, ends, states)
            flight = in_flight_formula("1f1b", index, len(state.pieces), m)
            chosen = solve_section(section, flight)
            framework = FRAMEWORK_BYTES[task.cluster.device(piece.offset).kind]
            part = describe_stage(context, ends, section, chosen, flight, framework)
            stages.append(part.stage)
            begin = piece.end
        found = Plan(
            model=task.graph.fingerprint(), model_ops=dict(Counter(op_name(n) for n in task.graph.ops())),
            cluster=json.loads(task.cluster.to_json()), global_batch=task.global_batch, microbatches=m,
            schedule="1f1b", optimizer="AdamW", layers=tuple(layer.name for layer in self.layering.layers),
            stages=tuple(stages), transfers=(), prediction=Prediction(0.0, 0.0, (), 0.0, 0.0),
        )  # fmt: skip
        return reprice(found, task.graph, task.cluster)


def _with_begin(pieces: tuple[_Piece, ...]) -> Iterator[tuple[int, _Piece]]:
    begin = 0
    for piece in pieces:
        yield begin, piece
        begin = piece.end


def anneal(task: Task, seconds: float, seed: int = 0) -> Plan | None:
    """The best plan that the chain finds in so many seconds; None if nothing that it saw fits."""
    chain = _Chain(task, random.Random(seed))
    best, best_cost = None, inf
    begin = time.perf_counter()
    for turn in range(RESTARTS):
        state = best if best is not None and turn % 2 else chain.start(whole=turn == 0)
        cost, share = chain.cost(state), begin + seconds * (turn + 1) / RESTARTS
        found_at = time.perf_counter()
        while (now := time.perf_counter()) < share:
            if cost == inf:  # nothing to walk from yet
                state = chain.start(whole=False)
                cost = chain.cost(state)
            other = chain.propose(state)
            new = inf if other is None else chain.cost(other)
            if other is not None and new < inf and (
                new <= cost or chain.draw.random() < exp(BETA * (cost - new) / min(best_cost, cost))
            ):  # fmt: skip
                state, cost = other, new
            if cost < best_cost:
                best, best_cost, found_at = state, cost, now
            elif now - found_at > seconds / RESTARTS / 2 and best is not None:
                state, cost, found_at = best, best_cost, now
    return None if best is None else chain.plan(best)
