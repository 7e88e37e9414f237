"""Rules checked by execution: run an op whole and split, forward and backward, and compare.

For one op and one choice on a mesh (``check_choice``):

1. random operands and output cotangents; where possible in float64, so that equal means equal to 1e-8;
2. the op whole, on one device: outputs and operand gradients;
3. each operand dealt out by its *value* placement (S: blocks, R: copies, P: random addends), the localized op run in lockstep on
   every device, output cotangents dealt out by their *cotangent* placement, backward run in lockstep too;
4. outputs put together by their value placement, operand gradients by their cotangent placement (copies must agree), compared;
5. the collectives that were run, by phase, kind and axis, compared with those that the choice claims (``Internal``).

``missing_splits`` turns it around: which cuts of operands does execution prove right that the rule does not offer?
``python -m meshwright.compiler.rules.check package.module:function`` reports on the graphs that ``function()`` yields.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..graph import Graph, TensorType, op_name, tensor_operands
from ..spec import P, Placement, R, S, Spec, local_shape
from . import MeshChoice, mesh_choices, pairs_choice, rule_for
from .lockstep import LockstepComm, LockstepGroup

__all__ = [
    "LockstepComm",
    "LockstepGroup",
    "Report",
    "assemble",
    "check_choice",
    "check_node",
    "distribute",
    "example_node",
    "missing_splits",
    "random_operands",
    "report",
]


# ---- nodes and operands


def example_node(target: Any, *args: Any, **kwargs: Any) -> Node:
    """A graph node that calls ``target`` with tensors in ``args`` and ``kwargs`` as placeholders, typed by running it on them."""
    graph = torch.fx.Graph()
    made: dict[int, Node] = {}

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in made:
                made[id(value)] = graph.placeholder(f"x{len(made)}")
                made[id(value)].meta["type"] = TensorType(tuple(value.shape), value.dtype)
            return made[id(value)]
        if isinstance(value, list | tuple):
            return type(value)(place(item) for item in value)
        return value

    placed = place(args), {key: place(value) for key, value in kwargs.items()}
    node = graph.call_function(target, *placed)
    with torch.no_grad():
        outputs = LockstepGroup((1,)).run(lambda _: target(*args, **kwargs))[0]
    kinds = tuple(TensorType(tuple(x.shape), x.dtype) for x in _flat(outputs))
    node.meta.update(type=kinds[0] if isinstance(outputs, torch.Tensor) else kinds, module="", line="")
    return node


def random_operands(node: Node, generator: torch.Generator) -> list[torch.Tensor]:
    """Operands that the rule makes itself (``example_operands``), or normal floats and integers 0 and 1, by dtype and shape."""
    made = rule_for(node).example_operands(node, generator)
    if made is not None:
        return made
    return [random_tensor(operand.meta["type"], generator) for operand in tensor_operands(node)]


def random_tensor(kind: TensorType, generator: torch.Generator, high: int = 2) -> torch.Tensor:
    """Normal values for floats, integers below ``high``, fair coins for bools."""
    if kind.is_float:
        return torch.randn(kind.shape, generator=generator, dtype=torch.float64).to(kind.dtype)
    return torch.randint(0, high, kind.shape, generator=generator).to(kind.dtype)


# ---- placements


def distribute(
    x: torch.Tensor, spec: Spec, mesh_shape: Sequence[int], generator: torch.Generator
) -> list[torch.Tensor]:
    """Each device's part of ``x``, by rank. Addends (P) are random and sum to ``x``; one of the terms of Pmax is ``x`` at each place."""
    if not spec:
        return [x]
    placement, size = spec[0], mesh_shape[0]
    inner = functools.partial(distribute, spec=spec[1:], mesh_shape=mesh_shape[1:], generator=generator)
    if placement.is_shard:
        assert x.shape[placement.dim] % size == 0, (tuple(x.shape), spec, mesh_shape)
        return [part for block in x.chunk(size, placement.dim) for part in inner(block.contiguous())]
    if placement == R:
        return inner(x) * size
    if x.dtype == torch.bool:
        raise ValueError("a bool tensor cannot be a sum, but got placement P; use R or S")
    noise = [random_tensor(TensorType(tuple(x.shape), x.dtype), generator) for _ in range(size - 1)]
    if placement == P:
        parts = [*noise, x - sum(noise)] if noise else [x]
    else:
        parts = [x] + [x - part.abs() for part in noise]
    return [part for addend in parts for part in inner(addend)]


