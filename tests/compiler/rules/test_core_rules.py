"""Every choice of the core rule families is executed whole against split."""

import pytest
import torch
from meshwright.compiler.rules import _RULES, MeshChoice, mesh_choices, pairs_choice, register, rule_for
from meshwright.compiler.rules.base import AxisChoice
from meshwright.compiler.rules.einsum import EinsumRule, parse_pattern
from meshwright.compiler.rules.fallback import FallbackRule
from meshwright.compiler.verification.check_rules import check_node, missing_splits, report
from meshwright.compiler.verification.split_execution import example_node

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(0)


def f(*shape):
    return torch.randn(shape, generator=GENERATOR)


def ints(*shape, high=4):
    return torch.randint(0, high, shape, generator=GENERATOR)


def bools(*shape):
    return f(*shape) > 0


EINSUM = {
    "linear": (aten.linear.default, f(4, 6, 8), f(12, 8), f(12)),
    "linear without bias": (aten.linear.default, f(4, 8), f(12, 8)),
    "addmm": (aten.addmm.default, f(12), f(4, 8), f(8, 12)),
    "addmm of a column": (aten.addmm.default, f(4, 1), f(4, 8), f(8, 12)),
    "mm": (aten.mm.default, f(4, 8), f(8, 4)),
    "mv": (aten.mv.default, f(4, 8), f(8)),
    "bmm": (aten.bmm.default, f(4, 4, 8), f(4, 8, 4)),
    "baddbmm": (aten.baddbmm.default, f(1, 4, 4), f(4, 4, 8), f(4, 8, 4)),
    "dot": (aten.dot.default, f(8), f(8)),
    "outer": (aten.outer.default, f(8), f(4)),
    "matmul 4x3": (aten.matmul.default, f(4, 2, 4, 8), f(2, 8, 4)),
    "matmul broadcast": (aten.matmul.default, f(4, 1, 4, 8), f(1, 2, 8, 4)),
    "matmul 3x2": (aten.matmul.default, f(4, 4, 8), f(8, 4)),
    "matmul 1x3": (aten.matmul.default, f(8), f(4, 8, 4)),
    "matmul 2x1": (aten.matmul.default, f(4, 8), f(8)),
    "einsum": (aten.einsum.default, "bqd,bkd->bqk", [f(4, 4, 8), f(4, 8, 8)]),
    "einsum of three": (aten.einsum.default, "bd,d,ij->bi", [f(4, 4), f(4), f(4, 4)]),
    "einsum diagonal": (aten.einsum.default, "bii->b", [f(4, 4, 4)]),
}
POINTWISE = {
    "add broadcast": (aten.add.Tensor, f(4, 6, 8), f(8)),
    "add scalar": (aten.add.Tensor, f(4, 8), 1.0),
    "sub": (aten.sub.Tensor, f(4, 8), f(4, 1)),
    "mul": (aten.mul.Tensor, f(4, 8), f(4, 1)),
    "mul scalar": (aten.mul.Tensor, f(4, 8), 2),
    "mul mask": (aten.mul.Tensor, f(4, 8), bools(4, 8)),
    "div": (aten.div.Tensor, f(4, 8), f(4, 1)),
    "div scalar": (aten.div.Tensor, f(4, 8), 3),
    "floor div": (aten.div.Tensor_mode, f(4, 8), 3),
    "where": (aten.where.self, bools(4, 8), f(4, 8), f(8)),
    "where else zero": (aten.where.ScalarOther, bools(4, 8), f(4, 8), 0.0),
    "where else one": (aten.where.ScalarOther, bools(4, 8), f(4, 8), 1.0),
    "masked_fill zero": (aten.masked_fill.Scalar, f(4, 8), bools(8), 0),
    "masked_fill low": (aten.masked_fill.Scalar, f(4, 8), bools(4, 8), -1e3),
    "cast": (aten.to.dtype, f(4, 8), torch.float16),
    "cast to int": (aten.to.dtype, f(4, 8), torch.int64),
    "cast from bool": (aten._to_copy.default, bools(4, 8)),
    "type_as": (aten.type_as.default, f(4, 8), f(3, 5)),
    "compare": (aten.eq.Tensor, f(4, 8), f(4, 1)),
    "and": (aten.__and__.Tensor, bools(4, 8), bools(8)),
    "gelu": (aten.gelu.default, f(4, 8)),
    "rsqrt": (aten.rsqrt.default, f(4, 8).abs()),
    "pow": (aten.pow.Tensor_Scalar, f(4, 8), 3),
    "neg": (aten.neg.default, f(4, 8)),
    "clone": (aten.clone.default, f(4, 8)),
    "zeros_like": (aten.zeros_like.default, f(4, 8)),
    "copy": (aten.copy.default, ints(4, 8), ints(8)),
    "fill": (aten.fill.Tensor, f(4, 8), f()),
    "floor_divide": (aten.floor_divide.default, ints(4, 4), 2),
}
VIEW = {
    "merge": (aten.view.default, f(4, 6, 8), [24, 8]),
    "split heads": (aten.view.default, f(4, 6, 8), [4, 6, 4, 2]),
    "merge heads": (aten.reshape.default, f(4, 6, 8), [4, -1]),
    "regroup": (aten.view.default, f(6, 4), [8, 3]),
    "ones": (aten.view.default, f(1, 4, 1, 6), [4, 1, 2, 3]),
    "flatten": (aten.flatten.using_ints, f(4, 6, 8), 1),
    "unflatten": (aten.unflatten.int, f(4, 8), 1, [4, 2]),
    "permute": (aten.permute.default, f(4, 6, 8), [2, 0, 1]),
    "transpose": (aten.transpose.int, f(4, 6, 8), -1, 0),
    "t": (aten.t.default, f(4, 8)),
    "unsqueeze": (aten.unsqueeze.default, f(4, 8), -1),
    "squeeze": (aten.squeeze.dim, f(4, 1, 8), 1),
    "squeeze nothing": (aten.squeeze.dim, f(2, 1, 8), 0),
    "squeeze all": (aten.squeeze.default, f(2, 1, 8)),
    "expand": (aten.expand.default, f(4, 1, 8), [2, 4, 6, -1]),
    "slice": (aten.slice.Tensor, f(4, 6, 8), 0, 0, 2),
    "slice all": (aten.slice.Tensor, f(4, 6, 8), 0, 0, 1 << 62),
    "select": (aten.select.int, f(4, 6, 8), 1, 2),
    "split": (aten.split.Tensor, f(4, 6, 8), 3, -1),
    "chunk": (aten.chunk.default, f(4, 6, 8), 2, 1),
    "unbind": (aten.unbind.int, f(4, 6, 8), 1),
    "diagonal": (aten.diagonal.default, f(4, 6, 4), 0, 0, 2),
    "cat": (aten.cat.default, [f(4, 6, 8), f(4, 2, 8)], 1),
    "stack": (aten.stack.default, [f(4, 6), f(4, 6)], 1),
    "pad zeros": (aten.constant_pad_nd.default, f(4, 6, 8), [1, 1]),
    "pad ones": (aten.constant_pad_nd.default, f(4, 6, 8), [0, 0, 1, 0], 1.0),
    "flip": (aten.flip.default, f(4, 6, 8), [-1]),
    "roll": (aten.roll.default, f(4, 6, 8), [1], [1]),
    "repeat": (aten.repeat.default, f(4, 1, 8), [2, 1, 6, 1]),
    "repeat block": (aten.repeat.default, f(4, 8), [2, 1]),
    "repeat_interleave": (aten.repeat_interleave.self_int, f(4, 6, 8), 2, 1),
    "repeat_interleave flat": (aten.repeat_interleave.self_int, f(4, 8), 2),
    "slice_scatter": (aten.slice_scatter.default, f(4, 6, 8), f(4, 3, 8), 1, 0, 3),
    "select_scatter": (aten.select_scatter.default, f(4, 6, 8), f(4, 8), 1, 0),
    "tril": (aten.tril.default, f(4, 6, 8)),
    "index_select": (aten.index_select.default, f(4, 6, 8), 1, ints(4)),
    "gather": (aten.gather.default, f(4, 8), 1, ints(4, 8)),
    "gather short": (aten.gather.default, f(4, 8), 1, ints(2, 4)),
    "index": (aten.index.Tensor, f(4, 6, 8), [None, ints(4)]),
    "index broadcast": (aten.index.Tensor, f(4, 6, 8), [ints(2, 1), ints(4)]),
    "index apart": (aten.index.Tensor, f(4, 4, 4), [ints(2), None, ints(2)]),
    "scatter": (aten.scatter.src, f(4, 8), 1, ints(4, 8), f(4, 8)),
    "scatter_add": (aten.scatter_add.default, f(4, 8), 0, ints(4, 8), f(4, 8)),
    "one_hot": (aten.one_hot.default, ints(4, 8), 4),
    "new_ones": (aten.new_ones.default, f(4, 8), [3]),
    "arange": (aten.arange.default, 4),
}
REDUCE = {
    "sum": (aten.sum.dim_IntList, f(4, 6, 8), [1]),
    "sum keepdim": (aten.sum.dim_IntList, f(4, 6, 8), [-1, 0], True),
    "sum all": (aten.sum.default, f(4, 8)),
    "count": (aten.sum.default, bools(4, 8)),
    "mean": (aten.mean.dim, f(4, 6, 8), [-1], True),
    "mean all": (aten.mean.default, f(4, 8)),
    "amax": (aten.amax.default, f(4, 6, 8), [1]),
    "max": (aten.max.dim, f(4, 6, 8), 1),
    "max all": (aten.max.default, f(4, 8)),
    "var": (aten.var.correction, f(4, 6, 8), [1]),
    "var_mean": (aten.var_mean.correction, f(4, 6, 8), [1]),
    "softmax": (aten.softmax.int, f(4, 6, 8), -1),
    "log_softmax": (aten.log_softmax.int, f(4, 6, 8), 1, torch.float32),
    "cumsum": (aten.cumsum.default, f(4, 8), 1),
    "argmax": (aten.argmax.default, f(4, 6, 8), -1),
    "topk": (aten.topk.default, f(4, 6, 8), 2),
    "sort": (aten.sort.default, f(4, 8)),
    "any": (aten.any.dim, bools(4, 8), 1),
    "diff": (aten.diff.default, f(4, 8), 1, -1, f(4, 1)),
    "logsumexp": (aten.logsumexp.default, f(4, 8), [1]),
    "norm": (aten.linalg_vector_norm.default, f(4, 8), 2, [1]),
    "mse": (aten.mse_loss.default, f(4, 8), f(4, 8)),
    "mse broadcast": (aten.mse_loss.default, f(4, 8), f(8, 4).t()),
    "mse sum": (aten.mse_loss.default, f(4, 8), f(4, 8), 2),
    "mse none": (aten.mse_loss.default, f(4, 8), f(4, 8), 0),
    "l1": (aten.l1_loss.default, f(4, 8), f(4, 8)),
    "smooth_l1": (aten.smooth_l1_loss.default, f(4, 8), f(4, 8)),
    "huber": (aten.huber_loss.default, f(4, 8), f(4, 8)),
    "bce": (aten.binary_cross_entropy.default, f(4, 8).sigmoid(), f(4, 8).sigmoid()),
    "bce with logits": (aten.binary_cross_entropy_with_logits.default, f(4, 8), f(4, 8), None, f(8).abs()),
    "kl_div": (aten.kl_div.default, f(4, 8).sigmoid(), f(4, 8).sigmoid()),
}
CASES = {**EINSUM, **POINTWISE, **VIEW, **REDUCE}
KEYWORDS = {
    "floor div": {"rounding_mode": "floor"},
    "cast from bool": {"dtype": torch.float32},
    "var": {"correction": 0},
    "var_mean": {"correction": 0, "keepdim": True},
}


