"""``verify``: every tensor of a plan's devices compared with one device, in the order of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..errors import FailedError
from ..frontend.batch_containers import call_arguments, register_containers
from ..frontend.capture import capture
from ..frontend.example_inputs import flat_inputs
from ..frontend.mixed_precision import in_precision
from ..ir.graph import Graph, op_name, output_of
from ..ir.spec import Pair, Spec, spec_text, without_partials
from ..plan.plan import ParameterSharding, Plan
from ..plan.validation import require_valid
from .capture_check import check_capture as compare_capture
from .chunk_programs import PlacedChunk, actions_of, parts_of, shrunk
from .compare import Difference, Tolerance, Verification, difference
from .parts import Devices, Parts, moved
from .single_device import SingleDevice, WholeRun
from .split_execution import carries_gradient
from .values import as_dtype, batch_of, buffers_of, chunked, weights_of

__all__ = ["verify"]

TOLERANCES = {"float64": Tolerance(1e-9, 1e-4), "float32": Tolerance(1e-3, 1e-2)}
STEP = 3  # of the counters of random ops: any, but not 0


def verify(
    plan: Plan,
    model: nn.Module,
    *,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    targets: tuple[Any, ...] = (),
    loss_fn: Callable[..., Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | Sequence[int | None] | None = None,
    dtype: str = "float64",
    seed: int = 0,
    check_capture: bool = True,
) -> Verification:
    """Check numerically that a plan computes what one device computes, in this process and without the cluster.

    Every device of every stage runs its local program (devices are threads), tensors go from stage to stage as at run
    time, in the order of the schedule. Each op's output, each reshard, transfer, loss, new buffer, gradient of a tensor
    and gradient of a weight is compared with the model on one device; the first that differs is named.

    The other arguments as in ``plan``; the batch may have any size. Two microbatches run, as small as the plan's cuts
    allow; weights and activations are those of ``model`` at its full size, some times over, so for a large model check
    a plan of a scaled-down one. Weights of equal values get noise, weights on the meta device are random. dtype:
    "float64" or "float32" of everything that is computed; seed: of random ops such as dropout.

    check_capture: whether the model itself is compared with the graph that was captured of it first (loss and every
    gradient, eagerly, at a tiny batch); what could not be compared is in the notes.

    Raises ValueError for a plan of another model, or with ops that have no program, and for a capture that differs from
    the model.
    """
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype is one of {', '.join(TOLERANCES)}, but got {dtype!r}; use one of these")
    args, kwargs = call_arguments(model, example_inputs, example_kwargs or {})
    targets = tuple(targets)
    register_containers(targets)
    captured = capture(model, args, kwargs, targets, loss_fn, batch_dims)
    require_valid(plan, captured)
    if not any(result.kind == "loss" for result in captured.results):
        raise ValueError("a check needs gradients, but got a model without a loss; give loss_fn, or a model with one")
    missed = compare_capture(model, captured, args, kwargs, targets, loss_fn) if check_capture else ""
    small, graph = shrunk(plan, in_precision(captured, plan.precision))
    with _default(getattr(torch, dtype)):
        walk = _Walk(small, graph, model, flat_inputs(args, kwargs, targets), dtype, seed)
        walk.run()
    return walk.verification(missed)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Quotients of integers and the like are of torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class _Subject:
    """The tensor that a comparison is about."""

    kind: str
    part: PlacedChunk
    tensor: str
    spec: Spec
    microbatch: int | None = None
    order: tuple[int, ...] = ()


@dataclass
class _Findings:
    compared: int = 0
    worst: float = 0.0
    worst_tensor: str = ""
    differences: list[tuple[tuple[int, ...], Difference]] = field(default_factory=list)


class _Walk:
    """One check: all actions of the schedule, and what each leaves behind compared."""

    def __init__(
        self, plan: Plan, graph: Graph, model: nn.Module, inputs: Mapping[str, Any], dtype: str, seed: int
    ) -> None:
        wide = getattr(torch, dtype)
        self.plan, self.graph, self.dtype, self.tolerance = plan, graph, dtype, TOLERANCES[dtype]
        self.nodes, self.count = graph.by_name(), plan.microbatches
        self.parts = parts_of(plan, graph)
        self.actions = actions_of(plan, self.parts)
        self.weights, buffers = weights_of(model, graph, wide), buffers_of(model, graph, wide)
        constants = {name: as_dtype(x, wide) for name, x in graph.constants.items()}
        self.batches = chunked(graph, batch_of(graph, inputs, self.count, wide), self.count)
        whole = SingleDevice(graph, self.parts, self.weights, buffers, constants, wide)
        self.truth = [whole.run(b, (seed, STEP, i), 1 / self.count) for i, b in enumerate(self.batches)]
        for run in self.truth:
            if not bool(run.loss.isfinite().all()):
                raise ValueError(
                    f"a check needs a finite loss, but got {float(run.loss)}; give other inputs or weights"
                )
        self.findings = _Findings()
        self.reduced: dict[str, list[tuple[PlacedChunk, Parts, Spec]]] = {}  # weight → its gradients, part by part
        self.homes = [self._homes(part) for part in self.parts]
        self.devices = []
        for part, homes in zip(self.parts, self.homes, strict=True):
            stored = {name: home.stored for name, home in homes.items()}
            devices = Devices(part, self.weights, buffers, constants, stored, wide)
            devices.seed, devices.step = seed, STEP
            self.devices.append(devices)

    def _homes(self, part: PlacedChunk) -> Mapping[str, ParameterSharding]:
        return self.plan.stages[part.stage].chunks[part.chunk].parameters

    # ---- running

    def run(self) -> None:
        """All actions, then the weights' gradients."""
        at = {(part.stage, part.chunk): part for part in self.parts}
        back: dict[tuple[int, str, int], list[Parts]] = {}  # (part, send, microbatch) → what came back
        try:
            for action in self.actions:
                part = at[action.stage, action.chunk]
                if action.kind == "F":
                    self._forward(part, action.microbatch)
                elif action.kind in ("B", "I"):  # the halves of a backward are one in autograd
                    self._backward(part, action.microbatch, back)
            for part in self.parts:
                self._reduce(part)
            self._tie()
        except _StoppedError:
            return

    def _forward(self, part: PlacedChunk, microbatch: int) -> None:
        devices, received = self.devices[part.index], {}
        for slot in part.program.slots:
            if slot.kind == "receive":
                received[slot.node] = self._received(part, slot.name, slot.pair, microbatch)
        try:
            devices.forward(microbatch, self.batches[microbatch], received)
        except FailedError as error:
            self._stop(part, error, microbatch)
        for position, node in enumerate(part.nodes):
            if "pair" in node.meta and isinstance(devices.saved[microbatch][0][node.name], Tensor):
                kind = "transfer" if position < len(received) and node.name in received else "value"
                subject = _Subject(kind, part, node.meta["tensor"], node.meta["pair"].value, microbatch,
                             (0, microbatch, part.index, position))  # fmt: skip
                self._compare(subject, node.name, devices.tensor(microbatch, node.name), lambda run: run.values)

    def _received(self, part: PlacedChunk, name: str, pair: Pair, microbatch: int) -> Parts:
        source = self.parts[part.origins[name]]
        exits = zip(source.program.exits, source.results, strict=True)
        exit, node = next((e, n) for e, n in exits if e.kind == "send" and e.name == name)
        sent = self.devices[source.index].tensor(microbatch, node.name)
        blocks = moved(sent, exit.type.shape, source.layout(exit.pair.value), part.layout(pair.value))
        return [x.requires_grad_(sent[0].requires_grad) for x in blocks]

    def _backward(self, part: PlacedChunk, microbatch: int, back: dict[tuple[int, str, int], list[Parts]]) -> None:
        devices = self.devices[part.index]
        arrived = {}
        for exit in part.program.exits:
            if several := back.pop((part.index, exit.name, microbatch), []) if exit.kind == "send" else []:
                arrived[exit.name] = [sum(parts[1:], parts[0]) for parts in zip(*several, strict=True)]
        try:
            gradients = devices.backward(microbatch, arrived, 1 / self.count)
        except FailedError as error:
            self._stop(part, error, microbatch)
        for position, node in enumerate(part.nodes):
            if "pair" in node.meta and carries_gradient(self.truth[microbatch].values[part.index, node.name]):
                subject = _Subject("gradient", part, node.meta["tensor"], node.meta["pair"].cotangent, microbatch,
                             (1, microbatch, -part.index, -position))  # fmt: skip
                self._compare_gradient(subject, node, gradients.get(node.name))
        for slot in part.program.slots:
            grads = gradients.get(slot.node)
            if slot.kind == "receive" and grads is not None:
                self._return(part, slot.name, slot.pair, grads, microbatch, back)

    def _return(
        self, part: PlacedChunk, name: str, pair: Pair, grads: Sequence[Tensor | None], microbatch: int,
        back: dict[tuple[int, str, int], list[Parts]],
    ) -> None:  # fmt: skip
        source = self.parts[part.origins[name]]
        exit = next(e for e in source.program.exits if e.kind == "send" and e.name == name)
        like = next(x for x in grads if x is not None) if any(x is not None for x in grads) else None
        if like is None:
            return
        blocks = [torch.zeros_like(like) if x is None else x for x in grads]
        blocks = self.devices[part.index].whole_blocks(blocks, pair.cotangent)
        ends = part.layout(without_partials(pair.cotangent)), source.layout(without_partials(exit.pair.cotangent))
        arrived = moved(blocks, exit.type.shape, *ends)
        back.setdefault((source.index, name, microbatch), []).append(arrived)
        node = next(s.node for s in part.program.slots if s.name == name and s.kind == "receive")
        subject = _Subject("gradient transfer", source, name, ends[1].spec, microbatch, (1, microbatch, -part.index, 1))
        expected = self.truth[microbatch].gradients[part.index, node]
        if expected is not None:
            self._check(subject, arrived, expected, self._gradient_size(microbatch, expected))

    # ---- weights

    def _reduce(self, part: PlacedChunk) -> None:
        """The gradients of a part's weights where the optimizer reads them."""
        devices = self.devices[part.index]
        for slot in part.program.slots:
            if slot.kind != "parameter" or slot.name not in devices.gradients:
                continue
            home = self.homes[part.index][slot.name]
            blocks = devices.resharded(devices.gradients[slot.name], home.leaf.cotangent, home.gradient)
            self.reduced.setdefault(slot.name, []).append((part, blocks, home.gradient))
            subject = _Subject(
                "weight gradient", part, slot.name, home.gradient, None, (2, part.index, len(self.reduced))
            )
            self._check_weight(subject, blocks, [run.gradients[part.index, slot.node] for run in self.truth])

    def _tie(self) -> None:
        """Weights that several parts hold: the sum where the first has it."""
        for name, several in self.reduced.items():
            part, total, spec = several[0]
            for away, blocks, there in several[1:]:
                more = moved(blocks, self.weights[name].shape, away.layout(there), part.layout(spec))
                total = [a + b for a, b in zip(total, more, strict=True)]
            subject = _Subject("weight gradient", part, name, spec, None, (3, 0, 0))
            self._check_weight(subject, total, [run.weights[name] for run in self.truth])

    def _check_weight(self, told: _Subject, blocks: Parts, grads: Sequence[Tensor | None]) -> None:
        expected = sum((x for x in grads if x is not None), torch.zeros_like(self.weights[told.tensor]))
        self._check(told, blocks, expected, self._gradient_size(0, expected))

    # ---- comparing

    def _compare(
        self, told: _Subject, node: str, blocks: Parts, values: Callable[[WholeRun], Mapping[Any, Any]]
    ) -> None:
        assert told.microbatch is not None
        key = (told.part.index, node)
        expected = values(self.truth[told.microbatch])[key]
        size = max(_largest(expected), self.tolerance.floor * self.truth[told.microbatch].sizes[key])
        others = [values(run)[key] for i, run in enumerate(self.truth) if i != told.microbatch]
        self._check(told, [x.detach() for x in blocks], expected, size, others)

    def _compare_gradient(self, told: _Subject, node: Node, grads: Sequence[Tensor | None] | None) -> None:
        assert told.microbatch is not None
        key = (told.part.index, node.name)
        expected = self.truth[told.microbatch].gradients[key]
        there = next((x for x in grads or () if x is not None), None)
        if expected is None and there is None:
            return
        like = self.truth[told.microbatch].values[key]
        expected = torch.zeros_like(like) if expected is None else expected
        if there is None:
            zeros = torch.zeros(told.part.layout(without_partials(told.spec)).local_shape(like.shape), dtype=like.dtype)
            blocks = [zeros] * len(told.part.devices)
        else:
            blocks = [torch.zeros_like(there) if x is None else x for x in grads or ()]
        others = [run.gradients[key] for i, run in enumerate(self.truth) if i != told.microbatch]
        size = self._gradient_size(told.microbatch, expected)
        self._check(told, blocks, expected, size, [x for x in others if x is not None])

    def _gradient_size(self, microbatch: int, expected: Tensor) -> float:
        return max(_largest(expected), self.tolerance.floor * self.truth[microbatch].largest_gradient)

    def _check(
        self, told: _Subject, blocks: Parts, expected: Tensor, size: float, others: Sequence[Tensor] = ()
    ) -> None:
        size = size or 1.0
        mesh = told.part.mesh_shape
        error, cause = difference(blocks, told.spec, mesh, expected, size, self.tolerance, others)
        self.findings.compared += 1
        if error > self.findings.worst:
            self.findings.worst, self.findings.worst_tensor = error, f"{told.kind} of {told.tensor}"
        if not error <= self.tolerance.relative:
            self.findings.differences.append((told.order, self._difference(told, error, size, cause)))

    def _difference(self, told: _Subject, error: float, size: float, cause: str) -> Difference:
        node = self.nodes.get(told.tensor)
        maker = None if node is None or node.op == "placeholder" else output_of(node)[0]
        op, module = ("", "") if maker is None else (op_name(maker), str(maker.meta.get("module", "")))
        source = node.meta["source"].name if node is not None and node.op == "placeholder" else told.tensor
        return Difference(
            told.kind, source, op, module, told.part.stage, told.part.chunk, told.microbatch, spec_text(told.spec),
            error, size, cause,
        )  # fmt: skip

    def _stop(self, part: PlacedChunk, error: FailedError, microbatch: int) -> None:
        """A device cannot go on: that is the difference, unless there is one before."""
        forward = error.node is not None
        position, node = next(
            ((i, n) for i, n in enumerate(part.nodes) if n.name == error.node), (len(part.nodes), part.nodes[-1])
        )
        order = (0, microbatch, part.index, position) if forward else (1, microbatch, -part.index, 0)
        subject = _Subject("value" if forward else "gradient", part, node.meta["tensor"], (), microbatch, order)
        cause = f"a device fails there: {error}"
        self.findings.differences.append((order, self._difference(subject, float("inf"), 1.0, cause)))
        raise _StoppedError from error

    def verification(self, missed: str) -> Verification:
        """The result. missed: what was not compared, in words."""
        first = min(self.findings.differences, key=lambda found: found[0], default=None)
        notes = [text for text in (missed,) if text]
        notes += [f"gradients are summed exactly here, not in code {c}" for c in sorted(_codes(self.plan))]
        if self.plan.precision != "model":
            notes.append(f"everything is computed in {self.dtype}, not in {self.plan.precision}")
        return Verification(
            first is None, self.findings.compared, self.findings.worst, self.findings.worst_tensor, self.count,
            self.plan.microbatch_size, self.dtype, None if first is None else first[1], tuple(notes),
        )  # fmt: skip


class _StoppedError(Exception):
    """A device failed; what was found so far is the answer."""


def _codes(plan: Plan) -> set[str]:
    return {wire.compressor for stage in plan.stages for wire in stage.wire} - {"none"}


def _largest(x: Tensor) -> float:
    """The largest finite magnitude."""
    if not x.numel() or not carries_gradient(x):
        return 0.0
    size = x.abs()
    return float(size.masked_fill(~size.isfinite(), 0).max())
