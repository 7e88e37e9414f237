"""Ring attention: what is offered and priced, by execution, in lock-step and over a wire; what a device holds."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.comm import Context, current_context, use_context
from meshwright.compiler.ir.graph import Graph, op_name
from meshwright.compiler.ir.ops import ring_attention as ring_module
from meshwright.compiler.ir.ops.ring_attention import AttentionSetting, BlockKernel, ring_attention
from meshwright.compiler.ir.spec import R, S
from meshwright.compiler.memory.abstract_run import AbstractComm, Tracker
from meshwright.compiler.rules import mesh_choices, pairs_choice, rule_for
from meshwright.compiler.rules.prune import MAX_CHOICES, Pruner
from meshwright.compiler.verification.check_rules import check_choice
from meshwright.compiler.verification.lockstep import LockstepGroup
from meshwright.compiler.verification.split_execution import example_node
from meshwright.runtime.transport.process_groups import bind

from tests.support.manual_plans import BATCH
from tests.support.zoo import ZOO

PHASES = ("forward", "backward")
sdpa = torch.ops.aten.scaled_dot_product_attention.default


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


@pytest.mark.parametrize(
    ("mesh", "passes", "home"), [((8,), (7,), (1,)), ((2, 4), (1, 6), (1, 1)), ((4, 2), (3, 4), (1, 0))]
)
def test_a_ring_goes_round_its_minor_axis_before_every_pass_along_the_major_one(mesh, passes, home):
    shape = (2, 4, 32, 16)
    node = example_node(sdpa, *(torch.randn(shape) for _ in range(3)))
    messages = pairs_choice(node, ("ring",) * len(mesh), mesh).internal
    assert {(m.kind, m.like, m.scale) for _, m in messages} == {("send", ("input", 1), 2.0)}
    for axis in range(len(mesh)):
        found = {phase: [m.count for a, m in messages if (a, m.phase) == (axis, phase)] for phase in PHASES}
        assert found["forward"] == [passes[axis]]
        assert found["backward"] == [passes[axis], passes[axis], *[1] * home[axis]]
    assert check_choice(node, ("ring",) * len(mesh), mesh) == []


def test_a_ring_costs_each_device_its_share_whatever_the_mask():
    x = torch.randn(2, 4, 16, 8)
    for causal in (False, True):
        node = example_node(sdpa, x, x, x, None, 0.0, causal)
        whole, ring = (pairs_choice(node, (label,), (4,)).work_share for label in ("whole", "ring"))
        assert (whole, ring) == (1.0, 0.25)


@pytest.mark.parametrize(("devices", "rows"), [(2, 8), (3, 8), (4, 8), (4, 7), (5, 6), (8, 2)])
def test_devices_have_equally_many_scores_under_a_causal_mask(monkeypatch, devices, rows):
    scores: Counter[tuple[int, str]] = Counter()
    kernel = ring_module.kernel_for(*(torch.zeros(1, 1, 1, 8) for _ in range(3)), None, AttentionSetting(None))

    def counted(direction: str) -> Any:
        def run(*arguments: Any, **setting: Any) -> Any:
            at = 1 if direction == "backward" else 0
            (q, k), causal = arguments[at : at + 2], arguments[6 if at else 4]
            n, keys = q.shape[-2], k.shape[-2]
            scores[current_context().comm.rank, direction] += n * (n + 1) // 2 if causal else n * keys  # type: ignore[attr-defined]
            return getattr(kernel, direction)(*arguments, **setting)

        return run

    counting = BlockKernel(counted("forward"), counted("backward"))
    monkeypatch.setattr(ring_module, "kernel_for", lambda *_: counting)

    def device(comm: Any) -> None:
        q, k, v = (torch.randn(1, 2, rows, 8, requires_grad=True) for _ in range(3))
        ring_attention(q, k, v, is_causal=True, ring_axes=(0,)).sum().backward()

    LockstepGroup((devices,)).run(device)
    length = devices * rows
    for direction in ("forward", "backward"):
        here = [scores[rank, direction] for rank in range(devices)]
        assert sum(here) == length * (length + 1) // 2  # nothing twice, nothing that no query sees
        assert max(here) - min(here) <= (rows % 2) * length  # an odd block has a longer half


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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("mesh", "heads"), [((3,), 4), ((4,), 2), ((2, 2), 4)])
@pytest.mark.parametrize("rows", [5, 6])
def test_a_ring_equals_one_device(mesh, heads, rows, causal):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, n, prod(mesh) * rows, 8) for n in (4, heads, heads, 4)]
    *operands, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)

    def train(q: Any, k: Any, v: Any, against: Any, axes: tuple[int, ...]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ring_attention(*leaves, is_causal=causal, scale=0.4, enable_gqa=True, ring_axes=axes)
        out.backward(against)
        return [out.detach(), *(x.grad for x in leaves)]

    def device(comm: Any) -> list[torch.Tensor]:
        mine = [x.chunk(prod(mesh), 2)[comm.rank] for x in (*operands, grad)]
        return train(*mine, tuple(range(len(mesh))))

    whole, parts = train(*operands, grad, ()), LockstepGroup(mesh).run(device)
    for expected, *got in zip(whole, *parts):
        torch.testing.assert_close(torch.cat(got, 2), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_ring_over_a_wire_equals_one_device(ranks, devices):
    found = ranks.run(devices, over_a_wire)
    assert max(off for off, _ in found) < 1e-9
    assert len({bytes_sent for _, bytes_sent in found}) == 1


def over_a_wire() -> tuple[float, int]:
    """(how far a rank's output and gradients are from one device's, bytes that it sent)."""
    count, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    comm = bind((count,), range(count))
    assert comm is not None
    generator = torch.Generator().manual_seed(0)
    *operands, grad = (torch.randn(1, 2, 64 * count, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    found = []
    for axes, cut in (((), lambda x: x), ((0,), lambda x: x.chunk(count, 2)[rank])):
        leaves = [cut(x).clone().requires_grad_() for x in operands]
        with use_context(Context(comm)):
            out = ring_attention(*leaves, is_causal=True, ring_axes=axes)
        out.backward(cut(grad))
        found.append([out.detach(), *(x.grad for x in leaves)])
    off = [float((one.chunk(count, 2)[rank] - other).abs().max()) for one, other in zip(*found)]
    return max(off), sum(comm.bytes.values())


def test_rows_that_see_no_key_of_a_block_or_none_at_all(monkeypatch):
    x = torch.randn(2, 4, 8, 16)
    mask = torch.rand(2, 1, 8, 8) > 0.3
    mask[0, :, :, :4] = False  # the first block's keys are padding
    mask[1, :, 3] = False  # and one query is alone
    node = example_node(sdpa, x, x, x, mask)
    kernel_for = ring_module.kernel_for
    for writes in (False, True):
        monkeypatch.setattr(ring_module, "kernel_for", lambda *a, w=writes: kernel_for(*a[:5], w))
        for devices in (2, 4):
            problems = check_choice(node, ("ring",), (devices,), [x.clone(), x.clone() + 1, x.clone() * 2, mask])
            assert problems == []


def peak_bytes(devices: int, rank: int, rows: int, causal: bool) -> int:
    """The most bytes that tensors of a forward and backward have at one time on one device, ``rows`` positions each."""

    class Comm(AbstractComm):
        def index(self, axis: int) -> int:
            return rank

    q, k, v = (torch.empty(1, 2, rows, 8, device="meta", requires_grad=True) for _ in range(3))
    tracker = Tracker()
    tracker.ignore(q, k, v)
    with tracker, use_context(Context(Comm((devices,), False))):
        out = ring_attention(q, k, v, is_causal=causal, ring_axes=(0,), writes_scores=False)
        out.backward(torch.empty_like(out))
    return tracker.peak_total


@pytest.mark.parametrize("causal", [False, True])
def test_no_device_holds_more_than_the_blocks_that_come_and_go(causal):
    found = [[peak_bytes(devices, rank, 16, causal) for rank in range(devices)] for devices in (4, 8)]
    assert max(max(found)) <= 1.15 * min(min(found))
    assert max(found[0]) == pytest.approx(max(found[1]), rel=0.05)
    longer = max(peak_bytes(4, rank, 32, causal) for rank in range(4))
    assert longer == pytest.approx(2 * max(found[0]), rel=0.05)


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
        assert len(many) <= MAX_CHOICES
