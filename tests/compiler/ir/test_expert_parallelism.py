"""Experts on the devices of others: rows sent to them and back give what one device gives, whatever the router does."""

from __future__ import annotations

import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.ops import local_ops
from meshwright.compiler.ir.ops import local_ops as dispatch
from meshwright.compiler.rules import pairs_choice
from meshwright.compiler.verification.check_rules import check_choice
from meshwright.compiler.verification.lockstep import LockstepGroup
from meshwright.compiler.verification.split_execution import example_node
from torch import nn
from torch.nn import functional as F

from tests.support.manual_plans import equals_one_device, sent
from tests.support.zoo import ZOO

TOKENS, EXPERTS, HIDDEN = 16, 4, 6


def experts(index: torch.Tensor, gated: bool = True):
    """A node of experts with these choices of ``TOKENS`` tokens."""
    r = torch.randn
    up = r(EXPERTS, 2, 8, HIDDEN) if gated else r(EXPERTS, 8, HIDDEN)
    weight = torch.rand(index.shape)
    return example_node(local_ops.experts, r(TOKENS, HIDDEN), index, weight, up, r(EXPERTS, HIDDEN, 8), "silu", gated)


def operands_with(node, index: torch.Tensor) -> list[torch.Tensor]:
    """Random operands, but this index."""
    return [index if k == 1 else torch.randn(n.meta["type"].shape) for k, n in enumerate(node.all_input_nodes)]


ROUTES = {
    "even": torch.arange(2 * TOKENS).view(TOKENS, 2) % EXPERTS,
    "all to one": torch.full((TOKENS, 2), 2),
    "none to the last": torch.randint(0, EXPERTS - 1, (TOKENS, 3), generator=torch.Generator().manual_seed(0)),
    "beyond capacity": torch.randint(-1, EXPERTS + 1, (TOKENS, 2), generator=torch.Generator().manual_seed(0)),
    "none at all": torch.full((TOKENS, 1), EXPERTS),
}


@pytest.mark.parametrize("route", list(ROUTES))
def test_every_token_meets_its_experts(route):
    index = ROUTES[route]
    node = experts(index)
    operands = operands_with(node, index)
    for labels, mesh in (
        (("dispatch",), (2,)), (("dispatch",), (4,)), (("dispatch", "dispatch"), (2, 2)),
        (("token", "dispatch"), (2, 2)), (("dispatch", "ffn"), (2, 2)),
    ):  # fmt: skip
        assert check_choice(node, labels, mesh, operands) == [], (labels, mesh)


def test_experts_without_a_gate_too():
    node = experts(ROUTES["even"], gated=False)
    assert check_choice(node, ("dispatch", "token"), (2, 2)) == []


@pytest.mark.parametrize("wrong", ["order", "gradients", "sources"])
def test_the_check_sees_rows_in_the_wrong_place(monkeypatch, wrong):
    there, back = dispatch.Move.there, dispatch.Move.back
    if wrong == "order":
        monkeypatch.setattr(dispatch.Move, "back", lambda move, rows: back(move, rows).flip(0))
    elif wrong == "gradients":
        wrong_way = staticmethod(lambda ctx, g: (ctx.home(g) * 0, None, None))
        monkeypatch.setattr(dispatch._MoveRows, "backward", wrong_way)
    else:
        monkeypatch.setattr(dispatch.Move, "there", lambda move, rows: there(move, rows)[move.inverse])
    assert check_choice(experts(ROUTES["even"]), ("dispatch",), (2,)) != []


def test_what_travels_is_what_the_price_says():
    index = ROUTES["even"]
    node = experts(index)
    operands = operands_with(node, index)
    choice = pairs_choice(node, ("dispatch",), (2,))

    def device(comm):
        x, index, weight, up, down = (t.chunk(2)[comm.rank] for t in operands)
        leaf = x.clone().requires_grad_()
        local_ops.experts(leaf, index, weight, up, down, "silu", dispatch_axes=(0,)).sum().backward()
        return torch.tensor([elements for _, kind, _, elements in comm.log if kind == "all_to_all"])

    for ran in LockstepGroup((2,)).run(device):
        counts, *rows = ran.tolist()
        assert counts == EXPERTS
        assert rows == [round(m.scale * TOKENS / 2 * HIDDEN) for _, m in choice.internal[1:]]


# ---- on ranks


class Capacity(nn.Module):
    """Two experts per token, at most ``room`` tokens per expert and sequence: later ones find no place."""

    def __init__(self, room: int = 3) -> None:
        super().__init__()
        self.room = room
        self.enter, self.router = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 16, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 8) / 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        from meshwright.compiler.ir.ops.experts import experts

        x = self.enter(x)
        weight, index = self.router(x).softmax(-1).topk(2)
        taken = F.one_hot(index, EXPERTS).flatten(1, 2)
        place = (taken.cumsum(1) * taken).sum(-1).view(index.shape)
        index = index.masked_fill(place > self.room, EXPERTS)
        rows = [t.flatten(0, 1) for t in (x, index, weight)]
        return F.mse_loss(x + experts(*rows, self.up, self.down, "silu").view(x.shape), y)


def capacity(batch: int):
    """A model and what it maps to what."""
    torch.manual_seed(0)
    x, y = torch.randn(2, batch, 8, HIDDEN, generator=torch.Generator().manual_seed(1)).unbind(0)
    return Capacity(), (x, y), {}


@pytest.mark.parametrize(
    ("name", "labels", "mesh"),
    [
        ("moe", ("dispatch",), (4,)), ("moe", ("token", "dispatch"), (2, 2)),
        (capacity, ("dispatch",), (2,)),
    ],
)  # fmt: skip
def test_a_mixture_whose_tokens_travel_trains_as_one_device_does(ranks, name, labels, mesh):
    _, results = equals_one_device(ranks, name, (), mesh, sent(*labels))
    assert results[0][2]["forward all_to_all"] == results[0][2]["backward all_to_all"] // 2 * 3 > 0


def test_experts_of_an_earlier_transformers():
    """Before 5.20 a module does not say whether it norms behind its experts or splits them."""
    model, args, kwargs = ZOO["mixtral"](4)
    for module in model.modules():
        for name in ("has_gate", "is_concatenated", "has_post_expert_norm", "_is_expert_parallel"):
            vars(module).pop(name, None)
    graph = capture(model.train(), args, kwargs)
    assert [node for node in graph.ops() if node.target is local_ops.experts]