def assemble(parts: Sequence[torch.Tensor], spec: Spec, mesh_shape: Sequence[int], rtol: float) -> torch.Tensor:
    """The whole tensor of the devices' parts; ValueError if replicas differ or parts do not fit together."""
    if not spec:
        return parts[0]
    placement, size = spec[0], mesh_shape[0]
    stride = len(parts) // size
    blocks = [assemble(parts[i * stride : (i + 1) * stride], spec[1:], mesh_shape[1:], rtol) for i in range(size)]
    if len({tuple(block.shape) for block in blocks}) > 1:
        raise ValueError(f"devices hold equal shapes, but got {[tuple(block.shape) for block in blocks]}")
    if placement.is_shard:
        return torch.cat(blocks, placement.dim)
    if placement == R:
        if not all(_close(block, blocks[0], rtol) for block in blocks[1:]):
            raise ValueError("replicas differ")
        return blocks[0]
    stacked = torch.stack(blocks)
    return stacked.sum(0, dtype=stacked.dtype) if placement == P else stacked.amax(0)


def _close(a: torch.Tensor, b: torch.Tensor, rtol: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = b[b.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=rtol, atol=rtol * scale, equal_nan=True)


# ---- running


@dataclass
class _Run:
    """What one device computed: outputs, and one gradient per operand (None: no gradient reaches it)."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


def _flat(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else [x for x in outputs if x is not None]


def _bind(args: Any, kwargs: Any, node: Node, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Args with operand nodes replaced by tensors: by position (``mul(x, x)`` has two), or by node where localize dropped some."""
    operands = tensor_operands(node)
    present: list[Node] = []
    torch.fx.map_arg((args, kwargs), lambda n: present.append(n) or n)
    if present == operands:
        queue = iter(tensors)
        return torch.fx.map_arg((args, kwargs), lambda _: next(queue))
    by_node = dict(zip(operands, tensors))
    assert len(by_node) == len(operands), f"{node.name}: localize must keep repeated operands in order"
    return torch.fx.map_arg((args, kwargs), lambda n: by_node[n])


def _call(
    call: tuple[Any, Any, Any], node: Node, tensors: Sequence[torch.Tensor], comm: LockstepComm, double: bool
) -> list[torch.Tensor]:
    target, args, kwargs = call
    args, kwargs = _bind(args, kwargs, node, tensors)
    if double:
        args, kwargs = _doubled(args), _doubled(kwargs)
    comm.phase = "forward"
    return _flat(target(*args, **kwargs))


def _run(
    call: tuple[Any, Any, Any],
    node: Node,
    operands: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    comm: LockstepComm,
    double: bool,
    frozen: frozenset[int],
) -> _Run:
    wanted = [k for k, x in enumerate(operands) if x.is_floating_point() and k not in frozen]
    leaves = [x.detach().clone().requires_grad_(k in wanted) for k, x in enumerate(operands)]
    # an op may refuse leaves; a view of them makes ordinary intermediate tensors
    outputs = _call(call, node, [x.view_as(x) for x in leaves], comm, double)
    comm.phase = "backward"
    tracked = [(y, g) for y, g in zip(outputs, cotangents) if y.requires_grad and g is not None]
    gradients: list[torch.Tensor | None] = [None] * len(leaves)
    if tracked and wanted:
        ys, gs = [y for y, _ in tracked], [g for _, g in tracked]
        for k, gradient in zip(wanted, torch.autograd.grad(ys, [leaves[k] for k in wanted], gs, allow_unused=True)):
            gradients[k] = gradient
    return _Run([y.detach() for y in outputs], gradients)


def _doubled(value: Any) -> Any:
    """Literals of low-precision dtypes become float64, so that casts do not lose the precision of the check."""
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, list | tuple):
        return type(value)(_doubled(item) for item in value)
    return {key: _doubled(item) for key, item in value.items()} if isinstance(value, dict) else value


