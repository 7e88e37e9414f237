"""Rules checked by execution: run an op whole and split, forward and backward, and compare.

For one op and one choice on a mesh (``check_choice``):

1. random operands and output cotangents; where possible in float64, so that equal means equal to 1e-8;
2. the op whole, on one device: outputs and operand gradients;
3. each operand dealt out by its *value* placement (S: blocks, R: copies, P: random addends), the localized op run in
lockstep on
   every device, output cotangents dealt out by their *cotangent* placement, backward run in lockstep too;
4. outputs put together by their value placement, operand gradients by their cotangent placement (copies must agree),
compared; 5. the collectives that were run, by phase, kind and axis, compared with those that the choice claims
(``Internal``).

A choice without a program (``executable`` False; built-in rules offer none) is not run: its shapes and messages alone
are checked.

``missing_splits`` turns it around: which cuts of operands does execution prove right that the rule does not offer?
``python -m meshwright.compiler.verification.check_rules package.module:function`` reports on the graphs that
``function()`` yields.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import Progress
from torch.fx import Node

from ..frontend.capture import capture
from ..ir.graph import Graph, op_name, tensor_operands
from ..ir.spec import P, Pair, Placement, R, S, Spec, local_shape
from ..rules import MeshChoice, mesh_choices, pairs_choice, rule_for
from .lockstep import LockstepComm, LockstepGroup
from .split_execution import (
    DeviceRun,
    WholeOp,
    assemble,
    call_op,
    carries_gradient,
    close,
    distribute,
    example_node,
    run_op,
    run_whole,
    sample_operands,
)

__all__ = [
    "LockstepComm",
    "LockstepGroup",
    "RuleReport",
    "assemble",
    "check_choice",
    "check_node",
    "distribute",
    "example_node",
    "missing_splits",
    "report",
    "sample_operands",
]


# ---- the checks


def check_choice(
    node: Node,
    labels: Sequence[str] | MeshChoice,
    mesh_shape: Sequence[int],
    operands: list[torch.Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> list[str]:
    """List the faults of one choice on one mesh, in words; empty if execution confirms the choice.

    Raises ValueError if the choice is not offered, and whatever the op itself raises when run whole.
    """
    choice = labels if isinstance(labels, MeshChoice) else pairs_choice(node, labels, mesh_shape)
    generator = generator or torch.Generator().manual_seed(0)
    operands = operands or sample_operands(node, generator)
    whole = run_whole(node, operands, generator)
    inputs, cotangents, rtol = whole.inputs, whole.cotangents, whole.rtol
    mesh_shape = tuple(mesh_shape)

    problems = []
    columns = (("operand", choice.inputs, inputs), ("output", choice.outputs, whole.run.outputs))
    for side, pairs, tensors in columns:
        if len(pairs) != len(tensors):
            return [f"the rule speaks of {len(pairs)} {side}s, the op has {len(tensors)}"]
        for k, (pair, tensor) in enumerate(zip(pairs, tensors)):
            if carries_gradient(tensor) and any(
                a.is_shard != b.is_shard or (a.is_shard and a.dim != b.dim) for a, b in zip(pair.value, pair.cotangent)
            ):
                problems.append(f"{side} {k} and its gradient are cut differently: {pair}")
    if problems:
        return problems
    if not choice.executable:
        return [*_uneven(choice, columns, mesh_shape)]

    try:
        dealt = [distribute(x, pair.value, mesh_shape, generator) for x, pair in zip(inputs, choice.inputs)]
        dealt_cotangents: list[list[torch.Tensor | None]] = [
            [None] * len(LockstepGroup(mesh_shape))
            if g is None
            else [*distribute(g, pair.cotangent, mesh_shape, generator)]
            for g, pair in zip(cotangents, choice.outputs)
        ]
        call = rule_for(node).localize(node, choice.labels, mesh_shape)
        logs: list[list[tuple[str, str, int, int]]] = []

        def device(comm: LockstepComm) -> DeviceRun:
            blocks = [parts[comm.rank] for parts in dealt]
            against = [parts[comm.rank] for parts in dealt_cotangents]
            run = run_op(call, node, blocks, against, comm, whole.double, whole.frozen)
            if comm.rank == 0:
                logs.append(list(comm.log))
            return run

        runs = LockstepGroup(mesh_shape).run(device)
    except Exception as error:  # a wrong rule may fail in any way inside the op: that is a finding
        return [f"running it split fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]

    for k, (expected, pair) in enumerate(zip(whole.run.outputs, choice.outputs)):
        block_shape = local_shape(expected.shape, pair.value, mesh_shape)
        if runs[0].outputs[k].shape != block_shape:
            problems.append(
                f"output {k} has local shape {tuple(runs[0].outputs[k].shape)} where {pair} means {block_shape}"
            )
            continue
        problems += _compare(f"output {k}", [run.outputs[k] for run in runs], pair.value, expected, mesh_shape, rtol)
    for k, (expected_gradient, pair) in enumerate(zip(whole.run.gradients, choice.inputs)):
        parts = [run.gradients[k] for run in runs]
        if not carries_gradient(inputs[k]) or (expected_gradient is None and all(part is None for part in parts)):
            continue
        expected = torch.zeros_like(inputs[k]) if expected_gradient is None else expected_gradient
        filled = [torch.zeros_like(dealt[k][rank]) if part is None else part for rank, part in enumerate(parts)]
        problems += _compare(f"gradient of operand {k}", filled, pair.cotangent, expected, mesh_shape, rtol)

    ran = Counter(entry[:3] for entry in logs[0]) if logs else Counter()
    claimed: Counter[tuple[str, str, int]] = Counter()
    for axis, message in choice.internal:
        claimed[message.phase, message.kind, axis] += message.count
    if ran != claimed:
        problems.append(f"it runs collectives {dict(ran)}, but claims {dict(claimed)}")
    return problems


def _uneven(
    choice: MeshChoice,
    columns: Iterable[tuple[str, Sequence[Pair], Sequence[torch.Tensor]]],
    mesh_shape: tuple[int, ...],
) -> Iterator[str]:
    """Faults of a choice that cannot be run: uneven shapes, and messages along axes that do not exist."""
    for side, pairs, tensors in columns:
        for k, (pair, tensor) in enumerate(zip(pairs, tensors)):
            parts = [1] * tensor.dim()
            for placement, size in zip(pair.value, mesh_shape):
                if placement.is_shard:
                    parts[placement.dim] *= size
            if any(extent % count for extent, count in zip(tensor.shape, parts)):
                yield f"{side} {k} is {tuple(tensor.shape)}, which {pair} does not cut evenly on {mesh_shape}"
    for axis, message in choice.internal:
        side, k = message.like
        if mesh_shape[axis] == 1 or k >= len(choice.inputs if side == "input" else choice.outputs):
            yield f"a message along axis {axis} of {mesh_shape} like {side} {k}, which is none"


def _compare(
    what: str, parts: list[torch.Tensor], spec: Spec, expected: torch.Tensor, mesh_shape: tuple[int, ...], rtol: float
) -> list[str]:
    try:
        got = assemble(parts, spec, mesh_shape, rtol)
    except (ValueError, RuntimeError) as error:
        return [f"{what} as {','.join(map(str, spec))}: {error}"]
    if close(got, expected, rtol):
        return []
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return [f"{what} is {got.dtype}{tuple(got.shape)}, whole it is {expected.dtype}{tuple(expected.shape)}"]
    wide = torch.complex128 if expected.is_complex() else torch.float64
    off = (got.to(wide) - expected.to(wide)).abs().max()
    return [f"{what} as {','.join(map(str, spec))} differs by {off:.3g}"]


def check_node(
    node: Node, meshes: Sequence[tuple[int, ...]] = ((2,), (2, 2)), seed: int = 0
) -> dict[tuple[tuple[int, ...], tuple[str, ...]], list[str]]:
    """The problems of every choice that the rule of ``node`` offers on these meshes, by (mesh, labels); empty if all
    is right."""
    wrong = {}
    for mesh_shape in meshes:
        for choice in mesh_choices(node, mesh_shape):
            generator = torch.Generator().manual_seed(seed)
            if problems := check_choice(node, choice, mesh_shape, generator=generator):
                wrong[mesh_shape, choice.labels] = problems
    return wrong


def missing_splits(node: Node, size: int = 2, seeds: int = 5, max_tries: int = 64) -> list[str]:
    """Cuts of operands along one axis of ``size`` devices that execution proves right, value-wise, and the rule does
    not offer.

    Every operand is tried whole and cut along each dim that ``size`` divides; sizes in the args that repeat the
    output's shape are made local. Reported as text, ``"S0 R -> S0"``. A coincidence of values on all ``seeds`` would
    be reported too.
    """
    operands = [operand.meta["type"] for operand in tensor_operands(node)]
    offered = {tuple(pair.value[0] for pair in choice.inputs) for choice in mesh_choices(node, (size,))}
    options = [[R, *(S(dim) for dim, extent in enumerate(kind.shape) if extent % size == 0)] for kind in operands]
    missing: list[str] = []
    samples: list[WholeOp] = []
    for placements in itertools.islice(itertools.product(*options), 1, max_tries + 1):
        if placements in offered:
            continue
        results: set[tuple[Placement, ...]] | None = None
        for seed in range(seeds):
            if seed == len(samples):
                generator = torch.Generator().manual_seed(seed)
                samples.append(run_whole(node, sample_operands(node, generator), generator))
            proven = _naive_outputs(node, placements, size, samples[seed])
            results = proven if results is None else results & proven
            if not results:
                break
        texts = [" ".join(map(str, outputs)) for outputs in results or ()]
        missing += [f"{' '.join(map(str, placements))} -> {text}" for text in sorted(texts)]
    return missing


def _naive_outputs(node: Node, cuts: tuple[Placement, ...], size: int, whole: WholeOp) -> set[tuple[Placement, ...]]:
    """The output placements under which the op, run as it is on the parts, gives the whole result."""
    generator = torch.Generator().manual_seed(0)
    dealt = [distribute(x, (placement,), (size,), generator) for x, placement in zip(whole.inputs, cuts)]
    expected = whole.run.outputs
    shapes = {tuple(y.shape) for y in expected if _has_sizes(node, tuple(y.shape))}

    def resize(value: Any, dim: int | None) -> Any:
        if isinstance(value, list | tuple) and dim is not None and tuple(value) in shapes and value[dim] % size == 0:
            return [extent // size if d == dim else extent for d, extent in enumerate(value)]
        return value

    proven: set[tuple[Placement, ...]] = set()
    for dim in (None, *range(max(map(len, shapes), default=0))):
        call = (node.target, tuple(resize(arg, dim) for arg in node.args), dict(node.kwargs))

        def device(comm: LockstepComm, call: tuple[Any, Any, Any] = call) -> list[torch.Tensor]:
            return call_op(call, node, [parts[comm.rank] for parts in dealt], comm, whole.double)

        try:
            runs = LockstepGroup((size,)).run(device)
        except Exception:  # the op refuses these parts: not a split
            continue
        if any(len(run) != len(expected) for run in runs):
            continue
        options = []
        for k, y in enumerate(expected):
            placements = [R, *([] if y.dtype == torch.bool else [P]), *(S(d) for d in range(y.ndim))]
            parts = [run[k] for run in runs]
            options.append([p for p in placements if not _compare("", parts, (p,), y, (size,), whole.rtol)])
        proven |= set(itertools.product(*options))
    return proven


def _has_sizes(node: Node, shape: tuple[int, ...]) -> bool:
    return any(isinstance(arg, list | tuple) and tuple(arg) == shape for arg in node.args)


# ---- reports


@dataclass
class RuleReport:
    """The findings of the checker over some graphs, by op signature."""

    #: number of choices that were checked
    checked: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, list[str]] = field(default_factory=dict)
    fallback: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """A table of ops, then every finding."""
        rows: dict[str, list[int]] = {}
        for name, choices in self.checked.items():
            row = rows.setdefault(name.partition("(")[0], [0, 0, 0, 0])
            counts = (1, choices, len(self.wrong.get(name, ())), len(self.missing.get(name, ())))
            row[:] = [old + new for old, new in zip(row, counts)]
        width = max(map(len, rows), default=2)
        lines = [f"{'op':{width}}  forms  choices  wrong  missing"]
        lines += [f"{op:{width}}  {n:5}  {c:7}  {w:5}  {m:7}" for op, (n, c, w, m) in sorted(rows.items())]
        lines.append(f"{len(self.checked)} forms of {len(rows)} ops, {sum(self.checked.values())} choices checked")
        lines += self._section("wrong rules", self.wrong)
        lines += self._section("missing splits", self.missing)
        lines += self._section("ops without a rule (replicated)", {name: [] for name in self.fallback})
        lines += self._section("ops that could not be run", {name: [text] for name, text in self.failed.items()})
        return "\n".join(lines)

    @staticmethod
    def _section(title: str, found: dict[str, list[str]]) -> list[str]:
        lines = [f"{title}: {len(found)}"]
        for name, texts in found.items():
            lines += [f"  {name}", *(f"      {text}" for text in texts[:4])]
            lines += [f"      and {len(texts) - 4} more"] if len(texts) > 4 else []
        return lines


def signature(node: Node) -> str:
    """Op name, operand types and literal args: nodes of equal signature have equal rules."""
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["type"])
    return f"{op_name(node)}({', '.join(map(str, args))}{''.join(f', {k}={v}' for k, v in kwargs.items())})"


def report(
    graphs: Iterable[Graph],
    meshes: Sequence[tuple[int, ...]] = ((2,), (2, 2)),
    missing: bool = True,
    progress: Callable[[Sequence[Node]], Iterable[Node]] = iter,
) -> RuleReport:
    """Check every distinct op of the graphs (getitems aside). Keep these small: each op is run some dozens of times.

    progress: wraps the iteration over the distinct nodes, to show a bar.
    """
    distinct = {signature(node): node for graph in graphs for node in graph.ops() if op_name(node) != "getitem"}
    out = RuleReport()
    for node in progress(list(distinct.values())):
        name = signature(node)
        out.checked[name] = 0
        if rule_for(node).is_fallback and rule_for(node).is_unknown(node):
            out.fallback.append(name)
        try:
            wrong = check_node(node, meshes)
            absent = missing_splits(node) if missing else []
        except Exception as error:  # an op that cannot be run on made-up operands is listed, and the rest goes on
            out.failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            continue
        out.checked[name] = sum(len(mesh_choices(node, mesh)) for mesh in meshes)
        if wrong:
            out.wrong[name] = [f"{labels} on {mesh}: {'; '.join(texts)}" for (mesh, labels), texts in wrong.items()]
        if absent:
            out.missing[name] = absent
    return out


def _graphs(found: Any, batch: int) -> list[Graph]:
    """Graphs from what a ``module:name`` holds: graphs, functions that make ``(model, args, kwargs)``, or
    collections of these."""
    if isinstance(found, Graph):
        return [found.with_batch(batch)]
    if callable(found):
        made = found()
        is_case = isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], torch.nn.Module)
        return [capture(*made).with_batch(batch)] if is_case else _graphs(made, batch)
    return [graph for item in (found.values() if isinstance(found, dict) else found) for graph in _graphs(item, batch)]


def main(arguments: Sequence[str]) -> int:
    """Report on the models that ``package.module:name`` holds (default tests.support.zoo:ZOO); status 1 if a rule is
    wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m meshwright.compiler.verification.check_rules", description=main.__doc__
    )
    parser.add_argument(
        "source",
        nargs="?",
        default="tests.support.zoo:ZOO",
        help="graphs, or functions that make (model, args, kwargs)",
    )
    parser.add_argument("--batch", type=int, default=4, help="batch extent at which ops are run")
    parser.add_argument("--no-missing", action="store_true", help="do not look for splits that rules do not offer")
    options = parser.parse_args(arguments)
    module, _, name = options.source.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        parser.error(f"source is package.module:name, but got {options.source!r} ({error})")
    with Progress(transient=True) as bar:
        task = bar.add_task("capturing", total=None)
        graphs = _graphs(function, options.batch)

        def shown(nodes: Sequence[Node]) -> Iterator[Node]:
            bar.update(task, description="checking", total=len(nodes))
            for node in nodes:
                yield node
                bar.advance(task)

        result = report(graphs, missing=not options.no_missing, progress=shown)
    print(result)
    return 1 if result.wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, "")  # models of the working directory, ``tests.support.zoo`` among them
    sys.exit(main(sys.argv[1:]))
