"""Splits along the sequence: what the rules offer and the search is shown, and that plans made of them train as one
device does: sequence parallelism around tensor parallelism, all-to-all, ring, and ring with all-to-all.

The plans are written here, label by label; that a search finds them is the business of other tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from by_hand import BATCH, Wish, by_hand, equals_one_device, one_device
from meshwright.architectures import Llama
from meshwright.compiler.capture import capture
from meshwright.compiler.graph import Graph, op_name, tensor_operands
from meshwright.compiler.prune import MOST, Pruner
from meshwright.compiler.ring_attention import ring_attention
from meshwright.compiler.rules import mesh_choices, pairs_choice, rule_for
from meshwright.compiler.rules.check import LockstepComm, LockstepGroup, check_choice, example_node
from meshwright.compiler.spec import R, S
from torch.multiprocessing.reductions import StorageWeakRef
from zoo import HIDDEN, VOCAB, ZOO, tokens_and_labels

OPTIONS = {"llama": (("kv_heads", 4),)}
sdpa = torch.ops.aten.scaled_dot_product_attention.default


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


@pytest.mark.parametrize("which", list(PLANS))
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_sequence_that_is_cut_trains_as_one_device_does(ranks, name, which):
    wish, mesh = PLANS[which]
    rtol = 1e-9 if name == "gpt" else 1e-5  # norms and rotary tables of a Llama are in fp32 whatever the model is in
    equals_one_device(ranks, name, OPTIONS.get(name, ()), mesh, wish, rtol)


def test_dropout_is_the_same_however_the_sequence_is_cut(ranks):
    options = (("dropout", 0.1),)
    graph, plan, _, _ = one_device("gpt", options)
    losses = []
    for mesh, wish in (((1,), lambda node: None), ((2,), sequence("ring")), ((2,), megatron)):
        text = by_hand(graph, plan, mesh, wish).to_json()
        losses.append(ranks.run(prod(mesh), "by_hand:train", "gpt", text, options, timeout_s=240.0)[0][0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[2] == pytest.approx(losses[0], rel=1e-9)


def grouped(batch: int):
    """A Llama of eight query heads, two of keys and values."""
    torch.manual_seed(0)
    return Llama(VOCAB, 1, HIDDEN, 96, 8, 2), tokens_and_labels(batch), {}


@pytest.mark.parametrize("wish", [sequence("groups"), None], ids=["ulysses", "tensors"])
def test_more_ranks_than_key_value_heads(ranks, wish):
    def tensors(node: Any) -> Sequence[str] | None:
        name = op_name(node)
        if name == "aten.linear.default":
            return ("i" if any(key in weight_of(node) for key in ("out", "down")) else "o",)
        return ("groups",) if "attention" in name else None

    equals_one_device(ranks, "test_sequence:grouped", (), (4,), wish or tensors, 1e-5)  # rotary tables are in fp32


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


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (8, 1), (12, 3)])
def test_query_heads_are_cut_beyond_those_of_keys(heads, groups):
    node = example_node(
        sdpa, torch.randn(2, heads, 8, 4), *(torch.randn(2, groups, 8, 4) for _ in range(2)), is_causal=True,
        enable_gqa=True,
    )  # fmt: skip
    assert ("heads",) not in {choice.labels for choice in mesh_choices(node, (4,))}
    for mesh, labels in (((4,), ("groups",)), ((2, 2), ("groups", "groups")), ((2, 2), ("ring", "groups"))):
        assert check_choice(node, labels, mesh) == [], labels


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