@dataclass
class _Whole:
    """The op on one device: operands and cotangents that it ran on, whether in float64, operands that take no gradient."""

    inputs: list[torch.Tensor]
    cotangents: list[torch.Tensor | None]
    run: _Run
    double: bool
    frozen: frozenset[int]

    @property
    def rtol(self) -> float:
        """1e-8 if all of it is in float64, else 1e-4."""
        low = (torch.float32, torch.float16, torch.bfloat16)
        return 1e-8 if self.double and all(y.dtype not in low for y in self.run.outputs) else 1e-4


def _run_whole(node: Node, operands: list[torch.Tensor], generator: torch.Generator) -> _Whole:
    """Run the node itself on one device, in float64 if the op can; raises what the op raises."""
    one = LockstepGroup((1,))
    call = (node.target, node.args, dict(node.kwargs))

    def attempt(double: bool, frozen: frozenset[int]) -> _Whole:
        inputs = [x.double() if double and x.is_floating_point() else x for x in operands]
        outputs = one.run(lambda comm: _call(call, node, inputs, comm, double))[0]
        kinds = [TensorType(tuple(y.shape), y.dtype) for y in outputs]
        cotangents = [random_tensor(kind, generator) if kind.is_float else None for kind in kinds]
        try:
            run = one.run(lambda comm: _run(call, node, inputs, cotangents, comm, double, frozen))[0]
        except RuntimeError as error:
            also = _undifferentiable(node, str(error)) - frozen
            if not also:
                raise
            return attempt(double, frozen | also)
        return _Whole(inputs, cotangents, run, double, frozen)

    try:
        return attempt(True, frozenset())
    except (RuntimeError, NotImplementedError, TypeError):
        return attempt(False, frozenset())


def _undifferentiable(node: Node, message: str) -> frozenset[int]:
    """The operands whose argument an autograd error names as not differentiable."""
    match = re.search(r"not differentiable with respect to argument '(\w+)'", message)
    if match is None or not isinstance(node.target, torch._ops.OpOverload):
        return frozenset()
    names = [argument.name for argument in node.target._schema.arguments]
    value = node.kwargs.get(match[1]) or dict(zip(names, node.args)).get(match[1])
    return frozenset(k for k, operand in enumerate(tensor_operands(node)) if operand is value)


# ---- the checks


