"""``mw.stage`` and ``mw.shard`` in the code of a model: what plans make of them, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.ir.spec import parse_pair
from torch import Tensor, nn

from tests.support.parity import trained_eagerly

WIDTH = 64


class Block(nn.Module):
    """Two linear layers with a residual; ``stage``: that of the second one, if it has its own."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        self.up, self.down, self.stage = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), stage

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        if self.stage is None:
            return x + self.down(hidden)
        with mw.stage(self.stage):
            return x + self.down(hidden)


class Network(nn.Module):
    """Blocks in annotated stages, and what else ``marked`` does to their result."""

    def __init__(self, stages: list[int], marked: Any = lambda x: x, inner: list[int | None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(stage) for stage in inner or [None] * len(stages))
        self.head, self.stages, self.marked = nn.Linear(WIDTH, WIDTH), stages, marked

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block, stage in zip(self.blocks, self.stages):
            with mw.stage(stage):
                x = block(x)
        return nn.functional.mse_loss(self.marked(self.head(x)), y)


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def plan_of(model: nn.Module, **wishes: Any) -> mw.Plan:
    return mw.plan(model, mw.Cluster.preset("p3.16xlarge"), example_inputs=batch(), **wishes)


def layers_of(plan: mw.Plan) -> list[list[str]]:
    return [
        [plan.layers[k] for k in range(stage.chunks[0].layers[0], stage.chunks[-1].layers[1])] for stage in plan.stages
    ]


@pytest.mark.parametrize("stages", [[0, 0, 0, 1], [0, 1, 1, 2], [0, 0, 0, 0]])
def test_stages_are_those_of_the_code(stages: list[int]) -> None:
    plan = plan_of(Network(stages), schedule="1f1b")
    blocks = [[name for name in layers if name.startswith("blocks")] for layers in layers_of(plan)]
    wanted = [[f"blocks.{k}" for k, s in enumerate(stages) if s == stage] for stage in range(max(stages) + 1)]
    assert [sorted({name.partition("#")[0] for name in found}) for found in blocks] == wanted
    assert "head" in layers_of(plan)[-1]
    assert f"stages = {max(stages) + 1}" in plan.provenance["constraints"]


def test_a_stage_may_begin_inside_of_a_module() -> None:
    plan = plan_of(Network([0, 0], inner=[None, 1]), schedule="1f1b")
    weights = [{name for name in stage.homes if name.endswith("weight")} for stage in plan.stages]
    assert weights[0] == {"blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight"}


@pytest.mark.parametrize("precision", ["model", "bf16"])
@pytest.mark.parametrize("dim", [1, -1, 0])
def test_a_tensor_is_cut_where_the_code_says(precision: str, dim: int) -> None:
    model = Network([0, 0], lambda x: mw.shard(x, "tensor", dim=dim))
    plan = plan_of(model, strategy="pp1,tp4" if dim else "pp1,dp4", precision=precision)
    (stage,) = plan.stages
    home = next(home for name, home in stage.homes.items() if name == "head.weight")
    assert (parse_pair(str(home.compute)).value[0].dim == 0) == (dim != 0)  # the columns, or the batch
    assert any(text.startswith("split linear") for text in plan.provenance["constraints"])


def test_the_result_is_that_of_the_model() -> None:
    x, y = batch()
    model = Network([0, 1], lambda x: mw.shard(x, "tensor", dim=1))
    plain = Network([0, 0])
    assert torch.equal(model(x, y), plain(x, y))
    torch.export.export(model, (x, y), strict=False)  # nor is it in anybody else's graph
    assert not any("shard" in str(node.target) for node in torch.export.export(model, (x, y), strict=False).graph.nodes)


def trained(schedule: str) -> list[float]:
    model = Network([0, 0, 1, 1], lambda x: mw.shard(x, "tensor", dim=1))
    parallel = mw.parallelize(
        model, mw.Cluster.local(4), example_inputs=batch(), schedule=schedule,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )  # fmt: skip
    assert len(parallel.plan.stages) == 2
    parts = parallel.plan.global_batch // parallel.data_count
    mine = slice(parallel.data_index * parts, (parallel.data_index + 1) * parts)
    return [float(parallel.mean_loss(parallel.train_step(*(x[mine] for x in batch())))) for _ in range(3)]


@pytest.mark.ranks
def test_an_annotated_model_trains_like_on_one_device(ranks: Any) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    expected, _ = trained_eagerly(Network([0, 0, 1, 1]), batch(), {}, sgd, 3)
    for losses in ranks.run(4, trained, "1f1b"):
        assert losses == pytest.approx(expected, rel=1e-4)


def test_equal_questions_of_other_annotations_have_other_plans() -> None:
    plans = [plan_of(Network(stages)) for stages in ([0, 1, 1, 1], [0, 0, 0, 1])]
    assert plans[0].model == plans[1].model
    assert layers_of(plans[0]) != layers_of(plans[1])


@pytest.mark.parametrize(
    ("model", "wishes", "fault"),
    [
        (lambda: Network([0, 1, 0]), {}, r"got mw\.stage\(0\) after mw\.stage\(1\) at layer blocks\.2"),
        (lambda: Network([0, 2]), {}, r"got mw\.stage\(2\) after mw\.stage\(0\)"),
        (lambda: Network([0, 1], inner=[None, 3]), {}, r"got mw\.stage\(3\) after mw\.stage\(1\)"),
        (lambda: Network([0, 1]), {"constraints": "stages = 3"}, "'stages = 3' and 'stages = 2'"),
        (lambda: Network([0, 1]), {"strategy": "dp8"}, "'stages = 2' and 'strategy pp1,dp8,tp1'"),
        (lambda: Network([0, 0], lambda x: mw.shard(x, "data", dim=0)), {}, "'tensor' parallelism, but got 'data'"),
        (lambda: Network([0, 0], lambda x: mw.shard(x, "tensor", dim=2)), {}, "got dim=2"),
        (lambda: Network([-1, 0]), {}, "a stage is 0, 1, 2, …, but got -1"),
        (
            lambda: Network([0, 0], lambda x: mw.shard(nn.functional.softmax(x, 1), "tensor", dim=1)),
            {},
            r"test_annotations\.py:\d+: no rule of aten\.\S+ \(\S+\) cuts dim 1 .* dim 0",
        ),
    ],
)
def test_what_no_plan_keeps_is_refused(model: Any, wishes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        plan_of(model(), **wishes)


class Inputs(nn.Module):
    """Cuts its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.a(mw.shard(x, "tensor", dim=1)), y)


def test_an_input_is_not_cut() -> None:
    with pytest.raises(
        ValueError, match=r"test_annotations\.py:\d+: mw\.shard cuts the result of an op, but got args_0"
    ):
        plan_of(Inputs())
