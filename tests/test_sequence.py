"""Splits along the sequence: what the rules offer and the search is shown, and that plans made of them train as one
device does: sequence parallelism around tensor parallelism, all-to-all, ring, and ring with all-to-all.

The plans are written here, label by label; that a search finds them is the business of other tests.
"""

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
from meshwright.compiler.capture import capture
from meshwright.compiler.graph import Graph, op_name, output_of, tensor_operands
from meshwright.compiler.lower import lower
from meshwright.compiler.plan import Plan, Residency
from meshwright.compiler.prune import MOST, Pruner
from meshwright.compiler.ring_attention import ring_attention
from meshwright.compiler.rules import mesh_choices, pairs_choice, rule_for
from meshwright.compiler.rules.check import LockstepComm, LockstepGroup, check_choice, example_node
from meshwright.compiler.spec import P, Pair, R, S, without_partials
from meshwright.compiler.validate import check_plan
from test_parity import fast_links
from torch.multiprocessing.reductions import StorageWeakRef
from zoo import ZOO

BATCH, STEPS = 4, 2
OPTIONS: dict[str, dict[str, Any]] = {"llama": {"kv_heads": 4}}
sdpa = torch.ops.aten.scaled_dot_product_attention.default
Wish = Callable[[Any], Sequence[str] | None]  # the labels that a node is to have, per axis; None: whatever fits


# ---- plans by hand


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
        parameters[name] = Residency(pair, pair.value, reduced, pair.value)
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


def both(node: Any) -> Sequence[str] | None:
    """On two axes the sequence is cut by both; attention is a ring over the first, and cut by heads over the second."""
    found = sequence("ring")(node)
    return None if found is None else ("ring", "heads") if found == ("ring",) else found * 2


PLANS = {
    "megatron": (megatron, (2,)),
    "ulysses": (sequence("heads"), (2,)),
    "ring": (sequence("ring"), (2,)),
    "ring and ulysses": (both, (2, 2)),
}


def train(name: str, text: str, options: dict[str, Any]):
    """One rank: losses, parameters after ``STEPS`` steps of SGD in float64, collectives run and planned."""
    model, args, kwargs = ZOO[name](BATCH, **options)
    plan, model = Plan.from_json(text), model.train().double()
    parallel = mw.parallelize(
        model, fast_links(len(plan.stages[0].devices)), example_inputs=args, example_kwargs=kwargs, plan=plan,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )  # fmt: skip
    losses = [float(parallel.train_step(*args, **kwargs)) for _ in range(STEPS)]
    counts = {f"{phase} {kind}": n for (phase, kind), n in parallel.session.counts.items() if phase != "step"}
    return losses, parallel.full_state_dict(), Counter(counts)


@functools.cache
def one_device(name: str, dropout: float) -> tuple[Graph, Plan, list[float], dict[str, torch.Tensor]]:
    """The graph, a plan to write over, and the losses and parameters of a plain loop."""
    options = OPTIONS.get(name, {})
    model, args, kwargs = ZOO[name](BATCH, **options, dropout=dropout)
    model = model.train().double()
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = model(*args, **kwargs)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return graph, plan, losses, model.state_dict()


@pytest.mark.parametrize("which", list(PLANS))
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_sequence_that_is_cut_trains_as_one_device_does(ranks, name, which):
    graph, plan, expected, parameters = one_device(name, 0.0)
    wish, mesh = PLANS[which]
    plan = by_hand(graph, plan, mesh, wish)
    assert check_plan(plan, graph) == []
    planned = {k: v * STEPS for k, v in lower(graph.with_batch(BATCH), plan, 0).collectives.items()}
    options = OPTIONS.get(name, {})
    results = ranks.run(prod(mesh), "test_sequence:train", name, plan.to_json(), options, timeout_s=240.0)
    rtol = 1e-9 if name == "gpt" else 1e-5  # norms and rotary tables of a Llama are in fp32 whatever the model is in
    for losses, _, counts in results:
        assert losses == pytest.approx(expected, rel=rtol)
        assert counts == Counter(planned)
    for key, value in parameters.items():
        found = results[0][1][key]
        torch.testing.assert_close(found, value, rtol=rtol, atol=rtol / 10, msg=lambda t, k=key: f"{k}: {t}")


