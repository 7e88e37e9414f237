"""The memory of one virtual stage (a *chunk* of a plan): each kind of action run once without data.

``stage`` puts the virtual stages of one stage together.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch
import torch.fx
from torch import nn

from ...costmodel.cluster import Cluster
from ...costmodel.codecs import carried_bytes
from ...costmodel.compute import writes_scores
from ..cost.pricing import gradient_type
from ..frontend.layers import differentiable_nodes
from ..ir.comm import Context, use_context
from ..ir.graph import Graph, TensorType, op_name
from ..ir.ops.weight_gathers import Gathers
from ..ir.program import Exit, Slot
from ..ir.reshard import Cut, apply_steps, steps_between
from ..ir.spec import Spec, local_shape, without_partials
from ..pipeline.families import generate, in_flight_formula, stashed_versions
from ..plan.lower import lower
from ..plan.plan import BUCKET_BYTES, Chunk, Plan, gradient_buckets, parameter_stages
from ..plan.recompute import PlanLayers
from ..plan.validation import is_asynchronous
from .abstract_run import AbstractComm, Memo, Tracker, allocation_cause, with_stand_ins
from .buffers import ParameterBlock, ReductionBuffers, codec_bytes, communication_key, gather_bytes, update_bytes

__all__ = ["Bytes", "ChunkMemory", "MemoryContext", "peak_memory"]


#: Microbatches of a schedule that are simulated one by one; the others only add to those in flight.
_MAX_ACTIONS = 64
Bytes = Mapping[str, float]


@dataclass
class _Run:
    """Peaks by cause of each kind of action, and what one microbatch keeps between its F and its B."""

    #: By kind of action: "F", "F later", "B first", "B", "B last".
    peaks: dict[str, Bytes] = field(default_factory=dict)
    saved: int = 0


class ChunkMemory:
    """The memory of one virtual stage of a stage, by default its only one."""

    def __init__(self, shared: MemoryContext, stage: int, place: int = 0) -> None:
        self.shared, self.graph, self.plan, self.grad = shared, shared.graph, shared.plan, shared.grad
        self.here = here = self.plan.stages[stage]
        self.chunk = here.chunks[place]
        self.mesh = here.mesh_shape
        device = shared.cluster.device(here.devices[0])
        self.kind, self.writes_scores = device.kind, writes_scores(device)
        self.program = lower(self.graph, self.plan, stage, place, shared.layers)
        names = [slot.name for slot in self.program.slots if slot.kind == "parameter"]
        holders = shared.holders
        self.copies = {name for name in names if holders[name][0] != stage}
        self.shared_with = {name: len(holders[name]) - 1 for name in names if holders[name][0] == stage}
        self.shardings = self.chunk.parameters
        self.received = [slot for slot in self.program.slots if slot.kind == "receive"]
        self.returned = [slot for slot in self.received if slot.node in self.grad]
        exits = enumerate(self.program.exits)
        self.arriving = [
            (i, exit, shared.sent[stage, place, exit.name])
            for i, exit in exits
            if exit.kind == "send" and exit.node in self.grad
        ]
        self.flat = self._flat()

    def _bytes(self, slot: Slot) -> int:
        return _bytes(self._local(slot), slot)

    def _is_gathered(self, slot: Slot) -> bool:
        sharding = self.shardings[slot.name]
        return sharding.stored != sharding.compute.value

    def _leaf_type(self, slot: Slot) -> TensorType:
        """Type of what the stage stores of a slot: masters are what programs gather."""
        own = slot.kind == "parameter" and slot.requires_grad and self._is_gathered(slot)
        return gradient_type(slot.type, self.graph.mixed) if own else slot.type

    def _sum_bytes(self, slot: Slot, spec: Spec | None = None) -> int:
        """Bytes of a gradient as it is summed."""
        return prod(self._local(slot, spec)) * gradient_type(slot.type, self.graph.mixed).dtype.itemsize

    def _local(self, slot: Slot, spec: Spec | None = None) -> tuple[int, ...]:
        return local_shape(slot.type.shape, slot.pair.value if spec is None else spec, self.mesh)

    def _flat(self) -> dict[str, int]:
        """Bytes of the parameters whose gradients end in a flat bucket of several."""
        return {slot.name: self._sum_bytes(slot) for _, group in self._whole_sums() if len(group) > 1 for slot in group}

    def _whole_sums(self) -> list[tuple[tuple[int, ...], list[Slot]]]:
        """The axes and parameters of each bucket that is summed whole on all devices."""
        slots = [slot for slot in self.program.slots if slot.kind == "parameter"]
        keys: list[tuple[Any, int]] = []
        for slot in slots:
            axes = tuple(a for a, p in enumerate(slot.pair.cotangent) if p.is_partial and self.mesh[a] > 1)
            apart = self.graph.mixed and not self._is_gathered(slot)
            axes = axes if self.shardings[slot.name].optimizer == slot.pair.value and not apart else ()
            dtype = self._leaf_type(slot).dtype
            keys.append(((axes, dtype) if axes and slot.requires_grad else None, self._sum_bytes(slot)))
        groups = gradient_buckets(keys, BUCKET_BYTES)
        return [(keys[group[0]][0][0], [slots[i] for i in group]) for group in groups]

    @cached_property
    def blocks(self) -> list[ParameterBlock | None]:
        """Per parameter in program order: the block of it that the optimizer has, if it is less than ops read, or the
        master."""
        blocks: list[ParameterBlock | None] = []
        for slot in self.program.slots:
            if slot.kind == "parameter":
                sharding = self.shardings[slot.name]
                cut = Cut.between(slot.name, sharding.stored, sharding.optimizer, self.mesh)
                often = sharding.reduce == "microbatch"
                key = cut.axes, cut.sizes, often, slot.type.dtype, sharding.compute.cotangent
                apart = cut.axes or (self.graph.mixed and not self._is_gathered(slot))
                whole = not apart or not slot.requires_grad or slot.node not in self.grad
                shape, sums = self._local(slot, sharding.stored), gradient_type(slot.type, self.graph.mixed).dtype
                blocks.append(
                    None if whole else ParameterBlock(slot.name, shape, slot.type.dtype, sums, cut, key, often)
                )
        return blocks

    def codec_bytes(self) -> int:
        """Bytes that the codes of gradients hold: residuals and buffers of a sum per bucket."""
        sums = [(axes, [self._local(slot) for slot in group]) for axes, group in self._whole_sums()]
        blocks = {block.name: block for block in self.blocks if block is not None}
        slots = {slot.name: slot for slot in self.program.slots if slot.kind == "parameter"}
        keys = [(None, 0) if b is None else (b.key, b.sum_bytes) for b in self.blocks]
        names = [None if b is None else b.name for b in self.blocks]
        for group in gradient_buckets(keys, BUCKET_BYTES):
            members = [name for i in group if (name := names[i]) is not None]
            cut, pair = blocks[members[0]].cut, self.shardings[members[0]].compute
            partial = {a for a, p in enumerate(pair.cotangent) if p.is_partial and self.mesh[a] > 1}
            parts = [self._local(slots[name], self.shardings[name].optimizer) for name in members]
            sums.append((tuple(sorted({*cut.axes, *partial})), parts * cut.parts))
        drawing = [self.plan.code("activations")] if self.returned else []
        if any(slot.requires_grad and self._is_gathered(slot) for slot in slots.values()):
            drawing.append(self.plan.code("weights"))
        return codec_bytes(self.plan, self.here, sums, drawing)

    # ---- composition

    def memory(self, stage: int) -> Bytes:
        """Bytes by cause if this is the program of ``stage``."""
        run = self.measured
        if is_asynchronous(self.plan):
            return self._asynchronous_memory(run, stage)
        moments = [self._at(run, *moment) for moment in self._moments(stage)]
        return peak_memory(self.resident(), [*moments, *self.end()])

    def _asynchronous_memory(self, run: _Run, stage: int) -> Bytes:
        """Bytes by cause in a pipeline that never drains: versions of the weights, which graphs in flight read, their
        batches, of which each stage has a copy, and updates while microbatches are in flight."""
        p, m = len(self.plan.stages), self.plan.microbatches
        others, versions = p - 1 - stage, stashed_versions(stage, p, m)
        slots = self.program.slots
        trained = (slot for slot in slots if slot.kind == "parameter" and slot.requires_grad)
        resident = Counter({cause: int(size) for cause, size in self.resident().items()})
        resident["parameters"] += versions * sum(map(self._bytes, trained))
        if others:
            resident["inputs"] += (versions + 1) * sum(
                self._batch_bytes(slot) for slot in slots if slot.kind == "input"
            )
        sent = self.outgoing * (others + 2)  # held until a forward proves that they have arrived
        moments = [self._at(run, kind, others, self.incoming["B"] + sent) for kind in ("F", "F later")]
        backwards = ("B first", "B", "B last") if m > 1 else ("B last",)
        moments += [self._at(run, kind, others, self.incoming["F"] + sent) for kind in backwards]
        ends = [Counter({c: int(size) for c, size in end.items()}) for end in self.end()]
        for end in ends:
            end.update({"activations": others * run.saved, "buffers": sent})
        return peak_memory(resident, [*moments, *ends])

    def _batch_bytes(self, slot: Slot) -> int:
        """Bytes of an input for the whole batch."""
        times = 1 if slot.batch_dim is None else self.plan.microbatches
        return prod(slot.type.shape) * slot.type.dtype.itemsize * times

    @cached_property
    def measured(self) -> _Run:
        """One run of each kind of action."""
        return self._run()

    @cached_property
    def incoming(self) -> dict[str, int]:
        """Bytes of the messages that an action of each kind waits for."""
        sizes = {
            "F": sum(self._message(self._local(slot), slot) for slot in self.received),
            "B": sum(count * self._message(self._cotangent(exit), exit) for _, exit, count in self.arriving),
        }
        return sizes | {"I": sizes["B"], "W": 0}

    @cached_property
    def outgoing(self) -> int:
        """Bytes of the gradients that a backward sends."""
        return sum(
            self._message(self._local(slot, without_partials(slot.pair.cotangent)), slot) for slot in self.returned
        )

    def _message(self, shape: tuple[int, ...], of: Slot | Exit) -> int:
        """Bytes of a block of this shape on its way."""
        code, dtype = self.plan.code("activations"), of.type.dtype
        return carried_bytes(code if of.type.dtype.is_floating_point else "none", prod(shape), dtype.itemsize)

    def _moments(self, stage: int) -> list[tuple[str, int, int]]:
        """(kind of action, other microbatches in flight, bytes of messages posted or held) of every action."""
        p, m = len(self.plan.stages), self.plan.microbatches
        few = min(m, max(_MAX_ACTIONS, 2 * p))
        more = in_flight_formula(self.plan.schedule, stage, p, m)
        more -= in_flight_formula(self.plan.schedule, stage, p, few)
        row = generate(self.plan.schedule, p, few).actions[stage]
        back, incoming = self.outgoing, self.incoming
        out: list[tuple[str, int, int]] = []
        flying = backwards = 0
        recent: list[int] = []  # of each message sent back that may still be on its way: forwards since
        for index, action in enumerate(row):
            posted = incoming[row[index + 1].kind] if index + 1 < len(row) else 0
            if action.kind == "F":
                recent = [age + 1 for age in recent if not age]  # the second forward proves that it has arrived
                out.append(("F later" if backwards else "F", flying + more, posted + back * len(recent)))
                flying += 1
                continue
            last = index + 1 == len(row)
            kind = "B last" if last else "B" if backwards else "B first"
            others = flying - 1
            out.append((kind, others if last else others + more, posted + back * len(recent)))
            if action.kind != "I":  # what the backward of weights still reads is not told apart
                flying, backwards = flying - 1, backwards + 1
            if action.kind != "W":
                recent.append(0)
        return out

    def _cotangent(self, exit: Exit) -> tuple[int, ...]:
        return local_shape(exit.type.shape, without_partials(exit.pair.cotangent), self.mesh)

    def _at(self, run: _Run, kind: str, others: int, messages: int) -> Counter[str]:
        moment = Counter({cause: int(size) for cause, size in run.peaks[kind].items()})
        moment["activations"] += others * run.saved
        moment["buffers"] += messages
        return moment

    # ---- resident bytes

    def resident(self, alone: bool = True) -> Bytes:
        """Bytes that live through the whole step, by cause. alone: count the batch and constants, too."""
        resident: Counter[str] = Counter()
        for slot in self.program.slots:
            if slot.kind == "buffer":
                resident["parameters"] += _bytes(self._local(slot), slot)
            if slot.kind == "parameter":
                leaf = prod(self._local(slot, self.shardings[slot.name].stored)) * self._leaf_type(slot).dtype.itemsize
                resident["parameters"] += leaf
            if slot.kind == "parameter" and slot.requires_grad and slot.name not in self.copies:
                resident["optimizer"] += self._update(slot)[0] - (leaf if self._leaf_type(slot) != slot.type else 0)
        resident["gradients"] += sum(self.flat.values()) + sum(self._sharded_gradients.values())
        resident["buffers"] += self.codec_bytes()
        resident["parameters"] += sum(block.copied_bytes for block in self.blocks if block is not None)
        if not alone:
            return resident
        resident["parameters"] += sum(
            {x.data_ptr(): x.untyped_storage().nbytes() for x in self.graph.constants.values()}.values()
        )
        for node in self.graph.placeholders("input"):
            source, kind = node.meta["source"], node.meta["type"]
            times = 1 if source.batch_dim is None else self.plan.microbatches
            resident["inputs"] += kind.numel * kind.dtype.itemsize * times
        return resident

    def end(self) -> list[Bytes]:
        """The moments after the last backward: tied gradients arrive, the optimizer runs, values are gathered."""
        grads = {
            slot.name: self._sum_bytes(slot, self.shardings[slot.name].gradient)
            for slot in self.program.slots
            if slot.kind == "parameter" and slot.requires_grad and slot.node in self.grad
        }
        counted = {**self.flat, **self._sharded_gradients}
        unbucketed = sum(size for name, size in grads.items() if name not in counted and name not in self.copies)
        tied = sum(grads.get(name, 0) for name, others in self.shared_with.items() if others)
        arriving = sum(grads.get(name, 0) * others for name, others in self.shared_with.items())
        flat = {*self.flat, *(block.name for block in self.blocks if block is not None and not block.cut.axes)}
        sums = sum(grads.get(name, 0) for name, others in self.shared_with.items() if others and name in flat)
        gather = {"gradients": unbucketed + tied, "buffers": arriving}
        temporary = [
            self._update(slot)[1]
            for slot in self.program.slots
            if slot.kind == "parameter" and slot.name in grads and slot.name not in self.copies
        ]
        worst = sum(temporary) if self.kind == "cuda" else max(temporary, default=0)
        own = [block for block in self.blocks if block is not None and block.name not in self.copies]
        return [
            gather,
            {"gradients": unbucketed + sums, "temporary": worst},
            {"gradients": unbucketed + sums, "buffers": gather_bytes(own, self.kind == "cuda")},
        ]

    def _update(self, slot: Slot) -> tuple[int, int]:
        shape = self._local(slot, self.shardings[slot.name].optimizer)
        return update_bytes(shape, slot.type.dtype, self.plan.optimizer, self.kind, self.graph.mixed)

    # ---- parameters that are cut further than ops read them

    @cached_property
    def _sharded_gradients(self) -> dict[str, int]:
        """Parameters whose gradients every microbatch reduces → the bytes that stay of them."""
        return {
            slot.name: self._sum_bytes(slot, self.shardings[slot.name].gradient)
            for slot in self.program.slots
            if slot.kind == "parameter" and slot.requires_grad and slot.node in self.grad
            and self.shardings[slot.name].pattern == "zero2"
        }  # fmt: skip

    @cached_property
    def unbucketed_gradients(self) -> int:
        """Bytes of the gradients that stay after a backward, in no bucket."""
        counted = {**self.flat, **self._sharded_gradients}
        slots = [slot for slot in self.program.slots if slot.kind == "parameter" and slot.node in self.grad]
        return sum(self._sum_bytes(slot) for slot in slots if slot.requires_grad and slot.name not in counted)

    # ---- one run of each kind of action

    def _run(self) -> _Run:
        tracker = Tracker(self.kind, memo=self.shared.memo, writes_scores=self.writes_scores)
        run = _Run()
        forward = with_stand_ins(self.program, tracker)
        native = self.kind == "cuda"
        comm = AbstractComm(self.mesh, native)
        batches = {s.name: self._batch(s) for s in self.program.slots if s.kind == "input"}
        template, gathers = self._template(), Gathers(self.program.graph)
        buffers = ReductionBuffers(self.blocks, tracker, native)
        alike = not self.flat and not buffers.messages  # without buckets all later backwards are
        count = min(self.plan.microbatches, 2 if alike else 3)
        last = [False]
        for position, slot in enumerate(self.program.slots):
            if slot.kind == "parameter" and slot.requires_grad:
                self._hook(template[position], slot.name, tracker, buffers, last)
        tracker.ignore(*batches.values(), *(x for x in template if x is not None))
        code = self.plan.code("weights")
        with use_context(Context(comm, repeating=tracker.repeating, code=code)), tracker:
            for index in range(-bool(gathers.reads), count):  # one before, to learn in which order gathers come
                last[0] = index in (-1, count - 1)
                tracker.restart()
                before = tracker.total
                arguments = self._arguments(template, batches, tracker)
                with gathers.forward(arguments):
                    exits = forward(*arguments)
                run.saved = tracker.total - before
                run.peaks["F later" if index else "F"] = _with_saved(tracker.peak, run.saved)
                tracker.relabel_all("temporary", "activations")
                tracker.restart()
                buffers.arm()
                tracker.in_backward = True
                self._backward(arguments, exits, tracker, comm)
                tracker.in_backward = False
                buffers.flush(last[0])
                if last[0]:
                    buffers.finish()
                kind = "B last" if last[0] else "B" if index else "B first"
                run.peaks[kind] = dict(tracker.peak)
                del arguments, exits
                if index < 0:
                    run.peaks.clear()
                    _forget_gradients(template)
        run.peaks.setdefault("B first", run.peaks["B last"])
        run.peaks.setdefault("B", run.peaks["B last" if alike else "B first"])
        run.peaks.setdefault("F later", run.peaks["F"])
        return run

    def _hook(
        self, leaf: nn.Parameter, name: str, tracker: Tracker, buffers: ReductionBuffers, last: list[bool]
    ) -> None:
        stored_in_parts = name in self._sharded_gradients and name not in buffers.of

        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is None:  # autograd came by with nothing: the loss does not depend on this weight
                return
            if buffers.takes(name, last[0]):
                buffers.fill(name, last[0])
                parameter.grad = None
            elif stored_in_parts or (last[0] and name in self.flat):
                parameter.grad = None  # copied into the bucket, or summed into the part, which is counted already
            else:
                tracker.relabel(parameter.grad, "gradients")

        leaf.register_post_accumulate_grad_hook(hook)

    def _template(self) -> list[Any]:
        out: list[Any] = [None] * len(self.program.slots)
        for position, slot in enumerate(self.program.slots):
            x = torch.empty(self._local(slot), dtype=self._leaf_type(slot).dtype, device="meta")
            if slot.kind == "parameter":
                out[position] = nn.Parameter(x, requires_grad=slot.requires_grad)
            elif slot.kind in ("buffer", "constant"):
                out[position] = x
        return out

    def _batch(self, slot: Slot) -> torch.Tensor:
        """The caller's tensor, as far as its first two microbatches."""
        shape = list(slot.type.shape)
        if slot.batch_dim is not None:
            shape[slot.batch_dim] *= min(2, self.plan.microbatches)
        return torch.empty(shape, dtype=slot.type.dtype, device="meta")

    def _arguments(self, template: list[Any], batches: Mapping[str, torch.Tensor], tracker: Tracker) -> list[Any]:
        arguments = template.copy()
        for position, slot in enumerate(self.program.slots):
            if slot.kind == "input":
                x = batches[slot.name]
                for dim, (whole, part) in enumerate(zip(x.shape, self._local(slot), strict=True)):
                    x = x if whole == part else x.narrow(dim, whole - part, part)
                arguments[position] = tracker.watch(x.contiguous()) if not x.is_contiguous() else x
            elif slot.kind == "receive":
                x = torch.empty(self._local(slot), dtype=slot.type.dtype, device="meta")
                arguments[position] = x.requires_grad_() if slot.node in self.grad else x
        return arguments

    def _backward(
        self, arguments: list[Any], exits: tuple[torch.Tensor, ...], tracker: Tracker, comm: AbstractComm
    ) -> None:
        roots, grads, seeds = [], [], []
        with allocation_cause(tracker, "buffers"):
            for position, exit, count in self.arriving:
                parts = [torch.empty(self._cotangent(exit), dtype=exit.type.dtype, device="meta") for _ in range(count)]
                total = parts[0]
                for part in parts[1:]:
                    total = torch.add(total, part, alpha=1)
                roots.append(exits[position])
                grads.append(total)
                seeds.append(parts)
        for exit, value in zip(self.program.exits, exits, strict=True):
            if exit.kind == "loss" and value.requires_grad:
                roots.append(value)
                grads.append(torch.empty_like(value, requires_grad=False))
        live = [(root, grad) for root, grad in zip(roots, grads, strict=True) if root.requires_grad]
        if live:
            torch.autograd.backward([root for root, _ in live], [grad for _, grad in live])
        del exits, roots, live
        for slot, leaf in zip(self.program.slots, arguments, strict=True):
            if slot.kind == "receive" and slot.node in self.grad and leaf.grad is not None:
                apply_steps(leaf.grad, steps_between(slot.pair.cotangent, without_partials(slot.pair.cotangent)), comm)


