"""Rules of attention, convolution, norms, embedding, losses, experts and dropout."""

import pytest
import torch
from meshwright.compiler.ir.comm import Context, use_context
from meshwright.compiler.ir.graph import tensor_operands, types_of
from meshwright.compiler.ir.ops import local_ops
from meshwright.compiler.rules import mesh_choices, rule_for
from meshwright.compiler.verification.check_rules import check_node
from meshwright.compiler.verification.lockstep import LockstepComm, LockstepGroup
from meshwright.compiler.verification.split_execution import example_node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten
CPU = torch.device("cpu")


def r(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def c(*shape):
    return torch.complex(r(*shape), r(*shape, 1)[..., 0])


def ints(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


@pytest.fixture(autouse=True)
def _context():
    with use_context(Context(LockstepComm(LockstepGroup((1,)), 0), seed=5)):
        yield


# ---- every rule by execution, with the labels that it must offer

SDPA = aten.scaled_dot_product_attention.default
BATCH_NORM = aten.batch_norm.default
CASES = {
    "attention": (SDPA, (r(4, 4, 8, 4), r(4, 4, 6, 4), r(4, 4, 6, 4)), {}, "batch heads query ring"),
    "attention causal": (SDPA, (r(4, 4, 8, 4), r(4, 4, 8, 4), r(4, 4, 8, 4), None, 0.0, True), {}, "batch heads ring"),
    "attention one mask": (
        SDPA,
        (r(4, 4, 8, 4), r(4, 4, 6, 4), r(4, 4, 6, 4), r(1, 4, 8, 6)),
        {},
        "batch heads query ring",
    ),
    "attention bool mask": (
        SDPA,
        (r(4, 4, 8, 4), r(4, 4, 6, 4), r(4, 4, 6, 4)),
        {"attn_mask": ints(4, 4, 1, 1, 6) > 0},
        "batch heads query ring",
    ),
    "attention grouped": (
        SDPA,
        (r(4, 8, 4, 4), r(4, 4, 4, 4), r(4, 4, 4, 4)),
        {"is_causal": True, "enable_gqa": True, "scale": 0.3},
        "batch heads groups ring",
    ),
    "attention without heads": (SDPA, (r(4, 8, 4), r(4, 6, 4), r(4, 6, 4), r(8, 6)), {}, "batch query ring"),
    "conv1d": (aten.conv1d.default, (r(4, 4, 8), r(4, 4, 3), r(4)), {}, "batch out in"),
    "conv2d strided": (
        aten.conv2d.default,
        (r(4, 4, 6, 6), r(8, 4, 3, 3), None, [2, 2], [1, 1]),
        {},
        "batch out in height width",
    ),
    "conv2d grouped": (
        aten.conv2d.default,
        (r(4, 8, 6, 6), r(8, 2, 3, 3), r(8), [1, 1], [1, 1], [1, 1], 4),
        {},
        "batch group height width",
    ),
    "conv2d unbatched": (aten.conv2d.default, (r(4, 6, 6), r(8, 4, 3, 3), r(8)), {}, "out in"),
    "conv2d same": (
        aten.conv2d.padding,
        (r(4, 4, 6, 6), r(8, 4, 3, 3), r(8), [1, 1], "same"),
        {},
        "batch out in height width",
    ),
    "convolution transposed": (
        aten.convolution.default,
        (r(4, 4, 6, 6), r(4, 8, 3, 3), r(8), [1, 1], [1, 1], [1, 1], True, [0, 0], 1),
        {},
        "batch out in height width",
    ),
    "conv_transpose1d grouped": (
        aten.conv_transpose1d.default,
        (r(4, 8, 5), r(8, 2, 3), r(8), [2], [0], [0], 4),
        {},
        "batch group",
    ),
    "conv_transpose2d": (aten.conv_transpose2d.input, (r(4, 4, 5, 5), r(4, 8, 3, 3), r(8)), {}, "batch out in"),
    "max_pool2d": (aten.max_pool2d.default, (r(4, 4, 8, 8), [2, 2]), {}, "batch channel height width grad"),
    "max_pool2d indices": (
        aten.max_pool2d_with_indices.default,
        (r(4, 4, 8, 8), [3, 3], [2, 2], [1, 1]),
        {},
        "batch channel grad",
    ),
    "avg_pool2d": (aten.avg_pool2d.default, (r(4, 4, 8, 8), [2, 2]), {}, "batch channel height width partial grad"),
    "adaptive_avg_pool2d": (
        aten.adaptive_avg_pool2d.default,
        (r(4, 4, 8, 8), [1, 1]),
        {},
        "batch channel partial grad",
    ),
    "upsample": (aten.upsample_nearest2d.vec, (r(4, 4, 4, 4), None, [2.0, 2.0]), {}, "batch channel partial grad"),
    "layer_norm": (aten.layer_norm.default, (r(4, 8, 6), [6], r(6), r(6)), {}, "b0 b1"),
    "layer_norm plain": (aten.layer_norm.default, (r(4, 8, 6), [8, 6]), {}, "b0"),
    "native_layer_norm": (aten.native_layer_norm.default, (r(4, 8, 6), [6], r(6), r(6), 1e-5), {}, "b0 b1"),
    "rms_norm": (aten.rms_norm.default, (r(4, 8, 6), [6], r(6)), {}, "b0 b1"),
    "group_norm": (aten.group_norm.default, (r(4, 8, 6), 4, r(8), r(8)), {}, "batch channel"),
    "native_group_norm": (
        aten.native_group_norm.default,
        (r(4, 8, 6), r(8), r(8), 4, 8, 6, 4, 1e-5),
        {},
        "batch channel",
    ),
    "batch_norm evaluation": (
        BATCH_NORM,
        (r(4, 8, 6), r(8), r(8), r(8), r(8).abs(), False, 0.1, 1e-5, False),
        {},
        "channel batch d2",
    ),
    "batch_norm training": (
        BATCH_NORM,
        (r(4, 8, 6), r(8), r(8), None, None, True, 0.1, 1e-5, False),
        {},
        "channel",
    ),
    "batch_norm no_training": (
        aten._native_batch_norm_legit_no_training.default,
        (r(4, 8, 6), r(8), r(8), r(8), r(8).abs(), 0.1, 1e-5),
        {},
        "channel batch d2",
    ),
    "instance_norm": (
        aten.instance_norm.default,
        (r(4, 8, 6), r(8), r(8), None, None, True, 0.1, 1e-5, False),
        {},
        "channel batch",
    ),
    "synchronised batch_norm": (
        local_ops.batch_norm,
        (r(4, 8, 3, 3), r(8), r(8), 1e-5),
        {},
        "batch channel height width",
    ),
    "synchronised batch_norm plain": (local_ops.batch_norm, (r(8, 4), None, None, 1e-5), {}, "batch channel"),
    "embedding": (aten.embedding.default, (r(8, 4), ints(8, 4, 4)), {}, "b0 b1 vocab hidden grad"),
    "embedding padded": (aten.embedding.default, (r(8, 4), ints(8, 4, 4), 5), {}, "b0 b1 vocab hidden grad"),
    "embedding by frequency": (aten.embedding.default, (r(8, 4), ints(8, 4, 4), -1, True), {}, "hidden grad"),
    "cross_entropy": (local_ops.cross_entropy, (r(8, 8), ints(8, 8), -100, 0.0), {}, "b0 vocab"),
    "cross_entropy smooth": (local_ops.cross_entropy, (r(4, 4, 8), ints(8, 4, 4), -1, 0.2), {}, "b0 b1 vocab"),
    "class loss": (aten.cross_entropy_loss.default, (r(4, 8), ints(8, 4), r(8).abs(), 0, -100, 0.1), {}, "batch"),
    "class loss sum": (
        aten.cross_entropy_loss.default,
        (r(4, 8, 4), r(4, 8, 4).softmax(1), None, 2),
        {},
        "batch d2",
    ),
    "class loss mean": (aten.cross_entropy_loss.default, (r(4, 8), ints(8, 4)), {}, ""),
    "nll_loss": (aten.nll_loss_nd.default, (r(4, 8, 4), ints(8, 4, 4), None, 0), {}, "batch d2"),
    "experts stacked": (
        local_ops.experts,
        (r(8, 4), ints(4, 8, 2), r(8, 2), r(4, 12, 4), r(4, 4, 6), "silu"),
        {},
        "token expert dispatch",
    ),
    "experts separable": (
        local_ops.experts,
        (r(8, 4), ints(4, 8, 2), r(8, 2), r(4, 2, 8, 4), r(4, 4, 8), "gelu"),
        {},
        "token expert ffn dispatch",
    ),
    "experts ungated": (
        local_ops.experts,
        (r(8, 4), ints(4, 8, 2), r(8, 2), r(4, 8, 4), r(4, 4, 8), "relu", False),
        {},
        "token expert ffn dispatch",
    ),
    "experts with biases": (
        local_ops.experts,
        (r(8, 4), ints(4, 8, 2), r(8, 2), r(4, 2, 8, 4), r(4, 4, 8), "silu"),
        {"gate_up_bias": r(4, 2, 8), "down_bias": r(4, 4)},
        "token expert ffn dispatch",
    ),
    "experts interleaved": (
        local_ops.experts,
        (r(8, 4), ints(4, 8, 2), r(8, 2), r(4, 8, 2, 4).transpose(1, 2), r(4, 4, 8), "silu"),
        {"gate_up_bias": r(4, 8, 2).transpose(1, 2), "down_bias": r(4, 4)},
        "token expert ffn dispatch",
    ),
    "polar": (aten.polar.default, (r(4, 8).abs(), r(4, 8)), {}, "d0 d1 grad"),
    "complex product": (aten.mul.Tensor, (c(4, 8, 4), c(8, 1)), {}, "d0 d1 d2 partial partial1 grad"),
    "view_as_complex": (aten.view_as_complex.default, (r(4, 8, 2),), {}, "d0 d1 partial grad"),
    "view_as_real": (aten.view_as_real.default, (c(4, 8),), {}, "d0 d1 partial grad"),
    "rfft": (aten.fft_rfft.default, (r(4, 8, 8), None, 1), {}, "d0 d1 partial grad"),
    "irfft": (aten.fft_irfft.default, (c(4, 8, 5), 8), {}, "d0 d1 partial grad"),
    "fftn": (aten.fft_fftn.default, (c(4, 8, 8), None, [-1, -2]), {}, "d0 partial grad"),
    "cdist": (aten.cdist.default, (r(4, 8, 3), r(4, 12, 3)), {}, "b0 p r"),
    "grouped product": (
        aten._grouped_mm.default,
        (r(32, 16), r(2, 16, 16), torch.tensor([16, 32], dtype=torch.int32)),
        {},
        "o i",
    ),
    "triangular solve": (aten.linalg_solve_triangular.default, (r(4, 4, 4), r(4, 4, 8)), {"upper": False}, "b0 k"),
    "triangular solve from the right": (
        aten.linalg_solve_triangular.default,
        (r(4, 4, 4), r(4, 8, 4)),
        {"upper": True, "left": False},
        "b0 k",
    ),
    "unfold": (aten.unfold.default, (r(4, 8, 12), 2, 4, 2), {}, "d0 d1 partial grad"),
    "index_add": (aten.index_add.default, (r(8, 4, 4), 0, ints(8, 12), r(12, 4, 4)), {}, "d0 d1 grad values"),
    "scatter_add": (aten.scatter_add.default, (r(4, 8), 1, ints(8, 4, 12), r(4, 12)), {}, "d0 grad values"),
    "lstm": (
        aten.lstm.input,
        (r(4, 6, 3), [r(1, 4, 5), r(1, 4, 5)], [r(20, 3), r(20, 5), r(20), r(20)], True, 1, 0.0, True, False, True),
        {},
        "batch",
    ),
    "gru": (
        aten.gru.input,
        (r(6, 4, 3), r(2, 4, 5), [r(15, 3), r(15, 5), r(15, 5), r(15, 5)], False, 2, 0.0, True, False, False),
        {},
        "batch",
    ),
    "weight norm": (aten._weight_norm.default, (r(8, 4, 3), r(8, 1, 1)), {}, "d0 grad"),
    "embedding bag": (
        aten.embedding_bag.padding_idx,
        (r(8, 4), ints(8, 12), torch.arange(4) * 3, False, 0, False, None, False, None),
        {},
        "vocab hidden",
    ),
    "even bags": (local_ops.embedding_bag, (r(8, 4), ints(8, 8, 3), 0, 2), {}, "bag vocab hidden"),
    "even bags of means": (local_ops.embedding_bag, (r(8, 4), ints(8, 8, 3), 1), {}, "bag vocab hidden"),
    "even bags of maxima": (local_ops.embedding_bag, (r(8, 4), ints(8, 8, 3), 2), {}, "bag hidden"),
    "embedding bag of means": (
        aten.embedding_bag.default,
        (r(8, 4), ints(8, 12), torch.arange(5) * 3, False, 1, False, None, True),
        {},
        "vocab hidden",
    ),
    "embedding bag with factors": (
        aten.embedding_bag.default,
        (r(8, 4), ints(8, 12), torch.arange(4) * 3, False, 0, False, r(12)),
        {},
        "vocab hidden",
    ),
    "embedding bag with padding": (
        aten.embedding_bag.padding_idx,
        (r(8, 4), ints(8, 12), torch.arange(4) * 3, False, 0, False, None, False, 1),
        {},
        "hidden",
    ),
    "dropout": (local_ops.dropout, (r(4, 8, 4), 0.3, 7), {}, "d0 d1 d2 grad"),
    "dropout across groups": (local_ops.dropout, (r(4, 12), 0.5, 7), {}, "d0 d1 grad"),
}


@pytest.mark.parametrize("case", CASES)
def test_rule_by_execution(case):
    target, args, kwargs, labels = CASES[case]
    node = example_node(target, *args, **kwargs)
    assert [choice.label for choice in rule_for(node).axis_choices(node)] == ["whole", *labels.split()]
    assert check_node(node, ((2,), (4,), (2, 2))) == {}


def test_attention_that_draws_dropout_is_whole_only():
    node = example_node(SDPA, r(4, 4, 8, 4), r(4, 4, 8, 4), r(4, 4, 8, 4), None, 0.1)
    assert [choice.labels for choice in mesh_choices(node, (2, 2))] == [("whole", "whole")]


def test_uneven_cuts_are_not_offered():
    grouped = example_node(SDPA, r(4, 6, 8, 4), r(4, 3, 8, 4), r(4, 3, 8, 4), is_causal=True, enable_gqa=True)
    assert {choice.labels for choice in mesh_choices(grouped, (2,))} == {("whole",), ("batch",), ("groups",), ("ring",)}
    convolution = example_node(aten.conv2d.default, r(4, 6, 5, 5), r(6, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], 3)
    assert {choice.labels for choice in mesh_choices(convolution, (2,))} == {("whole",), ("batch",)}


# ---- what the planner is told


@pytest.mark.parametrize("case", ["attention", "conv2d strided", "conv2d grouped", "convolution transposed"])
def test_flops_are_those_that_pytorch_counts(case):
    target, args, kwargs, _ = CASES[case]
    node = example_node(target, *args, **kwargs)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        target(*args, **kwargs)
    assert rule_for(node).flops(node) == counter.get_total_flops() > 0


def test_flops_of_experts():
    node = example_node(*CASES["experts stacked"][:1], *CASES["experts stacked"][1])
    assert rule_for(node).flops(node) == 6 * 8 * 2 * 4 * 6
    node = example_node(*CASES["experts ungated"][:1], *CASES["experts ungated"][1])
    assert rule_for(node).flops(node) == 4 * 8 * 2 * 4 * 8


KEPT = {
    "attention": (SDPA, (r(2, 4, 64, 16), r(2, 4, 64, 16), r(2, 4, 64, 16))),
    "attention bool mask": (SDPA, (r(2, 4, 64, 16), r(2, 4, 64, 16), r(2, 4, 64, 16), ints(4, 2, 1, 64, 64) > 0)),
    "convolution": (aten.conv2d.default, (r(4, 8, 16, 16), r(8, 8, 3, 3), r(8))),
    "max_pool": (aten.max_pool2d.default, (r(4, 8, 16, 16), [2, 2])),
    "avg_pool": (aten.avg_pool2d.default, (r(4, 8, 16, 16), [2, 2])),
    "upsample": (aten.upsample_nearest2d.vec, (r(4, 8, 16, 16), None, [2.0, 2.0])),
    "layer_norm": (aten.layer_norm.default, (r(8, 16, 64), [64], r(64), r(64))),
    "group_norm": (aten.group_norm.default, (r(8, 16, 64), 4, r(16), r(16))),
    "batch_norm": (local_ops.batch_norm, (r(32, 16, 8, 8), r(16), r(16), 1e-5)),
    "embedding": (aten.embedding.default, (r(64, 8), ints(64, 32, 32))),
    "cross_entropy": (local_ops.cross_entropy, (r(64, 256), ints(256, 64), -100, 0.0)),
    "class loss": (aten.cross_entropy_loss.default, (r(64, 256), ints(256, 64), None, 0)),
    "experts": (local_ops.experts, (r(256, 32), ints(4, 256, 2), r(256, 2), r(4, 64, 32), r(4, 32, 32), "silu")),
    "dropout": (local_ops.dropout, (r(64, 64), 0.3, 7)),
}


@pytest.mark.parametrize("case", KEPT)
def test_saves_are_what_autograd_keeps(case):
    target, args = KEPT[case]
    node = example_node(target, *args)
    leaves = [x.clone().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x for x in args]
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = target(*leaves)
    rule, sides = rule_for(node), {"input": [x.meta["type"] for x in tensor_operands(node)], "output": types_of(node)}
    told = sum(sides[side][k].nbytes for side, k in rule.saves(node)) + rule.temporary_bytes(node)
    told += sum(factor * sides["input"][k].nbytes for k, factor in rule.kept_copies(node))
    assert out is not None
    assert told == pytest.approx(sum(kept.values()), rel=0.05)


@pytest.mark.parametrize("case", ["cross_entropy", "cross_entropy smooth", "synchronised batch_norm"])
def test_internal_collectives_move_what_is_claimed(case):
    target, args, kwargs, _ = CASES[case]
    node = example_node(target, *args, **kwargs)
    rule = rule_for(node)
    choice = next(choice for choice in rule.axis_choices(node) if choice.internal)
    function, call_args, call_kwargs = rule.localize(node, (choice.label,), (2,))
    dims = [pair[0].dim if pair[0].is_shard else None for pair in choice.inputs]
    tensors = dict(zip(tensor_operands(node), (x for x in args if isinstance(x, torch.Tensor))))

    def device(comm):
        local = {
            operand: x if dim is None else x.chunk(2, dim)[comm.rank].clone()
            for (operand, x), dim in zip(tensors.items(), dims)
        }
        local = {k: x.requires_grad_(x.is_floating_point()) for k, x in local.items()}
        outputs = function(*[local.get(arg, arg) for arg in call_args], **call_kwargs)
        comm.phase = "backward"
        outputs[0].sum().backward()
        sides = {"input": list(local.values()), "output": outputs}
        return list(comm.log), [
            (i.phase, i.kind, 0, sides[i.like[0]][i.like[1]].numel() * i.scale) for i in choice.internal
        ]

    for ran, claimed in LockstepGroup((2,)).run(device):
        assert ran == claimed