def node_of(name):
    target, *args = CASES[name]
    return example_node(target, *args, **KEYWORDS.get(name, {}))


def labels_of(node, mesh_shape=(2,)):
    return [choice.labels[0] for choice in mesh_choices(node, mesh_shape)]


@pytest.mark.parametrize("name", CASES)
def test_execution_confirms_every_choice_and_finds_none_missing(name):
    node = node_of(name)
    assert not rule_for(node).is_fallback
    assert check_node(node, ((2,), (2, 2))) == {}
    assert missing_splits(node) == []


@pytest.mark.parametrize("name", ["linear", "add broadcast", "split heads", "expand", "mean", "index broadcast", "mse"])
def test_three_and_four_devices(name):
    assert check_node(node_of(name), ((3,), (4,), (2, 3))) == {}


# ---- what is offered


def test_linear_offers_the_megatron_pairs():
    node = node_of("linear")
    column, row = pairs_choice(node, ("o",), (2,)), pairs_choice(node, ("i",), (2,))
    assert [str(p) for p in (*column.inputs, *column.outputs)] == ["R|P", "S0|S0", "S0|S0", "S2|S2"]
    assert [str(p) for p in (*row.inputs, *row.outputs)] == ["S2|S2", "S1|S1", "P|R", "P|R"]
    assert column.work_share == row.work_share == 0.5
    assert rule_for(node).flops(node) == 2 * 4 * 6 * 8 * 12
    assert rule_for(node).saves(node) == (("input", 0), ("input", 1))


