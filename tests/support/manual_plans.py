"""Plans written label by label, and what they train compared with one device: for choices that a test names itself
instead of leaving them to the search."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph, op_name, output_of, tensor_operands
from meshwright.compiler.ir.spec import P, Pair, R, without_partials
from meshwright.compiler.plan.lower import lower
from meshwright.compiler.plan.plan import ParameterSharding, Plan
from meshwright.compiler.plan.validation import validate
from meshwright.compiler.rules import mesh_choices
from meshwright.compiler.rules.prune import Pruner

from tests.support.clusters import fast_links
from tests.support.parity import trained_eagerly
from tests.support.zoo import ZOO

BATCH, STEPS = 4, 2
Wish = Callable[[Any], Sequence[str] | None]  # the labels that a node is to have, per axis; None: whatever fits
Options = tuple[tuple[str, Any], ...]
Maker = Callable[..., tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]  # of a batch


def by_hand(graph: Graph, plan: Plan, mesh: tuple[int, ...], wish: Wish) -> Plan:
    """``plan`` (of one device) on a mesh, with the labels of ``wish``, and for all other ops those that need the fewest
    reshards."""
    (stage,) = plan.stages
    (chunk,) = stage.chunks
    small = graph.with_batch(plan.microbatch_size)
    pruner = Pruner(small, sequence=True)
    pairs: dict[tuple[str, int], Pair] = {}
    read: dict[str, list[Pair]] = {}
    ops = {}
    for node in small.ops():
        if op_name(node) == "getitem" or node.name not in chunk.ops:
            continue
        wanted = wish(node)
        offered = [c for c in mesh_choices(node, mesh) if wanted is None or c.labels == tuple(wanted)]
        if wanted is None:
            offered = pruner.choices(node, plan.microbatch_size, mesh)
        assert offered, f"{node.name} is not offered {wanted}, but {[c.labels for c in mesh_choices(node, mesh)]}"

        def moved(choice: Any, node: Any = node) -> tuple[int, float]:
            away = 0
            for operand, pair in zip(tensor_operands(node), choice.inputs):
                producer, k = output_of(operand)
                if (producer.name, k) in pairs:
                    away += sum(a != b for a, b in zip(pairs[producer.name, k].value, pair.value))
            return away, choice.work_share

        best = min(offered, key=moved)
        ops[node.name] = best.labels
        pairs.update({(node.name, k): pair for k, pair in enumerate(best.outputs)})
        for operand, pair in zip(tensor_operands(node), best.inputs):
            if operand.op == "placeholder" and operand.meta["source"].kind == "parameter":
                read.setdefault(operand.meta["source"].name, []).append(pair)
    parameters = {}
    for name in chunk.parameters:
        pair = held(read[name])
        reduced = without_partials(pair.cotangent)
        parameters[name] = ParameterSharding(pair, pair.value, reduced, pair.value)
    everywhere = Pair((R,) * len(mesh), (R,) * len(mesh))
    new = dataclasses.replace(chunk, ops=ops, parameters=parameters, sources=dict.fromkeys(chunk.sources, everywhere))
    stage = dataclasses.replace(stage, devices=tuple(range(prod(mesh))), mesh_shape=mesh, chunks=(new,), wire=())
    cluster = json.loads(fast_links(prod(mesh)).to_json())
    return dataclasses.replace(plan, stages=(stage,), cluster=cluster)


def held(wanted: list[Pair]) -> Pair:
    """How a parameter lies that is read so: alike, if that is one way to lie, else whole."""
    first = wanted[0]
    if len(set(wanted)) == 1 and all(v == c or (v, c) == (R, P) for v, c in zip(first.value, first.cotangent)):
        return first
    whole = tuple(R if all(pair.cotangent[axis] == R for pair in wanted) else P for axis in range(len(first.value)))
    return Pair((R,) * len(whole), whole)


def case(name: str | Maker, options: Options):
    """A model in float64 and its inputs; name: of the zoo, or what makes them."""
    make = ZOO[name] if isinstance(name, str) else name
    model, args, kwargs = make(BATCH, **dict(options))
    return model.train().double(), tuple(a.double() if a.is_floating_point() else a for a in args), kwargs


def train(name: str | Maker, text: str, options: Options):
    """One rank: losses and parameters after ``STEPS`` steps of SGD in float64, collectives run and their bytes."""
    model, args, kwargs = case(name, options)
    plan = Plan.from_json(text)
    parallel = mw.parallelize(
        model, fast_links(len(plan.stages[0].devices)), example_inputs=args, example_kwargs=kwargs, plan=plan,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )  # fmt: skip
    losses = [float(parallel.train_step(*args, **kwargs)) for _ in range(STEPS)]
    counts = {f"{phase} {kind}": n for (phase, kind), n in parallel.session.counts.items() if phase != "step"}
    sizes = {f"{phase} {kind}": n for (phase, kind), n in parallel.session.comm.bytes.items() if phase != "step"}
    return losses, parallel.full_state_dict(), Counter(counts), Counter(sizes)


@functools.cache
def one_device(name: str | Maker, options: Options) -> tuple[Graph, Plan, list[float], dict[str, torch.Tensor]]:
    """The graph, a plan to write over, and the losses and parameters of a plain loop."""
    model, args, kwargs = case(name, options)
    graph = capture(model, args, kwargs)
    plan = mw.plan(
        model,
        fast_links(1),
        example_inputs=args,
        example_kwargs=kwargs,
        microbatches=1,
        optimizer="SGD",
        executable=True,
    )
    return graph, plan, *trained_eagerly(model, args, kwargs, lambda ps: torch.optim.SGD(ps, lr=0.1), STEPS)


def equals_one_device(
    ranks: Any, name: str | Maker, options: Options, mesh: tuple[int, ...], wish: Wish, rtol: float = 1e-9
) -> tuple[Plan, list[Any]]:
    """Train on ranks with the labels of ``wish``: losses, parameters and numbers of collectives must be as expected.
    The plan, and what each rank of ``train`` returned."""
    graph, plan, expected, parameters = one_device(name, options)
    plan = by_hand(graph, plan, mesh, wish)
    assert validate(plan, graph) == []
    planned = {k: v * STEPS for k, v in lower(graph.with_batch(BATCH), plan, 0).collectives.items()}
    results = ranks.run(prod(mesh), train, name, plan.to_json(), options, timeout_s=240.0)
    for losses, _, counts, _ in results:
        assert losses == pytest.approx(expected, rel=rtol)
        assert counts == Counter(planned), (counts, planned)
    for key, value in parameters.items():
        found = results[0][1][key]
        torch.testing.assert_close(found, value, rtol=rtol, atol=rtol / 10, msg=lambda t, k=key: f"{k}: {t}")
    return plan, results


def sent(*labels: str):
    """The experts get these labels; the rest as it comes."""
    return lambda node: labels if op_name(node) == "meshwright.experts" else None


def weight_of(node: Any) -> str:
    """The name of a linear's weight."""
    return tensor_operands(node)[1].name