def _forget_gradients(arguments: Sequence[Any]) -> None:
    for leaf in arguments:
        if isinstance(leaf, nn.Parameter):
            leaf.grad = None


def _with_saved(peak: Bytes, saved: int) -> Bytes:
    """The peak of a forward, with what it keeps as activations."""
    kept = min(saved, peak.get("temporary", 0))
    return {**peak, "temporary": peak.get("temporary", 0) - kept, "activations": peak.get("activations", 0) + kept}


def peak_memory(resident: Bytes, moments: Sequence[Bytes]) -> Bytes:
    """The fullest moment, with what is resident."""
    worst = max(moments, key=lambda moment: sum(moment.values()))
    causes = ("parameters", "gradients", "optimizer", "activations", "temporary", "buffers", "inputs")
    return {cause: float(resident.get(cause, 0) + worst.get(cause, 0)) for cause in causes}


def _bytes(shape: Sequence[int], tensor: Slot | Exit) -> int:
    return prod(shape) * tensor.type.dtype.itemsize


# ---- facts that all stages share, and the keys of equal programs


class MemoryContext:
    """The graph, the plan and derived facts that the memory of every stage needs."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.layers = PlanLayers(graph, plan)
        self.cluster = Cluster.from_json(json.dumps(plan.cluster))
        self.grad = differentiable_nodes(graph)
        self.holders = parameter_stages(plan.stages)
        self.sent = Counter((one.source, one.source_chunk, one.node) for one in plan.transfers)
        for index, stage in enumerate(plan.stages if plan.num_chunks > 1 else ()):
            for (k, chunk), other in product(enumerate(stage.chunks), stage.chunks):
                self.sent.update((index, k, name) for name in chunk.sends if name in other.receives)
        self.memo: Memo = {}

    @cached_property
    def layer_of(self) -> Mapping[str, int]:
        """Op → its layer."""
        return self.layers.layering.layer_of

    def structure(self, stage: int, place: int = 0) -> Hashable:
        """A key that is equal for chunks with equal programs: the inputs of lowering, with the nodes numbered."""
        here, nodes = self.plan.stages[stage], self.graph.by_name()
        chunk = here.chunks[place]
        number: dict[str, int] = {}
        rows: list[Hashable] = []
        results = {(r.node, r.kind) for r in self.graph.results}
        layered = any(chunk.recompute) or any(sharding.pattern == "zero3" for sharding in chunk.parameters.values())
        first = chunk.layers[0]

        def look(x: Any) -> Hashable:
            if isinstance(x, torch.fx.Node):
                if x.name not in number:
                    number[x.name] = len(number)
                    rows.append(self._outside(x, chunk, stage))
                return _Number(number[x.name])
            if isinstance(x, list | tuple):
                return tuple([look(item) for item in x])
            return x if isinstance(x, int | float | str | None) else repr(x)

        for name, labels in chunk.ops.items():
            node = nodes[name]
            args = look(node.args), look(tuple(node.kwargs.items()))
            number[name] = len(number)
            layer = self.layer_of.get(name, first) - first if layered else 0
            kinds = tuple(kind for where, kind in sorted(results) if where == name)
            rows.append((op_name(node), args, labels, str(node.meta["type"]), name in self.grad, layer, kinds))
            for user in node.users:
                if op_name(user) == "getitem":
                    number[user.name] = len(number)
                    rows.append((number[name], look(user.args[1]), user.name in self.grad))
        sends = [(number.get(name), spec, self.sent[stage, place, name]) for name, spec in chunk.sends.items()]
        device = self.cluster.device(here.devices[0])
        modes = self.layers.recompute.modes[slice(*chunk.layers)]
        machine = (
            device.kind,
            writes_scores(device),
            here.mesh_shape,
            communication_key(self.plan, here),
            str(self.plan.codes),
        )
        return machine, tuple(rows), tuple(sends), modes

    def _outside(self, node: torch.fx.Node, chunk: Chunk, stage: int) -> Hashable:
        """The key of a tensor that comes from outside of the chunk."""
        if node.name in chunk.receives:
            return "receive", chunk.receives[node.name], str(node.meta["type"]), node.name in self.grad
        source, kind = node.meta["source"], str(node.meta["type"])
        if source.kind != "parameter":
            return source.kind, chunk.sources.get(node.name), kind, source.batch_dim
        holders = self.holders[source.name]
        sharding = chunk.parameters[source.name]
        return (
            "parameter",
            sharding,
            kind,
            source.requires_grad,
            node.name in self.grad,
            holders[0] == stage,
            len(holders),
        )


class _Number(int):
    """The number of a tensor, unlike an integer argument."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Number) and int(self) == int(other)

    def __hash__(self) -> int:
        return hash(("number", int(self)))