@pytest.mark.parametrize(
    ("name", "labels"),
    {
        "merge": ["whole", "d0", "d1", "partial", "grad"],
        "split heads": ["whole", "d0", "d1", "d2", "partial", "grad"],
        "regroup": ["whole", "d0", "partial", "grad"],
        "einsum diagonal": ["whole", "b"],
        "softmax": ["whole", "d0", "d1", "grad"],
        "mean": ["whole", "r2", "d0", "d1", "partial", "grad"],
        "add broadcast": ["whole", "d0", "d1", "d2", "partial", "grad"],
        "add scalar": ["whole", "d0", "d1", "grad"],
        "mul": ["whole", "d0", "d1", "partial", "partial1", "grad"],
        "gelu": ["whole", "d0", "d1", "grad"],
        "cast to int": ["whole", "d0", "d1"],
        "pad ones": ["whole", "d0", "d1", "grad"],
        "arange": ["whole"],
    }.items(),
)
def test_labels(name, labels):
    assert labels_of(node_of(name)) == labels


def test_what_cuts_nothing_is_offered_on_any_number_of_devices():
    assert labels_of(node_of("neg"), (3,)) == labels_of(node_of("permute"), (5,)) == ["whole", "partial", "grad"]


def test_a_comparison_asks_for_no_gradient_reduction():
    for choice in mesh_choices(node_of("compare"), (2,)):
        assert all(not placement.is_partial for pair in choice.inputs for placement in pair.cotangent)


