"""``export --torch``: what it writes trains on local ranks, with PyTorch's libraries alone, like one device."""

from __future__ import annotations

import ast
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.cli import main
from meshwright.compiler.report.torch_script import torch_script
from torch import Tensor, nn

BATCH, STEPS, WIDTH = 8, 3, 16
pytestmark = pytest.mark.ranks


class Block(nn.Module):
    """Attention with a residual, then two linear layers with one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q = self.query(self.norm(x)).view(b, t, -1, d // 4).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2)
        x = x + self.out(mixed.reshape(b, t, -1))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Network(nn.Module):
    """Blocks between two linear layers; what is None or left out is skipped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed: nn.Module | None = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head: nn.Module | None = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 4, 8, generator=generator), torch.randn(BATCH, 4, 8, generator=generator)


def plan_of(**wishes: Any) -> mw.Plan:
    x, y = batch()
    return mw.plan(
        Network(), "p3.16xlarge:1", example_inputs=(x,), targets=(y,), loss_fn=nn.functional.mse_loss,
        sequence=False, **wishes,
    )  # fmt: skip


def one_device() -> list[float]:
    model, (x, y), losses = Network(), batch(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(path: str) -> list[float]:
    """The mean losses of the batch, as this rank knows them: 0 where it is not on the last stage."""
    script = runpy.run_path(path)
    mesh, (x, y) = script["device_mesh"]("cpu"), batch()
    sizes = script["MESH"]
    parts, mine = sizes.get("data", 1), mesh.get_local_rank("data") if "data" in sizes else 0
    x, y = x.chunk(parts)[mine], y.chunk(parts)[mine]
    stage, pipeline = script["stage_of"](mesh), "pipeline" in sizes
    models = [
        script["parallelize"](script["part_of"](Network(), stage, chunk) if pipeline else Network(), mesh, chunk)
        for chunk in range(len(script["STAGES"][0]))
    ]
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], 1e-2)
    last = max(place for row in script["STAGES"] for place, _ in row)
    holds = {place for place, _ in script["STAGES"][stage]}
    schedule = script["schedule_of"](models, mesh, torch.device("cpu"), nn.functional.mse_loss) if pipeline else None
    losses = []
    for _ in range(STEPS):
        some: list[Tensor] = []
        if schedule is None:
            some = [nn.functional.mse_loss(models[0](x), y)]
            some[0].backward()
        else:
            schedule.step(*((x,) if 0 in holds else ()), **({"target": y, "losses": some} if last in holds else {}))
        optimizer.step()
        optimizer.zero_grad()
        known = torch.tensor([float(sum(map(float, some)) / max(len(some), 1)), float(bool(some))])
        dist.all_reduce(known)
        losses.append(float(known[0] / known[1]))
    return losses


CUT = "stage boundary at blocks.2"
CASES = {
    "dp2": (2, {"strategy": "dp2", "zero": 3, "microbatches": 1}),
    "tp2": (2, {"strategy": "tp2", "microbatches": 1}),
    "dp2,tp2": (4, {"strategy": "dp2,tp2", "microbatches": 1, "recompute": "full"}),
    "pp2": (2, {"strategy": "pp2", "microbatches": 4, "schedule": "1f1b"}),
    "pp2,dp2": (4, {"strategy": "pp2,dp2", "microbatches": 2, "schedule": "gpipe"}),
    "pp2,tp2": (4, {"strategy": "pp2,tp2", "microbatches": 2, "schedule": "1f1b", "constraints": CUT}),
    "zb-v": (2, {"strategy": "pp2", "microbatches": 4, "schedule": "zb-v"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_script_trains_like_one_device(ranks: Any, tmp_path: Path, case: str) -> None:
    number, wishes = CASES[case]
    plan = plan_of(**wishes)
    plan.save(tmp_path / "plan.json")
    assert main(["export", "--torch", str(tmp_path / "plan.json"), "-o", str(tmp_path / "script.py")]) == 0
    assert "meshwright" not in (tmp_path / "script.py").read_text().split('"""')[2]
    for losses in ranks.run(number, trained, str(tmp_path / "script.py")):
        assert losses == pytest.approx(one_device(), rel=1e-4)


def test_what_differs_is_said_at_the_head() -> None:
    text = torch_script(
        plan_of(strategy="pp2,dp2", microbatches=4, schedule="zb-h1", precision="bf16", recompute="selective")
    )
    head = " ".join(text.split('"""')[1].split())
    for words in (
        "zb-h1 runs as 1F1B",
        "bf16 is fully_shard",
        "selective recomputation is left out",
        "4 of 8 devices are idle",
    ):
        assert words in head
    assert "PRECISION = torch.bfloat16" in text
    assert max(map(len, text.split('"""')[1].splitlines())) <= 110
    inside = torch_script(
        plan_of(strategy="pp2", microbatches=4, constraints="stage boundary at blocks.2#2", schedule="1f1b")
    )
    assert "a stage ends inside of blocks.2: " in inside


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (
            {"strategy": "pp2", "microbatches": 4, "schedule": "pipedream"},
            "schedule pipedream, which PyTorch does not have",
        ),
        ({"strategy": "4:dp1 + 4:dp2", "microbatches": 4}, "all stages have one mesh"),
        ({"strategy": "pp2", "microbatches": 4, "communication": {"activations": "bf16"}}, "compressed activations"),
    ],
)
def test_what_would_compute_something_else_is_refused(wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        torch_script(plan_of(**wishes))


class Tied(nn.Module):
    """The first weight again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(3):
            x = torch.tanh(self.middle(x))
        return nn.functional.linear(x, self.first.weight)


def test_a_tied_weight_on_two_stages_is_refused() -> None:
    x, y = batch()
    plan = mw.plan(
        Tied(), "p3.16xlarge:1", example_inputs=(x,), targets=(y,), loss_fn=nn.functional.mse_loss, strategy="pp2",
        microbatches=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="on several stages, whose copies nobody keeps equal"):
        torch_script(plan)


def test_no_name_in_a_plan_becomes_code() -> None:
    """A plan file is data; its names stand in a docstring of the module."""
    ended = '"""\nimport os\nos.abort()\n"""'
    plan = plan_of(strategy="pp2")
    for name in (ended, ended.replace('"', "'"), "x\\", 'x"', '\\"""\nraise SystemExit'):
        body = ast.parse(torch_script(replace(plan, model=name))).body
        assert isinstance(body[0], ast.Expr)
        assert not any(isinstance(node, ast.Expr | ast.Raise) for node in body[1:])
        modules = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
        assert modules == ["torch", "torch.distributed"]