def test_dropout_is_the_same_however_the_sequence_is_cut(ranks):
    graph, plan, _, _ = one_device("gpt", 0.1)
    losses = []
    for mesh, wish in (((1,), lambda node: None), ((2,), sequence("ring")), ((2,), megatron)):
        text = by_hand(graph, plan, mesh, wish).to_json()
        losses.append(
            ranks.run(prod(mesh), "test_sequence:train", "gpt", text, {"dropout": 0.1}, timeout_s=240.0)[0][0]
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[2] == pytest.approx(losses[0], rel=1e-9)


# ---- what is offered


def labels_of(pruner: Pruner, graph: Graph, op: str, mesh: tuple[int, ...]) -> set[tuple[str, ...]]:
    """The labels offered to the ops of that name."""
    nodes = [node for node in graph.ops() if op_name(node) == op]
    return {choice.labels for node in nodes for choice in pruner.choices(node, BATCH, mesh)}


def test_two_axes_offer_a_ring_between_and_heads_within():
    for causal in (False, True):
        x = torch.randn(2, 4, 8, 16)
        node = example_node(sdpa, x, x, x, None, 0.0, causal)
        offered = {choice.labels: choice for choice in mesh_choices(node, (2, 2))}
        choice = offered["ring", "heads"]
        assert [str(pair) for pair in (*choice.inputs, *choice.outputs)] == ["S2,S1|S2,S1"] * 4
        assert choice.reads == ((S(2), S(1)), (R, S(1)), (R, S(1)))
        assert choice.executable
        assert choice.work_share == 0.25
        assert check_choice(node, choice, (2, 2)) == []


def test_a_ring_moves_whole_keys_and_values_along_each_of_its_axes():
    node = example_node(sdpa, *(torch.randn(2, 4, 16, 16) for _ in range(3)))
    messages = pairs_choice(node, ("ring", "ring"), (2, 4)).internal
    assert [(axis, m.kind, m.scale) for axis, m in messages if m.phase == "forward"] == [
        (0, "all_gather", 8.0), (0, "all_gather", 8.0), (1, "all_gather", 4.0), (1, "all_gather", 4.0),
    ]  # fmt: skip
    assert Counter(m.kind for _, m in messages if m.phase == "backward") == {"all_gather": 4, "reduce_scatter": 4}


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)], {"is_causal": True, "enable_gqa": True}),
        ([(2, 4, 8, 16), (2, 4, 12, 16), (2, 4, 12, 8), (1, 4, 8, 12)], {}),
        ([(2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16), (2, 1, 1, 8)], {"scale": 0.3}),
    ],
    ids=["causal groups", "cross, with a mask", "one mask for all rows"],
)
def test_a_ring_is_right_by_execution(shapes, options):
    node = example_node(sdpa, *(torch.randn(shape) for shape in shapes), **options)
    for mesh, labels in (((4,), ("ring",)), ((2, 2), ("ring", "ring")), ((2, 2), ("batch", "ring"))):
        assert check_choice(node, labels, mesh) == []


def test_a_causal_ring_needs_as_many_queries_as_keys():
    node = example_node(sdpa, torch.randn(2, 4, 8, 4), *(torch.randn(2, 4, 16, 4) for _ in range(2)), is_causal=True)
    assert "ring" not in {choice.label for choice in rule_for(node).axis_choices(node)}


def test_a_ring_drops_what_it_gathered_until_the_backward(monkeypatch):
    gathered: list[StorageWeakRef] = []
    plain = LockstepComm.all_gather

    def all_gather(self: Any, *arguments: Any) -> torch.Tensor:
        out = plain(self, *arguments)
        gathered.append(StorageWeakRef(out.untyped_storage()))
        return out

    monkeypatch.setattr(LockstepComm, "all_gather", all_gather)

    def device(comm: Any) -> torch.Tensor:
        q, k, v = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
        out = ring_attention(q, k, v, is_causal=True, ring_axes=(0,))
        comm.all_reduce(torch.zeros(1), 0)  # all have done their forward
        alive = sum(not one.expired() for one in gathered)
        comm.all_reduce(torch.zeros(1), 0)
        out.sum().backward()
        return torch.tensor([alive])

    assert [int(alive) for alive in LockstepGroup((2,)).run(device)] == [0, 0]
    assert len(gathered) == 2 * (2 + 2)


def test_only_a_wide_search_is_offered_sequences():
    model, args, kwargs = ZOO["gpt"](BATCH)
    graph = capture(model, args, kwargs).with_batch(BATCH)
    narrow, wide = Pruner(graph), Pruner(graph, sequence=True)
    assert labels_of(narrow, graph, "aten.linear.default", (2,)) == {("whole",), ("b0",), ("o",), ("i",)}
    assert labels_of(wide, graph, "aten.linear.default", (2,)) == {("whole",), ("b0",), ("b1",), ("o",), ("i",)}
    attention = "aten.scaled_dot_product_attention.default"
    assert labels_of(wide, graph, attention, (2,)) - labels_of(narrow, graph, attention, (2,)) == {("ring",)}
    assert {("ring", "heads"), ("heads", "ring"), ("batch", "ring")} <= labels_of(wide, graph, attention, (2, 2))
    assert labels_of(wide, graph, "meshwright.cross_entropy", (2,)) == {("whole",), ("b0",), ("b1",), ("vocab",)}


@pytest.mark.parametrize("name", ["gpt", "llama", "t5", "mixtral", "convnet", "vit"])
def test_wide_contains_narrow_and_stays_small(name):
    model, args, kwargs = ZOO[name](8)
    graph = capture(model, args, kwargs).with_batch(8)
    narrow, wide = Pruner(graph), Pruner(graph, sequence=True)
    for node in graph.ops():
        if op_name(node) == "getitem":
            continue
        few, many = narrow.choices(node, 8, (2, 2)), wide.choices(node, 8, (2, 2))
        assert few[0] == many[0]
        assert set(few) <= set(many)
        assert len(many) <= MOST