def along(label: str) -> dict[str, str]:
    """Labels of a stream cut along the sequence (dim 1), with this attention."""
    return {
        "aten.embedding.default": "b1", "aten.linear.default": "b1", "meshwright.cross_entropy": "b1",
        "aten.scaled_dot_product_attention.default": label,
    }  # fmt: skip


def sequence(label: str) -> Wish:
    """Everything along the sequence; attention by ``label``."""

    def wish(node: Any) -> Sequence[str] | None:
        if op_name(node) == "aten.embedding.default" and len(tensor_operands(node)[1].meta["type"].shape) == 1:
            return ("b0",)  # positions
        found = along(label).get(op_name(node))
        return None if found is None else (found,)

    return wish


def megatron(node: Any) -> Sequence[str] | None:
    """Tensor parallelism whose norms, dropouts and additions are cut along the sequence (arXiv:2205.05198)."""
    name = op_name(node)
    if name == "aten.linear.default":
        return ("i" if any(key in weight_of(node) for key in ("out", "o_proj", "down")) else "o",)
    if name in ("aten.embedding.default", "meshwright.cross_entropy"):
        one = name == "aten.embedding.default" and len(tensor_operands(node)[1].meta["type"].shape) == 1
        return ("b0",) if one else ("vocab",)
    if name in ("aten.layer_norm.default", "aten.rms_norm.default"):
        return ("b1",)
    if name == "meshwright.dropout" or (name == "aten.add.Tensor" and node.meta["type"].shape[1:] == (16, 64)):
        return ("d1",)
    return ("heads",) if name == "aten.scaled_dot_product_attention.default" else None
