"""Bad input: exactly one clear error on every rank, nothing half-written, and the ranks can go on together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.compiler.errors import CaptureError, InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.plan.plan import PLAN_VERSION
from meshwright.compiler.plan.validation import validate
from meshwright.costmodel.memory import FRAMEWORK_BYTES
from meshwright.runtime.errors import NonFiniteLoss
from torch import Tensor, nn

from tests.support import zoo
from tests.support.small_net import BATCHES, FEATURES, Net, batch, net, sgd, still


class Branches(nn.Module):
    """Cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.net(x, y)
        return self.net(-x, y)


class Explodes(nn.Module):
    """The loss is NaN where the input is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(norm=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x, y)


def bind(model: nn.Module | None = None, **options: Any) -> mw.Parallel:
    options = {"example_inputs": BATCHES[0], "optimizer": sgd, "strategy": "dp2", "microbatches": 2, **options}
    return mw.parallelize(net() if model is None else model, **options)


def saved(
    path: str, change: Callable[[dict[str, Any]], None] | None = None, model: nn.Module | None = None, devices: int = 2
) -> mw.Plan:
    """A plan of two devices, after ``change`` of its document."""
    made = mw.plan(
        model or net(),
        f"local:{devices}",
        example_inputs=BATCHES[0],
        strategy={"dp": devices},
        microbatches=2,
        executable=True,
    )
    data = json.loads(json.dumps(made.to_json()))
    if change is not None:
        change(data)
    Path(path).write_text(json.dumps(data))
    return mw.Plan.load(path)


def small_cluster(devices: int, kib: float) -> mw.Cluster:
    """This machine with ``kib`` KiB per rank for the model."""
    cluster = mw.Cluster.local(devices)
    host = cluster.hosts[0]
    device = replace(host.device, memory_bytes=FRAMEWORK_BYTES[host.device.kind] + int(kib * 1024))
    return replace(cluster, hosts=(replace(host, device=device),))


def mine(good: Any, bad: Any) -> Any:
    """``bad`` on rank 1 only."""
    return bad if dist.get_rank() == 1 else good


def lacking_init(name: str, x: Tensor) -> Tensor:
    return x if dist.get_rank() == 0 else torch.zeros(1)


def one_sided(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if dist.get_rank() == 1:
        raise ValueError("no such optimizer here")
    return sgd(parameters)


X, Y = BATCHES[0]

# case: what is tried, the words of its one error
CASES: dict[str, tuple[Callable[[str], Any], str]] = {
    "batch and microbatches": (
        lambda _: bind(microbatches=3),
        r"must divide into the microbatches, but got global_batch 8 and 3",
    ),
    "microbatch and dp": (lambda _: bind(microbatches=8), r"dp cuts every microbatch evenly"),
    "fits nowhere": (lambda _: bind(mesh=small_cluster(2, 20)), r"missing"),
    "mesh size": (lambda _: bind(mesh=mw.Cluster.local(3)), r"3 devices and 2 ranks; start 3 ranks"),
    "strategy size": (lambda _: bind(strategy="dp4"), r"needs 4 devices, but the cluster has 2"),
    "strategy text": (lambda _: bind(strategy="pp2xtp2"), r"as in 'pp2,tp2', but got 'pp2xtp2'"),
    "stages": (
        lambda _: bind(
            strategy="pp2", model=nn.Sequential(nn.Linear(16, 16)), loss_fn=lambda out: out.mean(), example_inputs=(X,)
        ),
        "1 layers",
    ),
    "other ranks": (
        lambda path: bind(strategy=None, microbatches=None, plan=saved(path, devices=4)),
        r"a plan for 4 and 2 ranks",
    ),
    "other model": (
        lambda path: bind(strategy=None, microbatches=None, plan=saved(path, model=net(norm=False))),
        r"another model.*only in the model: .*batch_norm",
    ),
    "other cluster": (
        lambda path: bind(strategy=None, microbatches=None, plan=saved(path), mesh=small_cluster(2, 1000)),
        r"another cluster.*GiB",
    ),
    "plan and strategy": (lambda path: bind(plan=saved(path)), r"a given plan has decided everything"),
    "plan and batch": (
        lambda path: bind(strategy=None, plan=saved(path), global_batch=16),
        r"global batch of 8, but got global_batch=16",
    ),
    "capture": (lambda _: bind(Branches()), r"test_bad_input.py:\d+: `if x.sum\(\) > 0:`.*torch.where"),
    "capture on one rank": (lambda _: bind(mine(net(), Branches())), r"torch.where"),
    "another model on one rank": (lambda _: bind(mine(net(), net(norm=False))), r"same model"),
    "no loss": (lambda _: bind(example_inputs=(X,)), r"training needs a 0-d floating-point loss, but got .*\[.*16\]"),
    "targets without loss_fn": (lambda _: bind(example_inputs=(X,), targets=(Y,)), r"no loss_fn"),
    "batch_dims": (lambda _: bind(batch_dims={"args.7": 0}), r"the inputs are args.0, args.1"),
    "data": (lambda _: bind(data="sharded"), r"'global' or 'local', but got 'sharded'"),
    "local without batch": (
        lambda _: bind(data="local", example_inputs=None).train_step(X[:4], Y[:4]),
        r"neither global_batch nor example_inputs",
    ),
    "local, unequal": (
        lambda _: bind(data="local", strategy="tp2").train_step(X + dist.get_rank(), Y),
        r"share a data_index must pass equal data.*ranks 0 and 1",
    ),
    "global, unequal": (
        lambda _: bind().train_step(X + dist.get_rank(), Y),
        r"every rank passes the whole batch, but got different data",
    ),
    "batch of a step": (lambda _: bind().train_step(X[:6], Y[:6]), r"must be 8 .*but got 6"),
    "shape": (lambda _: bind().train_step(X[:, :4], Y), r"shape \[8, 16\], but got \[8, 4\]"),
    "dtype": (lambda _: bind().train_step(X.double(), Y), r"float32, but got torch.float64"),
    "dtype on one rank": (lambda _: bind().train_step(mine(X, X.double()), Y), r"float32, but got torch.float64"),
    "missing input": (lambda _: bind().train_step(X), r"inputs args.0, args.1, but got args.0"),
    "no optimizer": (lambda _: bind(optimizer=None).train_step(X, Y), r"got none; pass optimizer="),
    "whole-model optimizer": (lambda _: bind(optimizer=torch.optim.LBFGS), r"LBFGS, which needs all of them"),
    "sparse optimizer": (
        lambda _: bind(optimizer=lambda ps: torch.optim.SparseAdam(list(ps))),
        r"got SparseAdam.*Adagrad",
    ),
    "whole-tensor optimizer": (
        lambda _: bind(optimizer=torch.optim.Adafactor, strategy="tp2"),
        r"Adafactor needs whole parameters",
    ),
    "optimizer": (lambda _: bind(optimizer=lambda ps: "sgd"), r"but got str"),
    "optimizer on one rank": (lambda _: bind(optimizer=one_sided), r"no such optimizer here"),
    "meta": (lambda _: bind(net().to("meta")), r"init="),
    "init": (
        lambda _: bind(net().to("meta"), init=lambda name, x: torch.zeros(1)),
        r"init must give 'up.weight' the shape",
    ),
    "init on one rank": (
        lambda _: bind(net().to("meta"), init=lacking_init, strategy="pp2"),
        r"init must give .* the shape",
    ),
    "state of another model": (
        lambda _: bind(state_dict={**net().state_dict(), "head.bias": X}),
        r"'head.bias' besides",
    ),
    "state that lacks": (
        lambda _: bind(state_dict={"up.weight": net().up.weight}),
        r"got none on rank 0 for .*up.bias",
    ),
    "output before a plan": (lambda _: bind(example_inputs=None)(X), r"no plan yet"),
    "checkpoint of another model": (
        lambda path: (
            bind(net(norm=False)).save_checkpoint(Path(path).parent / "other"),
            bind().load_checkpoint(Path(path).parent / "other"),
        ),
        r"other/step-00000000: has no 'norm.*another model",
    ),
    "checkpoint nowhere": (
        lambda path: bind().save_checkpoint("/proc/nowhere/checkpoint"),
        r"/proc/nowhere/checkpoint/step-00000000: cannot be written",
    ),
    "checkpoint": (lambda path: bind().load_checkpoint(path + "-nowhere"), r"-nowhere: holds no checkpoint"),
}


def attempt(case: str, path: str) -> tuple[str, str, bool, bool]:
    """The error of one case: class, text, whether it is a ValueError, and whether the ranks can train together
    afterwards."""
    try:
        CASES[case][0](f"{path}-{dist.get_rank()}")
    except Exception as error:
        caught = type(error).__name__, str(error), isinstance(error, ValueError)
    else:
        raise AssertionError("nothing was raised")
    parallel = bind()
    return (*caught, bool(torch.isfinite(parallel.train_step(X, Y))))


@pytest.mark.ranks
@pytest.mark.parametrize("case", list(CASES))
def test_one_clear_error_on_every_rank(ranks: Any, tmp_path: Path, case: str) -> None:
    results = ranks.run(2, attempt, case, str(tmp_path / "plan.json"))
    for kind, text, is_value_error, works in results:
        assert is_value_error, f"{kind}: {text}"
        assert re.search(CASES[case][1], text, re.DOTALL), text
        assert works
        assert len(text) < 1200
    if case == "fits nowhere":
        assert {kind for kind, *_ in results} == {"InfeasibleError"}


# ---- planning alone


@pytest.mark.parametrize("model", [net(), zoo.gpt(8)[0]], ids=["net", "gpt"])
def test_infeasible_names_the_stage_the_bytes_and_a_remedy(model: nn.Module) -> None:
    inputs = BATCHES[0] if isinstance(model, Net) else zoo.gpt(8)[1]
    fits = mw.plan(model, "local:2", example_inputs=inputs, strategy="pp2", microbatches=2)
    needed = max(stage.peak_bytes for stage in fits.prediction.stages) - FRAMEWORK_BYTES["cpu"]
    with pytest.raises(InfeasibleError) as caught:
        mw.plan(model, small_cluster(2, needed / 1024 / 20), example_inputs=inputs)
    text = str(caught.value)
    assert "stage" in text
    assert "missing" in text
    assert "would fit" in text
    assert "use more devices" in text
    assert "up.weight alone takes" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch": 8, "microbatches": 3}, "use 2, for instance|use 4, for instance"),
        ({"global_batch": 0 - 8}, "positive"),
        ({"microbatches": 0}, "microbatches"),
        ({"schedule": "zigzag"}, "1f1b"),
        ({"strategy": {"dp": 2, "ep": 2}}, "pp, dp and tp"),
        (
            {"schedule": "zb-x"},
            "auto or one of gpipe, 1f1b, eager-1f1b, interleaved, zb-h1, zb-v, pipedream, but got .zb-x.",
        ),
        ({"schedule": "zb-x", "executable": True}, "zb-h1, zb-v, pipedream where plans are to be executable"),
        ({"recompute": "half", "executable": True}, "recompute is auto or one of none, selective, full where"),
        ({"recompute": {"nothing": "full"}}, "names a layer of the model, but got 'nothing'"),
        ({"zero": 4}, "zero is auto or one of 0, 1, 2, 3, but got '4'"),
        ({"time_limit_s": 0}, "positive number of seconds"),
        ({"top_k": 0}, "1 or more, but got 0"),
        ({"constraints": "be quick"}, "a constraint reads like"),
        ({"strategy": "tp3"}, "needs 3 devices"),
        ({"cluster": "p9.huge:2"}, "p3.16xlarge"),
        ({"example_inputs": ()}, "x"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_of_plan(options: dict[str, Any], words: str) -> None:
    arguments = {"cluster": "local:2", "example_inputs": BATCHES[0], **options}
    with pytest.raises(ValueError, match=words):
        mw.plan(net(), **arguments)


# ---- plan files


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved(str(path))
    text = path.read_text()
    bad = {
        "breaks off or is corrupt": text[: len(text) // 2],
        "version 99": text.replace(f'"version": {PLAN_VERSION}', '"version": 99', 1),
        "lacks 'transfers'": json.dumps({k: v for k, v in json.loads(text).items() if k != "transfers"}),
        "a JSON object with a 'version'": "[1, 2]",
        "does not follow the format": json.dumps({**json.loads(text), "stages": [{"devices": [0]}]}),
    }
    for words, content in bad.items():
        path.write_text(content)
        with pytest.raises(ValueError, match=words) as caught:
            mw.Plan.load(path)
        assert str(path) in str(caught.value)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        mw.Plan.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        mw.Plan.load(tmp_path / "none.json")


def test_saving_is_whole_or_not_at_all(tmp_path: Path) -> None:
    plan = saved(str(tmp_path / "plan.json"))
    before = (tmp_path / "plan.json").read_text()
    broken = replace(plan, provenance={"a": object()})
    with pytest.raises(TypeError):
        broken.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == before
    with pytest.raises(OSError, match="nowhere"):
        plan.save(tmp_path / "nowhere" / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def _labels(data: dict[str, Any], labels: str) -> None:
    ops = data["stages"][0]["chunks"][0]["ops"]
    ops[next(name for name in ops if name.startswith("linear"))] = labels


def _drop(data: dict[str, Any], table: str) -> None:
    entries = data["stages"][0]["chunks"][0][table]
    del entries[next(iter(entries))]


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "microbatches": (lambda d: d.update(microbatches=3), "not divisible"),
    "devices": (lambda d: d["stages"][0].update(devices=[0, 0]), "device 0 is in stages"),
    "mesh": (lambda d: d["stages"][0].update(mesh_shape=[3]), "is not 2 devices"),
    "outside": (lambda d: d["stages"][0].update(devices=[1, 2]), "device 2 is not in the cluster"),
    "axes": (lambda d: _labels(d, "i,i"), "labels for 2 axes"),
    "label": (lambda d: _labels(d, "zebra"), "zebra"),
    "op": (lambda d: _drop(d, "ops"), "is in no stage"),
    "parameter": (lambda d: _drop(d, "parameters"), "is in no stage"),
    "transfer": (lambda d: d["transfers"].append({"node": "gelu", "source": 0, "target": 1}), "from stage 0 to 1"),
}


def _move(data: dict[str, Any]) -> None:
    first, second = (stage["chunks"][0]["ops"] for stage in data["stages"])
    name = list(first)[-1]
    second[name] = first.pop(name)


PIPELINE_EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "op on another stage": (_move, "neither makes nor receives|does not make"),
    "transfer": (lambda d: d["transfers"].clear(), "no transfer brings it"),
    "receive": (lambda d: d["stages"][1]["chunks"][0]["receives"].clear(), "does not receive"),
    "send": (lambda d: d["stages"][0]["chunks"][0]["sends"].clear(), "does not send"),
    "parameter": (
        lambda d: (
            d["stages"][0]["chunks"][0]["parameters"].update(d["stages"][1]["chunks"][0].pop("parameters"))
            or d["stages"][1]["chunks"][0].update(parameters={})
        ),
        "which the stage does not hold",
    ),
    "reversed": (lambda d: d["transfers"][0].update(source=1, target=0), "from stage 1 to 0"),
}


@pytest.mark.parametrize("edit", list(PIPELINE_EDITS))
def test_check_finds_bad_edits_of_pipelines(edit: str) -> None:
    made = mw.plan(
        net(), "p3.16xlarge", example_inputs=BATCHES[0], strategy="pp2", microbatches=2, executable=True
    ).to_json()
    graph = capture(net(), BATCHES[0])
    assert validate(mw.Plan.from_json(made), graph) == []
    data = json.loads(json.dumps(made))
    PIPELINE_EDITS[edit][0](data)
    faults = validate(mw.Plan.from_json(data), graph)
    assert any(re.search(PIPELINE_EDITS[edit][1], fault) for fault in faults), faults


@pytest.mark.parametrize("edit", list(EDITS))
def test_check_finds_bad_edits(tmp_path: Path, edit: str) -> None:
    plan = saved(str(tmp_path / "plan.json"), EDITS[edit][0])
    faults = validate(plan, capture(net(), BATCHES[0]))
    assert any(re.search(EDITS[edit][1], fault) for fault in faults), faults


def edited(path: str) -> str:
    with pytest.raises(ValueError, match=r"does not hold|another model") as caught:
        bind(strategy=None, microbatches=None, plan=mw.Plan.load(path))
    return str(caught.value)


@pytest.mark.ranks
def test_ranks_refuse_bad_edits(ranks: Any, tmp_path: Path) -> None:
    saved(str(tmp_path / "plan.json"), EDITS["label"][0])
    first, second = ranks.run(2, edited, str(tmp_path / "plan.json"))
    assert first == second
    assert "zebra" in first


# ---- NaN


def not_a_number(strategy: str) -> tuple[str, int, int, list[bool]]:
    parallel = bind(Explodes(), strategy=strategy, optimizer=still)
    before = parallel.full_state_dict()
    good = float(parallel.train_step(X, Y))
    bad = X.clone()
    bad[6, 0] = float("nan")
    with pytest.raises(NonFiniteLoss) as caught:
        parallel.train_step(bad, Y)
    after = parallel.full_state_dict()
    assert float(parallel.train_step(X, Y)) == pytest.approx(good, rel=1e-5)  # the bad gradients are gone
    return str(caught.value), caught.value.rank, caught.value.step, [torch.equal(before[n], after[n]) for n in before]


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "rank"), [("dp2", 0), ("pp2", 1)])
def test_a_loss_that_is_not_finite_names_rank_and_step(ranks: Any, strategy: str, rank: int) -> None:
    results = ranks.run(2, not_a_number, strategy)
    assert {result[:3] for result in results} == {(results[0][0], rank, 1)}
    assert f"on rank {rank}" in results[0][0]
    assert "step 1" in results[0][0]
    assert all(results[0][3])


def test_capture_errors_are_value_errors() -> None:
    assert issubclass(CaptureError, ValueError)
    assert issubclass(InfeasibleError, ValueError)
    assert issubclass(NonFiniteLoss, ValueError)
    assert batch(0)[0].shape[1] == FEATURES
