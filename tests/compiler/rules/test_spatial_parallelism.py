"""Cuts along space: which windows allow them, what their halos weigh, and that a wide search carries them through a
convolutional network."""

from __future__ import annotations

import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import op_name
from meshwright.compiler.ir.ops import halo, local_ops
from meshwright.compiler.ir.spec import S
from meshwright.compiler.rules import convolution as convolution_rules
from meshwright.compiler.rules import mesh_choices, pairs_choice, rule_for
from meshwright.compiler.rules.prune import Pruner
from meshwright.compiler.verification.check_rules import check_choice, check_node
from meshwright.compiler.verification.split_execution import example_node
from torch import nn
from torch.nn import functional as F

from tests.support.manual_plans import Wish, equals_one_device
from tests.support.zoo import ZOO

aten, r = torch.ops.aten, torch.randn


def convolution(kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, rows: int = 16):
    """A square convolution of 4 channels."""
    return example_node(
        aten.conv2d.default, r(2, 4, rows, rows), r(4, 4, kernel, kernel), None,
        [stride] * 2, [padding] * 2, [dilation] * 2,
    )  # fmt: skip


def cut_of(node, label: str = "height"):
    """The choice with that label, None if there is none."""
    return next((choice for choice in rule_for(node).axis_choices(node) if choice.label == label), None)


def halos(node, parts: int = 2) -> tuple[int, ...]:
    """Rows that each device receives from above and from below in the forward (0 left out), as messages say."""
    rows = node.args[0].meta["type"].shape[2]
    choice = pairs_choice(node, ("height",), (parts,))
    return tuple(round(m.scale * rows / parts) for _, m in choice.internal if m.phase == "forward")


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "expected"),
    [
        (1, 1, 0, 1, ()), (2, 2, 0, 1, ()), (3, 1, 1, 1, (1, 1)), (5, 1, 2, 1, (2, 2)), (3, 2, 1, 1, (1,)),
        (3, 1, 2, 2, (2, 2)), (7, 2, 3, 1, (3, 2)), (1, 2, 0, 1, ()),
    ],
)  # fmt: skip
def test_a_window_needs_the_rows_that_it_reaches_beyond_its_block(kernel, stride, padding, dilation, expected):
    node = convolution(kernel, stride, padding, dilation)
    assert halos(node) == halos(node, 4) == expected
    assert check_node(node, [(2,), (2, 2), (4,)]) == {}


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (7, 2, 3), (5, 1, 2), (2, 2, 0)])
def test_a_block_with_its_halo_gives_its_block_of_the_output(kernel, stride, padding):
    node = convolution(kernel, stride, padding)
    parts, x, weight = 2, r(2, 4, 16, 16), r(4, 4, kernel, kernel)
    found = [*halos(node), 0, 0]
    before, after = (found[0], found[1]) if padding else (0, 0)
    padded = F.pad(x, (padding, padding, before, after))
    size = 16 // parts
    blocks = [
        F.conv2d(padded[:, :, i * size : (i + 1) * size + before + after], weight, stride=stride) for i in range(parts)
    ]
    torch.testing.assert_close(torch.cat(blocks, 2), F.conv2d(x, weight, stride=stride, padding=padding))


@pytest.mark.parametrize(
    "node",
    [convolution(3), convolution(3, 1, 2), convolution(3, 2, 1, rows=15), convolution(4, 1, 2)],
    ids=["shrinks", "grows", "odd", "one more"],
)
def test_blocks_that_do_not_belong_together_are_not_offered(node):
    assert cut_of(node) is None


def test_no_block_is_shorter_than_a_halo():
    node = convolution(9, 1, 4)  # four rows of each neighbour: 16 rows give at most four blocks
    assert cut_of(node).extent == 4
    assert ("height",) not in {choice.labels for choice in mesh_choices(node, (8,))}