def check_choice(
    node: Node,
    labels: Sequence[str] | MeshChoice,
    mesh_shape: Sequence[int],
    operands: list[torch.Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> list[str]:
    """What is wrong with one choice on one mesh, in words; an empty list if execution confirms it.

    Raises ValueError if the choice is not offered, and whatever the op itself raises when run whole.
    """
    choice = labels if isinstance(labels, MeshChoice) else pairs_choice(node, labels, mesh_shape)
    generator = generator or torch.Generator().manual_seed(0)
    operands = operands or random_operands(node, generator)
    whole = _run_whole(node, operands, generator)
    inputs, cotangents, rtol = whole.inputs, whole.cotangents, whole.rtol
    mesh_shape = tuple(mesh_shape)

    problems = []
    columns = (("operand", choice.inputs, inputs), ("output", choice.outputs, whole.run.outputs))
    for side, pairs, tensors in columns:
        if len(pairs) != len(tensors):
            return [f"the rule speaks of {len(pairs)} {side}s, the op has {len(tensors)}"]
        for k, (pair, tensor) in enumerate(zip(pairs, tensors)):
            if tensor.is_floating_point() and any(
                a.is_shard != b.is_shard or (a.is_shard and a.dim != b.dim) for a, b in zip(pair.value, pair.cotangent)
            ):
                problems.append(f"{side} {k} and its gradient are cut differently: {pair}")
    if problems:
        return problems

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

        def device(comm: LockstepComm) -> _Run:
            mine = [parts[comm.rank] for parts in dealt]
            against = [parts[comm.rank] for parts in dealt_cotangents]
            run = _run(call, node, mine, against, comm, whole.double, whole.frozen)
            if comm.rank == 0:
                logs.append(list(comm.log))
            return run

        runs = LockstepGroup(mesh_shape).run(device)
    except Exception as error:  # a wrong rule may fail in any way inside the op: that is a finding
        return [f"running it split fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]

    for k, (expected, pair) in enumerate(zip(whole.run.outputs, choice.outputs)):
        wanted = local_shape(expected.shape, pair.value, mesh_shape)
        if runs[0].outputs[k].shape != wanted:
            problems.append(f"output {k} has local shape {tuple(runs[0].outputs[k].shape)} where {pair} means {wanted}")
            continue
        problems += _compare(f"output {k}", [run.outputs[k] for run in runs], pair.value, expected, mesh_shape, rtol)
    for k, (expected_gradient, pair) in enumerate(zip(whole.run.gradients, choice.inputs)):
        parts = [run.gradients[k] for run in runs]
        if not inputs[k].is_floating_point() or (expected_gradient is None and all(part is None for part in parts)):
            continue
        expected = torch.zeros_like(inputs[k]) if expected_gradient is None else expected_gradient
        filled = [torch.zeros_like(dealt[k][rank]) if part is None else part for rank, part in enumerate(parts)]
        problems += _compare(f"gradient of operand {k}", filled, pair.cotangent, expected, mesh_shape, rtol)

    ran = Counter(entry[:3] for entry in logs[0]) if logs else Counter()
    claimed = Counter((one.phase, one.kind, axis) for axis, one in choice.internal)
    if ran != claimed:
        problems.append(f"it runs collectives {dict(ran)}, but claims {dict(claimed)}")
    return problems


def _compare(
    what: str, parts: list[torch.Tensor], spec: Spec, expected: torch.Tensor, mesh_shape: tuple[int, ...], rtol: float
) -> list[str]:
    try:
        got = assemble(parts, spec, mesh_shape, rtol)
    except (ValueError, RuntimeError) as error:
        return [f"{what} as {','.join(map(str, spec))}: {error}"]
    if _close(got, expected, rtol):
        return []
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return [f"{what} is {got.dtype}{tuple(got.shape)}, whole it is {expected.dtype}{tuple(expected.shape)}"]
    off = (got.double() - expected.double()).abs().max()
    return [f"{what} as {','.join(map(str, spec))} differs by {off:.3g}"]


def check_node(
    node: Node, meshes: Sequence[tuple[int, ...]] = ((2,), (2, 2)), seed: int = 0
) -> dict[tuple[tuple[int, ...], tuple[str, ...]], list[str]]:
    """The problems of every choice that the rule of ``node`` offers on these meshes, by (mesh, labels); empty if all is right."""
    wrong = {}
    for mesh_shape in meshes:
        for choice in mesh_choices(node, mesh_shape):
            generator = torch.Generator().manual_seed(seed)
            if problems := check_choice(node, choice, mesh_shape, generator=generator):
                wrong[mesh_shape, choice.labels] = problems
    return wrong


def missing_splits(node: Node, size: int = 2, seeds: int = 5, max_tries: int = 64) -> list[str]:
    """Cuts of operands along one axis of ``size`` devices that execution proves right, value-wise, and the rule does not offer.

    Every operand is tried whole and cut along each dim that ``size`` divides; sizes in the args that repeat the output's shape are
    made local. Reported as text, ``"S0 R -> S0"``. A coincidence of values on all ``seeds`` would be reported too.
    """
    operands = [operand.meta["type"] for operand in tensor_operands(node)]
    offered = {tuple(pair.value[0] for pair in choice.inputs) for choice in mesh_choices(node, (size,))}
    options = [[R, *(S(dim) for dim, extent in enumerate(kind.shape) if extent % size == 0)] for kind in operands]
    found: list[str] = []
    samples: list[_Whole] = []
    for placements in itertools.islice(itertools.product(*options), 1, max_tries + 1):
        if placements in offered:
            continue
        results: set[tuple[Placement, ...]] | None = None
        for seed in range(seeds):
            if seed == len(samples):
                generator = torch.Generator().manual_seed(seed)
                samples.append(_run_whole(node, random_operands(node, generator), generator))
            proven = _naive_outputs(node, placements, size, samples[seed])
            results = proven if results is None else results & proven
            if not results:
                break
        texts = [" ".join(map(str, outputs)) for outputs in results or ()]
        found += [f"{' '.join(map(str, placements))} -> {text}" for text in sorted(texts)]
    return found


def _naive_outputs(node: Node, cuts: tuple[Placement, ...], size: int, whole: _Whole) -> set[tuple[Placement, ...]]:
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
            return _call(call, node, [parts[comm.rank] for parts in dealt], comm, whole.double)

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
class Report:
    """What the checker found over some graphs: texts by op signature; ``checked`` counts choices per signature."""

    checked: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, list[str]] = field(default_factory=dict)
    fallback: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.checked)} ops, {sum(self.checked.values())} choices checked"]
        lines.append(f"wrong rules: {len(self.wrong)}")
        lines += [f"  {name}\n      {text}" for name, texts in self.wrong.items() for text in texts[:3]]
        lines.append(f"missing splits: {sum(map(len, self.missing.values()))}")
        lines += [f"  {name}\n      {'; '.join(texts)}" for name, texts in self.missing.items()]
        lines.append(f"ops without a rule: {len(self.fallback)}")
        lines += [f"  {name}" for name in self.fallback]
        lines.append(f"ops that could not be run: {len(self.failed)}")
        lines += [f"  {name}\n      {text}" for name, text in self.failed.items()]
        return "\n".join(lines)


