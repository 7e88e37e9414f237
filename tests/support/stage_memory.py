"""The memory of one stage alone, its programs run for it: what ``stage_memories`` must say where it shares runs."""

from __future__ import annotations

from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.memory.chunk import Bytes, ChunkMemory, MemoryContext
from meshwright.compiler.memory.stage import memory_of_chunks
from meshwright.compiler.plan.plan import Plan


def stage_memory(graph: Graph, plan: Plan, stage: int) -> Bytes:
    """Bytes by cause of one stage. Raises what its program raises if it cannot run on meta tensors."""
    context = MemoryContext(graph.with_batch(plan.microbatch_size), plan)
    chunks = [ChunkMemory(context, stage, chunk) for chunk in range(len(plan.stages[stage].chunks))]
    return memory_of_chunks(context, chunks, stage)
