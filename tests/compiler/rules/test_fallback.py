"""Ops without a rule: trials find the dims along which such an op treats its blocks one by one, and no others."""

import pytest
import torch
from meshwright.compiler.ir.ops import ctc  # noqa: F401 - registers its op
from meshwright.compiler.rules import rule_for
from meshwright.compiler.verification.check_rules import check_node
from meshwright.compiler.verification.split_execution import example_node
from torch import Tensor

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(0)


def f(*shape):
    return torch.randn(shape, generator=GENERATOR)


SPLIT = {
    "windows of an image": ((aten.im2col.default, f(4, 4, 8, 8), [3, 3], [1, 1], [1, 1], [1, 1]), ["in0d0", "in0d1"]),
    "an image of windows": ((aten.col2im.default, f(4, 36, 64), [8, 8], [3, 3], [1, 1], [1, 1], [1, 1]),
                            ["in0d0", "in0d1"]),
    "sampling an image": (
        (aten.grid_sampler.default, f(4, 3, 8, 8), f(4, 8, 8, 2), 0, 0, False),
        ["in0d0", "in1d1", "in1d2"],
    ),
    "a cell of an LSTM": (
        (aten.lstm_cell.default, f(4, 8), [f(4, 8), f(4, 8)], f(32, 8), f(32, 8), f(32), f(32)),
        ["in0d0"],
    ),
    "temporal classification": (
        (torch.ops.meshwright.ctc_loss.default, f(8, 4, 5).log_softmax(-1), torch.randint(1, 5, (4, 3)),
         torch.full((4,), 8), torch.full((4,), 3), 0, False),
        ["in0d1"],
    ),
    "inverses": ((aten.linalg_inv.default, f(4, 6, 6)), ["in0d0"]),
    "an integer of a batch": ((aten.bucketize.Tensor, f(4, 8), torch.arange(3.0)), ["in0d0", "in0d1"]),
    "a batch of two": ((aten.linalg_inv.default, f(2, 6, 6)), ["in0d0"]),
    "lists of tensors": ((aten.meshgrid.indexing, [f(4), f(8)]), ["in0d0", "in1d0"]),
    "shuffled pixels": ((aten.pixel_shuffle.default, f(4, 16, 4, 4), 2), ["in0d0", "in0d2", "in0d3"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_batches_are_found_and_execution_confirms_them(name):
    call, expected = SPLIT[name]
    node = example_node(*call, **({"indexing": "ij"} if call[0] is aten.meshgrid.indexing else {}))
    rule = rule_for(node)
    assert rule.is_fallback
    assert [choice.label for choice in rule.axis_choices(node)] == ["whole", *expected]
    assert not rule.is_unknown(node)
    assert check_node(node, ((2,), (2, 2))) == {}


WHOLE = {
    "a sum over all": (aten.trace.default, f(8, 8)),
    "counts": (aten.histc.default, f(8), 4),
    "random numbers": (aten.bernoulli.default, torch.rand(8, 4)),
    "places decided by values": (aten.masked_scatter.default, f(8, 4), f(8, 4) > 0, f(8, 4)),
    "sizes among the arguments": (aten.affine_grid_generator.default, f(4, 2, 3), [4, 3, 8, 8], False),
    "a mean over the batch": (aten.triplet_margin_loss.default, f(8, 4), f(8, 4), f(8, 4)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_joins_its_blocks_stays_whole(name):
    node = example_node(*WHOLE[name])
    assert [choice.label for choice in rule_for(node).axis_choices(node)] == ["whole"]
    assert rule_for(node).is_unknown(node)


def test_large_values_are_tried_too():
    """Rows of a norm above the limit are scaled: normal values are far below it, and would say that columns are
    free."""
    node = example_node(aten.renorm.default, f(8, 12), 2, 0, 100.0)
    assert [choice.label for choice in rule_for(node).axis_choices(node)] == ["whole", "in0d0"]


@torch.library.custom_op("test_fallback::centred", mutates_args=())
def centred(x: Tensor, over: int) -> Tensor:
    return x - x.mean(over, keepdim=True)


@centred.register_fake
def _(x, over):
    return torch.empty_like(x)


def _keep_dim(ctx, inputs, output):
    ctx.over = inputs[1]


centred.register_autograd(lambda ctx, grad: (grad - grad.mean(ctx.over, keepdim=True), None), setup_context=_keep_dim)


def test_a_custom_op_is_tried_like_any():
    node = example_node(torch.ops.test_fallback.centred.default, f(4, 6, 8), 1)
    assert [choice.label for choice in rule_for(node).axis_choices(node)] == ["whole", "in0d0", "in0d2"]
    assert check_node(node, ((2,), (2, 2))) == {}