def signature(node: Node) -> str:
    """Op name, operand types and literal args: nodes of equal signature have equal rules."""
    text = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["type"])
    return f"{op_name(node)}({', '.join(map(str, text[0]))}{''.join(f', {k}={v}' for k, v in text[1].items())})"


def report(
    graphs: Iterable[Graph],
    meshes: Sequence[tuple[int, ...]] = ((2,), (3,), (2, 2)),
    missing: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Check every distinct op of the graphs. Keep these small: each op is run some dozens of times."""
    out = Report()
    for graph in graphs:
        for node in graph.ops():
            name = signature(node) if op_name(node) != "getitem" else ""
            if not name or name in out.checked:
                continue
            progress(name)
            out.checked[name] = 0
            if rule_for(node).is_fallback:
                out.fallback.append(name)
            try:
                wrong = check_node(node, meshes)
                if missing:
                    absent = missing_splits(node)
                    if absent:
                        out.missing[name] = absent
            except Exception as error:  # an op that cannot be run on made-up operands is listed, and the rest goes on
                out.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                continue
            out.checked[name] = sum(len(mesh_choices(node, mesh)) for mesh in meshes)
            if wrong:
                out.wrong[name] = [
                    f"{'×'.join(labels)} on {mesh}: {'; '.join(found)}" for (mesh, labels), found in wrong.items()
                ]
    return out


def main(arguments: Sequence[str]) -> int:
    """``package.module:function [--no-missing]``: report on the graphs it yields; status 1 if a rule is wrong, 2 for bad usage."""
    named = [argument for argument in arguments if not argument.startswith("-")]
    if len(named) != 1 or ":" not in named[0]:
        print(
            "usage: python -m meshwright.compiler.rules.check package.module:function [--no-missing]", file=sys.stderr
        )
        return 2
    module, _, function = named[0].partition(":")
    graphs = getattr(importlib.import_module(module), function)()
    found = report(graphs.values() if isinstance(graphs, dict) else graphs, missing="--no-missing" not in arguments)
    print(found)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, "")
    sys.exit(main(sys.argv[1:]))