def test_halos_do_not_shrink_with_the_block():
    node = convolution(3, 1, 1)
    for labels, mesh in ((("height", "height"), (2, 4)), (("height", "batch"), (2, 2)), (("height", "width"), (2, 2))):
        choice = pairs_choice(node, labels, mesh)
        local = 16 // (mesh[0] * mesh[1] if labels == ("height", "height") else mesh[0])
        assert {round(m.scale * local, 6) for axis, m in choice.internal if labels[axis] == "height"} == {1.0}
        assert {m.kind for _, m in choice.internal} == {"send"}
        assert check_choice(node, choice, mesh) == []


LOOSE = (aten.max_pool2d.default, (r(2, 4, 8, 8), [3, 3], [2, 2], [1, 1]))
CASES = {
    "max": LOOSE,
    "max of blocks": (aten.max_pool2d.default, (r(2, 4, 8, 8), [2, 2])),
    "mean": (aten.avg_pool2d.default, (r(2, 4, 8, 8), [3, 3], [2, 2], [1, 1])),
    "mean of what is inside": (aten.avg_pool2d.default, (r(2, 2, 8, 8), [3, 3], [1, 1], [1, 1], False, False)),
    "mean by a number": (aten.avg_pool2d.default, (r(2, 2, 8, 8), [3, 3], [1, 1], [1, 1], False, False, 5)),
    "groups": (aten.conv2d.default, (r(2, 4, 8, 8), r(4, 2, 3, 3), r(4), [1, 1], [1, 1], [1, 1], 2)),
    "no batch": (aten.conv2d.default, (r(4, 8, 8), r(4, 4, 3, 3), r(4), [1, 1], [1, 1])),
    "same, even and odd": (aten.conv2d.padding, (r(2, 2, 16, 8), r(2, 2, 4, 3), r(2), [1, 1], "same", [2, 1])),
    "three dims": (aten.conv3d.default, (r(1, 2, 4, 4, 4), r(2, 2, 3, 3, 3), None, [1] * 3, [1] * 3)),
    "back, in blocks": (aten.conv_transpose2d.input, (r(2, 4, 8, 8), r(4, 3, 2, 2), r(3), [2, 2])),
    "back, of 4": (aten.conv_transpose2d.input, (r(2, 4, 8, 8), r(4, 3, 4, 4), r(3), [2, 2], [1, 1])),
    "back, of 3": (aten.conv_transpose2d.input, (r(2, 2, 8, 8), r(2, 2, 3, 3), r(2), [2, 2], [1, 1], [1, 1])),
    "back, dilated": (
        aten.convolution.default,
        (r(2, 2, 8, 8), r(2, 2, 3, 3), None, [2, 2], [2, 2], [2, 2], True, [1, 1], 1),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_windows_run_cut_along_one_axis_and_two(name):
    target, arguments = CASES[name]
    node = example_node(target, *arguments)
    assert cut_of(node, "height").executable
    labels = [("height",), ("width",), ("height", "width"), ("width", "height"), ("height", "height")]
    for of in labels:
        assert check_choice(node, of, (2, 2)[: len(of)]) == [], of


def test_neighbours_across_three_axes():
    for node in (convolution(3, 1, 1), example_node(LOOSE[0], r(1, 2, 16, 16), *LOOSE[1][1:])):
        for labels in (("height",) * 3, ("height", "width", "height"), ("batch", "height", "height")):
            if node.args[0].meta["type"].shape[0] > 1 or "batch" not in labels:
                assert check_choice(node, labels, (2, 2, 2)) == [], labels


@pytest.mark.parametrize("wrong", ["short", "gradients", "fill"])
def test_the_check_sees_a_wrong_halo(monkeypatch, wrong):
    swap = halo._exchange_halos

    def broken(before, after, axes, comm):
        if wrong == "gradients" and comm.phase == "backward":
            return tuple(None if x is None else torch.zeros_like(x) for x in (after, before))
        above, below = swap(before, after, axes, comm)
        if wrong == "short" and above is not None:
            above.narrow(2, 0, 1).zero_()
        return above, below

    monkeypatch.setattr(halo, "_exchange_halos", broken)
    if wrong == "fill":
        monkeypatch.setattr(convolution_rules, "inf", 0.0)
    target, arguments = LOOSE if wrong == "fill" else CASES["groups"]
    assert check_choice(example_node(target, *arguments), ("height",), (2,)) != []


def test_positions_of_a_maximum_are_of_the_whole():
    assert cut_of(example_node(aten.max_pool2d_with_indices.default, r(2, 4, 8, 8), [2, 2])) is None


def test_batch_norm_averages_over_what_is_cut():
    node = example_node(local_ops.batch_norm, r(4, 4, 8, 8), r(4), r(4), 1e-5)
    for labels in (("height", "width"), ("batch", "height"), ("channel", "width"), ("height", "height")):
        assert check_choice(node, labels, (2, 2)) == []


def test_a_wide_search_carries_space_through_a_network():
    model, args, kwargs = ZOO["convnet"](8)
    graph = capture(model, args, kwargs).with_batch(8)
    narrow, wide = Pruner(graph), Pruner(graph, sequence=True)
    names = {"meshwright.batch_norm", "aten.relu.default", "aten.max_pool2d.default", "aten.conv2d.default"}
    for node in graph.ops():
        if op_name(node) not in names:
            continue
        cut = [S(2) in c.outputs[0].value for c in wide.choices(node, 8, (2,))]
        assert any(cut), node.name
        assert not any(S(2) in c.outputs[0].value for c in narrow.choices(node, 8, (2,)))


def test_tokens_are_sent_to_their_experts_beside_data_parallelism():
    node = example_node(
        local_ops.experts, r(8, 4), torch.randint(0, 4, (8, 2)), torch.rand(8, 2), r(4, 2, 6, 4), r(4, 4, 6), "silu"
    )
    sent = {choice.labels: choice for choice in mesh_choices(node, (2, 2))}
    assert sent["token", "dispatch"].executable  # data parallel between groups that share the experts
    assert str(sent["token", "dispatch"].inputs[0]) == "S0,S0|S0,S0"
    assert str(sent["token", "dispatch"].inputs[3]) == "R,S0|P,S0"
    counts, *rows = sent["token", "dispatch"].internal
    assert [(axis, m.kind, m.scale) for axis, m in rows] == [(1, "all_to_all", 2.0)] * 4
    assert counts[1].kind == "all_to_all"
    assert counts[1].scale * 2 * 2 * 6 * 4 == pytest.approx(4)  # of two experts' weights here: one number per expert


# ---- on ranks


class UNet(nn.Module):
    """Down and up again beside a skip connection, with all kinds of windows."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.low = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1)
        self.leave = nn.Conv2d(16, 3, 5, padding=2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        skip = F.relu(self.enter(x))
        low = F.max_pool2d(F.relu(self.norm(self.low(self.down(skip)))), 3, 1, 1)
        up = F.avg_pool2d(self.up(low), 3, 1, 1, count_include_pad=False)
        return F.mse_loss(self.leave(torch.cat([skip, up], 1)), y)


def unet(batch: int):
    """A model, images and what they are to become."""
    torch.manual_seed(0)
    x, y = torch.randn(2, batch, 3, 16, 16, generator=torch.Generator().manual_seed(1)).unbind(0)
    return UNet(), (x, y), {}


def spatially(*labels: str) -> Wish:
    """All that knows space is cut by these labels; the rest as it comes."""
    ops = ("conv2d", "conv_transpose2d", "pool2d", "batch_norm")

    def wish(node):
        return labels if any(name in op_name(node) for name in ops) else None

    return wish


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("convnet", ("height",)), (unet, ("height", "width")),
        (unet, ("height", "height")),
    ],
)  # fmt: skip
def test_a_network_cut_along_space_trains_as_one_device_does(ranks, name, labels):
    mesh = (2,) * len(labels)
    _, results = equals_one_device(ranks, name, (), mesh, spatially(*labels))
    assert 0 < results[0][2]["backward send"] < results[0][2]["forward send"]  # no gradient goes back to the images