def test_two_labels_never_cut_one_dim():
    # [4, 6, 8] -> [24, 8] -> cut of 24 by d0 alone; both axes by d0 needs 4 | 4
    node = node_of("merge")
    assert ("d0", "d0") in [c.labels for c in mesh_choices(node, (2, 2))]
    assert ("d0", "d0") not in [c.labels for c in mesh_choices(node, (2, 4))]
    matrix = example_node(aten.einsum.default, "ij,jk->ik", [f(4, 4), f(4, 4)])
    for choice in mesh_choices(matrix, (2, 2)):
        for pair in (*choice.inputs, *choice.outputs):
            cuts = [p.dim for p in pair.value if p.is_shard]
            assert len(set(cuts)) == len(cuts) or choice.labels[0] == choice.labels[1]


def test_a_label_that_two_dims_share_is_refused_across_labels():
    class Clash(EinsumRule):
        def axis_choices(self, node):
            choices = super().axis_choices(node)
            return (*choices, AxisChoice("again", choices[1].inputs, choices[1].outputs, choices[1].extent))

    def clash(a, b):
        return a @ b

    register("meshwright.clash")(Clash("m k, k n -> m n"))
    try:
        node = example_node(clash, f(4, 4), f(4, 4))
        assert ("m", "again") not in [c.labels for c in mesh_choices(node, (2, 2))]
        with pytest.raises(ValueError, match=r"clash.*both cut dim 0 of operand 0"):
            pairs_choice(node, ("m", "again"), (2, 2))
    finally:
        del _RULES["meshwright.clash"]


def test_choices_are_rebuilt_from_their_labels():
    node = node_of("linear")
    for mesh in ((2,), (2, 2), (1, 4), (3,), ()):
        for choice in mesh_choices(node, mesh):
            assert pairs_choice(node, choice.labels, mesh) == choice
    with pytest.raises(ValueError, match=r"linear.*but got 'nonsense'"):
        pairs_choice(node, ("nonsense",), (2,))
    with pytest.raises(ValueError, match="'b0' comes in 4, which 3 does not divide"):
        pairs_choice(node, ("b0",), (3,))
    with pytest.raises(ValueError, match="one label per axis"):
        pairs_choice(node, ("b0",), (2, 2))


def test_few_choices_keep_whole_and_the_simplest():
    choices = mesh_choices(node_of("linear"), (2, 2), max_choices=6)
    assert len(choices) == 6
    assert choices[0].labels == ("whole", "whole")
    assert {c.labels for c in choices[1:]} >= {("o", "o"), ("i", "i"), ("b0", "b0")}


def test_an_unknown_op_is_whole_and_says_so():
    node = example_node(aten.trace.default, f(4, 4))
    assert rule_for(node).is_fallback
    assert labels_of(node) == ["whole"]
    found = report([_OneOp(node)], missing=False)
    assert [name.partition("(")[0] for name in found.fallback] == ["aten.trace.default"]
    assert "ops without a rule (replicated): 1" in str(found)


def test_the_work_of_an_unknown_op_counts():
    assert rule_for(example_node(aten.trace.default, f(4, 4))).flops(example_node(aten.trace.default, f(4, 4))) == 1
    product = example_node(aten.mm.default, f(4, 6), f(6, 8))
    assert FallbackRule().flops(product) == rule_for(product).flops(product) == 2 * 4 * 6 * 8


class _OneOp:
    """As much of a Graph as the report reads."""

    def __init__(self, *nodes):
        self.nodes = nodes

    def ops(self):
        return list(self.nodes)


def test_patterns_parse():
    pattern = parse_pattern("b* i, o! i, +o? -> b* o")
    assert pattern.operands == ((("b*", "i"), False, False), (("o", "i"), False, False), (("o",), True, True))
    assert pattern.output == ("b*", "o")
    assert pattern.fixed == {"o"}
    with pytest.raises(ValueError, match="operands '->' output"):
        parse_pattern("a b")


def test_choice_text():
    choice = pairs_choice(node_of("mm"), ("m", "k"), (2, 2))
    assert isinstance(choice, MeshChoice)
    assert str(choice) == "m×k: S0,S1|S0,S1 R,S0|P,S0 -> S0,P|S0,R"
