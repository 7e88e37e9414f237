"""The peak memory of one device of a stage, by cause: its lowered program is run on tensors without data
(``abstract_run.py``) in the order in which the runtime runs it.

    resident   parameters, buffers, constants, optimizer state, the flat buckets of gradients, the caller's batch, pages
               through which messages pass
    actions    forward, first backward, a later one, the last one (which fills the buckets), each run once and measured
    schedule   at each action of the stage: what it allocates, on top of what the microbatches in flight keep, and the
               messages that are posted or not yet known to have arrived
    step       gradients of tied copies, then the optimizer, one parameter after the other (all at once on CUDA devices)

Stages with equal programs share one run. Each virtual stage (chunk) of a stage is run, and the schedule says which of
them are in flight together. A weight that two of them use is counted in each.

**Shared memory.** Ranks on the CPUs of one host pass messages through shared pages
(``runtime/transport/shared_memory.py``), which they never free. A rank keeps as many buffers of a size for each peer as
there ever were messages on their way to it at once: two where a stage sends and then waits for an answer, more where it
runs ahead, four at the most.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from ...costmodel.codecs import carried_bytes
from ..errors import StageError
from ..ir.graph import Graph
from ..ir.spec import local_shape, without_partials
from ..pipeline.families import generate
from ..pipeline.regular import representative_microbatches
from ..plan.plan import Plan
from ..workers import run_all
from .chunk import Bytes, ChunkMemory, MemoryContext, peak_memory

__all__ = ["memory_of_chunks", "message_bytes", "stage_memories", "with_stage_memories"]


def with_stage_memories(graph: Graph, plan: Plan, workers: int = 1) -> Plan:
    """Return ``plan`` with the memory of every stage's prediction from ``stage_memories`` ("framework" stays).
    workers: number of processes.

    A stage with an op that PyTorch cannot run without data (it has no meta kernel) keeps its estimate from the rules,
    and the plan gets a note. Raises StageError for a stage whose program fails: training would fail there, too.
    """
    stages, notes = list(plan.prediction.stages), list(plan.prediction.notes)
    for index, memory in enumerate(stage_memories(graph, plan, workers)):
        if isinstance(memory, NotImplementedError) and "Meta" in str(memory):
            op = (re.search(r"\w+::[\w.]+", str(memory)) or ["an op"])[0]
            notes.append(f"memory of stage {index} is estimated op by op: PyTorch cannot run {op} without data")
            continue
        if isinstance(memory, Exception):
            raise StageError(index, memory) from memory
        framework = stages[index].memory_bytes.get("framework", 0.0)
        stages[index] = replace(stages[index], memory_bytes={**memory, "framework": framework})
    return replace(plan, prediction=replace(plan.prediction, stages=tuple(stages), notes=tuple(notes)))


def stage_memories(graph: Graph, plan: Plan, workers: int = 1) -> list[Bytes | Exception]:
    """Return the bytes by cause of every stage (``memory_of_chunks``), or the error of its program. Equal programs run
    once. workers: number of processes; all but the first are forks."""
    context = MemoryContext(graph.with_batch(plan.microbatch_size), plan)
    memories: dict[int, Bytes | Exception] = {}
    keys: dict[int, list[Hashable]] = {}
    for index, stage in enumerate(plan.stages):
        try:
            keys[index] = [context.structure(index, chunk) for chunk in range(len(stage.chunks))]
        except Exception as error:
            memories[index] = error
    for some in run_all([partial(_stage_memories, context, part) for part in _dealt(keys, workers)]):
        memories |= some
    return [memories[index] for index in range(len(plan.stages))]


def _dealt(keys: Mapping[int, Sequence[Hashable]], workers: int) -> list[dict[int, Sequence[Hashable]]]:
    """Deal the stages out to workers: to the one that has most of their programs, else to the one with the fewest."""
    parts: list[dict[int, Sequence[Hashable]]] = [{} for _ in range(workers)]
    known: list[set[Hashable]] = [set() for _ in parts]
    for index, programs in keys.items():
        k = min(range(workers), key=lambda k: (len({*programs} - known[k]), len(known[k])))
        parts[k][index] = programs
        known[k].update(programs)
    return [part for part in parts if part] or [{}]


def _stage_memories(context: MemoryContext, stages: Mapping[int, Sequence[Hashable]]) -> dict[int, Bytes | Exception]:
    """The memory of these stages, given with the structure of each of their programs."""
    runs: dict[Hashable, ChunkMemory | Exception] = {}
    memories: dict[int, Bytes | Exception] = {}
    for index, keys in stages.items():
        try:
            for chunk, key in enumerate(keys):
                if key not in runs:
                    runs[key] = ChunkMemory(context, index, chunk)
            parts = [runs[key] for key in keys]
            wrong = [part for part in parts if isinstance(part, Exception)]
            memories[index] = (
                wrong[0]
                if wrong
                else memory_of_chunks(context, [p for p in parts if isinstance(p, ChunkMemory)], index)
            )
        except Exception as error:
            runs.update(dict.fromkeys(keys, error))
            memories[index] = error
    return memories


def memory_of_chunks(context: MemoryContext, chunks: Sequence[ChunkMemory], stage: int) -> Bytes:
    """Bytes alive on the fullest device of a stage with these chunks at the worst moment of a training step, by cause.

    The step is the second or a later one. The sum is the peak of live tensor storages, without the framework itself.
    Causes: "parameters" (with buffers and constants), "gradients", "optimizer" (its state), "activations" (what
    forwards keep for backwards), "temporary", "buffers" (of messages between stages, of tied weights, and of gradient
    codecs with their residuals), "inputs" (the whole batch, as every rank passes it).
    """
    memory = chunks[0].memory(stage) if len(chunks) == 1 else _VirtualStages(chunks, stage).memory()
    lasting = message_bytes(context, stage)
    return {**memory, "buffers": memory.get("buffers", 0) + lasting} if lasting else memory


class _VirtualStages:
    """The virtual stages of one stage, in flight together as the schedule has it."""

    def __init__(self, chunks: Sequence[ChunkMemory], stage: int) -> None:
        self.chunks, plan = chunks, chunks[0].plan
        p, v = len(plan.stages), len(chunks)
        few = representative_microbatches(plan.schedule, p, plan.microbatches)
        self.row = generate(plan.schedule, p, few, v).actions[stage]

    def memory(self) -> Bytes:
        """Bytes by cause at the worst moment."""
        resident = Counter[str]()
        for index, chunk in enumerate(self.chunks):
            resident.update(chunk.resident(alone=index == 0))
        ends = [Counter[str](), Counter[str]()]
        for chunk in self.chunks:
            for total, moment in zip(ends, chunk.end()):
                total.update({cause: int(size) for cause, size in moment.items()})
        return peak_memory(resident, [*self._moments(), *ends])

    def _moments(self) -> Iterator[Counter[str]]:
        """The bytes at every action beside the resident ones."""
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
                moment["gradients"] += other.unbucketed_gradients if c != k and backwards[c] else 0
            yield moment
            if action.kind == "F":
                flying[k] += 1
            elif action.kind != "I":
                flying[k], backwards[k] = flying[k] - 1, backwards[k] + 1


#: Shared-memory buffers of one size per peer: where a stage waits for an answer, and where it runs ahead.
_BUFFERS, _MAX_BUFFERS = 2, 4


def message_bytes(context: MemoryContext, stage: int) -> int:
    """Bytes of the shared-memory pages that one device of the stage keeps."""
    plan, here, nodes = context.plan, context.plan.stages[stage], context.graph.by_name()
    if context.cluster.device(here.devices[0]).kind != "cpu":
        return 0
    host = plan.host_of(here.devices[0])
    sizes: set[tuple[int, int]] = set()
    for transfer in plan.transfers:
        source, target = plan.stages[transfer.source], plan.stages[transfer.target]
        other = transfer.target if stage == transfer.source else transfer.source
        if stage not in (transfer.source, transfer.target) or plan.host_of(plan.stages[other].devices[0]) != host:
            continue
        if stage == transfer.source:
            spec = source.chunks[transfer.source_chunk].sends[transfer.node]
        elif transfer.node in context.grad:
            spec = without_partials(target.chunks[transfer.target_chunk].receives[transfer.node].cotangent)
        else:
            continue
        kind = nodes[transfer.node].meta["type"]
        code = plan.code("activations") if kind.dtype.is_floating_point else "none"
        elements = prod(local_shape(kind.shape, spec, here.mesh_shape))
        sizes.add((other, carried_bytes(code, elements, kind.dtype.itemsize)))
    ahead = plan.num_chunks > 1 or plan.schedule == "gpipe"
    return min(plan.microbatches, _MAX_BUFFERS if ahead else _BUFFERS) * sum(size for _, size in sizes)
