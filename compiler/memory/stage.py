"""The bytes that one device of a stage holds at the worst moment of a training step, by cause, from running its lowered
program on tensors without data (``abstract_run.py``) in the order in which the runtime will.

    resident   parameters, buffers, constants, optimizer state, the flat buckets of gradients, the caller's batch, pages
               through which messages pass
    actions    forward, first backward, a later one, the last one (which fills the buckets), each run once and measured
    schedule   at each action of the stage: what it allocates, on top of what the microbatches in flight keep, and the
               messages that are posted or not yet known to have arrived
    step       gradients of tied copies, then the optimizer, one parameter after the other (all at once on CUDA devices)

Stages with equal programs share one run. Of a stage with several chunks each is run, and the schedule says which of
them are in flight together; a weight that two of them use is counted in each.

What a stage's messages to others on its machine hold for good: the pages through which ranks on CPUs pass them
(``runtime/transport/shared_memory.py``).

A rank keeps as many rooms of a size for each peer as there ever were messages on their way to it at once: two where a
stage sends and then waits for an answer, more where it runs ahead, four at the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from ...costmodel.codecs import carried_bytes
from ..ir.graph import Graph
from ..ir.spec import local_shape, without_partials
from ..pipeline.families import generate
from ..pipeline.virtual_stages import representative_microbatches
from ..plan.plan import Plan
from ..workers import all_of
from .chunk import Bytes, ChunkKeys, ChunkRoom, worst_of

__all__ = ["footprints", "message_room", "stage_memory", "with_footprints"]


def stage_memory(graph: Graph, plan: Plan, stage: int) -> Bytes:
    """Bytes alive on the fullest device of ``stage`` at the worst moment of a training step (its second or a later
    one), by cause; their sum is the peak of live tensor storages, without the framework itself.

    Causes: "parameters" (with buffers and constants), "gradients", "optimizer" (its state), "activations" (what
    forwards keep for backwards), "temporary", "buffers" (of messages between stages, of tied weights, and of codes with
    what they still owe), "inputs" (the whole batch, as every rank passes it). Raises what the program raises if it
    cannot run on meta tensors.
    """
    shared = ChunkKeys(graph.with_batch(plan.microbatch_size), plan)
    return _memory(shared, [ChunkRoom(shared, stage, k) for k in range(len(plan.stages[stage].chunks))], stage)


def with_footprints(graph: Graph, plan: Plan, workers: int = 1) -> Plan:
    """``plan`` with the memory of every stage's prediction from ``stage_memory`` ("framework" stays), and a note for
    each stage whose program cannot run on meta tensors: its estimate from the rules stays. workers: processes."""
    stages, notes = list(plan.prediction.stages), list(plan.prediction.notes)
    for index, found in enumerate(footprints(graph, plan, workers)):
        if isinstance(found, Exception):
            why = str(found).strip().split("\n")[0][:120]
            notes.append(f"memory of stage {index} is estimated op by op: {type(found).__name__}: {why}")
        else:
            framework = stages[index].memory_bytes.get("framework", 0.0)
            stages[index] = replace(stages[index], memory_bytes={**found, "framework": framework})
    return replace(plan, prediction=replace(plan.prediction, stages=tuple(stages), notes=tuple(notes)))


def footprints(graph: Graph, plan: Plan, workers: int = 1) -> list[Bytes | Exception]:
    """``stage_memory`` of every stage, equal programs run once; what went wrong where a program cannot run so.
    workers: processes, of which the others are forks."""
    shared = ChunkKeys(graph.with_batch(plan.microbatch_size), plan)
    found: dict[int, Bytes | Exception] = {}
    keys: dict[int, list[Hashable]] = {}
    for index, stage in enumerate(plan.stages):
        try:
            keys[index] = [shared.structure(index, chunk) for chunk in range(len(stage.chunks))]
        except Exception as error:
            found[index] = error
    for some in all_of([partial(_footprints, shared, part) for part in _dealt(keys, workers)]):
        found |= some
    return [found[index] for index in range(len(plan.stages))]


def _dealt(keys: Mapping[int, Sequence[Hashable]], workers: int) -> list[dict[int, Sequence[Hashable]]]:
    """The stages dealt out to so many: to whoever has most of their programs, else to whoever has the fewest."""
    parts: list[dict[int, Sequence[Hashable]]] = [{} for _ in range(workers)]
    known: list[set[Hashable]] = [set() for _ in parts]
    for index, programs in keys.items():
        k = min(range(workers), key=lambda k: (len({*programs} - known[k]), len(known[k])))
        parts[k][index] = programs
        known[k].update(programs)
    return [part for part in parts if part] or [{}]


def _footprints(shared: ChunkKeys, stages: Mapping[int, Sequence[Hashable]]) -> dict[int, Bytes | Exception]:
    """Of these stages, with the structure of each of their programs."""
    known: dict[Hashable, ChunkRoom | Exception] = {}
    found: dict[int, Bytes | Exception] = {}
    for index, keys in stages.items():
        try:
            for chunk, key in enumerate(keys):
                if key not in known:
                    known[key] = ChunkRoom(shared, index, chunk)
            parts = [known[key] for key in keys]
            wrong = [part for part in parts if isinstance(part, Exception)]
            found[index] = wrong[0] if wrong else _memory(shared, [p for p in parts if isinstance(p, ChunkRoom)], index)
        except Exception as error:
            known.update(dict.fromkeys(keys, error))
            found[index] = error
    return found


def _memory(shared: ChunkKeys, chunks: Sequence[ChunkRoom], stage: int) -> Bytes:
    """Bytes by cause of a stage with these chunks."""
    found = chunks[0].memory(stage) if len(chunks) == 1 else _Together(chunks, stage).memory()
    lasting = message_room(shared, stage)
    return {**found, "buffers": found.get("buffers", 0) + lasting} if lasting else found


class _Together:
    """The chunks of one stage, in flight together as the schedule has it."""

    def __init__(self, chunks: Sequence[ChunkRoom], stage: int) -> None:
        self.chunks, plan = chunks, chunks[0].plan
        p, v = len(plan.stages), len(chunks)
        self.row = generate(plan.schedule, p, representative_microbatches(p, plan.microbatches), v).actions[stage]

    def memory(self) -> Bytes:
        """Bytes by cause at the worst moment."""
        resident = Counter[str]()
        for index, one in enumerate(self.chunks):
            resident.update(one.resident(alone=index == 0))
        ends = [Counter[str](), Counter[str]()]
        for one in self.chunks:
            for total, found in zip(ends, one.end()):
                total.update({cause: int(size) for cause, size in found.items()})
        return worst_of(resident, [*self._moments(), *ends])

    def _moments(self) -> Iterator[Counter[str]]:
        """What is held at every action beside what is resident."""
        chunks, row = self.chunks, self.row
        last = {action.chunk: index for index, action in enumerate(row) if action.kind != "F"}
        flying, backwards = [0] * len(chunks), [0] * len(chunks)
        for index, action in enumerate(row):
            k, one = action.chunk, chunks[action.chunk]
            if action.kind == "F":
                kind = "F later" if backwards[k] else "F"
            else:
                kind = "B last" if index == last[k] else "B" if backwards[k] else "B first"
            moment = Counter({cause: int(size) for cause, size in one.measured.peaks[kind].items()})
            moment["buffers"] += one.outgoing
            if index + 1 < len(row):
                moment["buffers"] += chunks[row[index + 1].chunk].incoming[row[index + 1].kind]
            for c, other in enumerate(chunks):
                own = int(c == k and action.kind != "F")  # the one in work is in the peak
                moment["activations"] += (flying[c] - own) * other.measured.saved
                moment["gradients"] += other.loose if c != k and backwards[c] else 0
            yield moment
            if action.kind == "F":
                flying[k] += 1
            elif action.kind != "I":
                flying[k], backwards[k] = flying[k] - 1, backwards[k] + 1


_ROOMS, _MOST_ROOMS = 2, 4


def message_room(shared: ChunkKeys, stage: int) -> int:
    """Bytes on one device of the stage."""
    plan, here, nodes = shared.plan, shared.plan.stages[stage], shared.graph.by_name()
    if shared.cluster.device(here.devices[0]).kind != "cpu":
        return 0
    host = plan.host_of(here.devices[0])
    sizes: set[tuple[int, int]] = set()
    for one in plan.transfers:
        source, target = plan.stages[one.source], plan.stages[one.target]
        other = one.target if stage == one.source else one.source
        if stage not in (one.source, one.target) or plan.host_of(plan.stages[other].devices[0]) != host:
            continue
        if stage == one.source:
            spec = source.chunks[one.source_chunk].sends[one.node]
        elif one.node in shared.grad:
            spec = without_partials(target.chunks[one.target_chunk].receives[one.node].cotangent)
        else:
            continue
        kind = nodes[one.node].meta["type"]
        code = plan.code("activations") if kind.is_float else "none"
        elements = prod(local_shape(kind.shape, spec, here.mesh_shape))
        sizes.add((other, carried_bytes(code, elements, kind.dtype.itemsize)))
    ahead = plan.num_chunks > 1 or plan.schedule == "gpipe"
    return min(plan.microbatches, _MOST_ROOMS if ahead else _ROOMS) * sum(size for _, size in sizes)
