"""Splits along the sequence: plans made of them train as one device does: sequence parallelism around tensor
parallelism, all-to-all, ring, and ring with all-to-all.

The plans are written here, label by label; that a search finds them is the business of other tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from meshwright.compiler.ir.graph import op_name
from meshwright.models.architectures import Llama

from tests.support.manual_plans import by_hand, equals_one_device, megatron, one_device, sequence, train, weight_of
from tests.support.zoo import HIDDEN, VOCAB, tokens_and_labels

PHASES = ("forward", "backward")
OPTIONS = {"llama": (("kv_heads", 4),)}
sdpa = torch.ops.aten.scaled_dot_product_attention.default


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
        losses.append(ranks.run(prod(mesh), train, "gpt", text, options, timeout_s=240.0)[0][0])
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

    equals_one_device(ranks, grouped, (), (4,), wish or tensors, 1e-5)  # rotary tables are in fp32
