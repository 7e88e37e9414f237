"""Every kind of file that meshwright reads: good ones, and how users come to read them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshwright as mw
import numpy as np
import torch
from meshwright.cli.commands import main
from meshwright.compiler.intra_op.vectorised.row_cache import RowCache
from meshwright.compiler.pipeline.measured import MeasuredStep
from meshwright.compiler.search import plan_cache
from meshwright.compiler.search.request import PlanRequest
from meshwright.costmodel.profiler import ProfileState, TaskRecord
from torch import nn

from tests.support.document_mutants import Network

__all__ = ["Reader", "readers"]


@dataclass(frozen=True)
class Reader:
    """One kind of file.

    good: files of it; write: put one where it is read, under the number of its case; read: read it, "read" or "refused"
    or what readers raise; seal: put the checksum of a changed document right.
    """

    good: Sequence[bytes]
    write: Callable[[bytes, int], Path]
    read: Callable[[Path, int], str]
    seal: Callable[[Any], Any] | None = None


def command(*arguments: object) -> str:
    """Run a command here. AssertionError for a status that no bad file may have, or an error of several lines."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        status = main([str(argument) for argument in arguments])
    errors = [line for line in said.getvalue().splitlines() if line.startswith("meshwright: ")]
    assert status in (0, 2, 3), f"{arguments[0]}: status {status}, {said.getvalue()[-300:]!r}"
    assert len(errors) == (status != 0), f"{arguments[0]}: {said.getvalue()[-300:]!r}"
    assert "Traceback" not in said.getvalue(), said.getvalue()[-300:]
    return "refused" if status else "read"


def readers(folder: Path) -> dict[str, Reader]:
    """All kinds, with good files made in ``folder``."""
    good_plan, good_cluster, page = folder / "good.json", folder / "cluster.json", folder / "page.html"
    cluster = mw.Cluster.local(4)
    cluster.save(good_cluster)
    with torch.device("meta"):
        network, x = Network(), torch.zeros(32, 64)
    plans = [
        mw.plan(network, cluster, example_inputs=(x, x), executable=True, **asked)
        for asked in ({"strategy": "pp2,tp2", "microbatches": 4}, {"strategy": "dp4", "zero": 1, "microbatches": 2})
    ]
    plans[0].save(good_plan)

    def into(name: str) -> Callable[[bytes, int], Path]:
        def write(data: bytes, number: int) -> Path:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
            return folder / name

        return write

    def read_plan(path: Path, number: int) -> str:
        return command(*(
            ("check", path), ("show", path), ("show", path, "--json"), ("diff", path, good_plan),
            ("diff", good_plan, path), ("simulate", path, "--set", "microbatches=2"),
            ("simulate", path, "--set", "network=4x"), ("export", path, "--torch"), ("show", path, "--html", page),
            ("show", path, "--trace", page), ("show", good_plan, "--html", page, "--with", path),
            ("why", path, "a.weight"),
        )[number % 12])  # fmt: skip

    def read_cluster(path: Path, number: int) -> str:
        return command(*(
            ("diff", path, good_cluster), ("diff", good_plan, "--cluster", path),
            ("check", good_plan, "--cluster", path), ("simulate", good_plan, "--cluster", path),
            ("plan", "gpt-demo", "--cluster", path, "--strategy", "dp1"),
        )[number % 5])  # fmt: skip

    run = folder / "run"
    run.mkdir()
    parallel = _trained(run)

    def read_run(path: Path, number: int) -> str:
        return command(*(
            ("report", run), ("report", run, "--json"), ("report", run, "--html", page), ("diff", run, run),
        )[number % 4])  # fmt: skip

    (folder / "report").mkdir()
    shutil.copy(run / "metrics.jsonl", folder / "report" / "metrics.jsonl")

    def read_report(path: Path, number: int) -> str:
        return command(
            *(("report", path.parent), ("diff", path, run / "report.json"), ("diff", path.parent, run))[number % 3]
        )

    trace = folder / "trace.json"
    parallel.trace(trace)

    def read_trace(path: Path, number: int) -> str:
        if number % 4 == 0:
            return command("show", run / "plan.json", "--html", page, "--measured", path)
        MeasuredStep.load(path)
        return "read"

    state = ProfileState("a machine", {"matmul 64": TaskRecord([[1e-3, 2e-3], [1e-3]], 3)}, {"matmul 128": "too large"})

    def read_state(path: Path, number: int) -> str:
        ProfileState.load(path)
        return "read"

    return {
        "plan": Reader([json.dumps(plan.to_json()).encode() for plan in plans], into("plan.json"), read_plan),
        "cluster": Reader(
            [good_cluster.read_bytes(), mw.Cluster.preset("dgx-h100:2").to_json().encode()],
            into("a_cluster.json"),
            read_cluster,
        ),
        "interrupted profile": Reader([state.to_json().encode()], into("state.json"), read_state),
        "measured step": Reader([trace.read_bytes()], into("a_trace.json"), read_trace),
        "log of a run": Reader([(run / "metrics.jsonl").read_bytes()], into("run/metrics.jsonl"), read_run),
        "report of a run": Reader([(run / "report.json").read_bytes()], into("report/report.json"), read_report),
        "cached plans": _cached_plans(folder / "cache", network, x, plans[0], cluster),
        "cached rows": _cached_rows(folder / "rows"),
        **_checkpoints(folder, parallel),
    }


def _trained(run: Path) -> mw.Parallel:
    """A few steps on one device, with a log and a report in ``run``."""
    torch.manual_seed(0)
    batch = torch.randn(8, 64), torch.randn(8, 64)
    parallel = mw.parallelize(
        Network(), mw.Cluster.local(1), example_inputs=batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )  # fmt: skip
    logger = mw.MetricsLogger(parallel, run, every=1, to=("jsonl",))
    for _ in range(4):
        logger.on_step(parallel.train_step(*batch))
    logger.report()
    logger.close()
    parallel.plan.save(run / "plan.json")
    return parallel


def _cached_plans(cache: Path, network: nn.Module, x: torch.Tensor, plan: mw.Plan, cluster: mw.Cluster) -> Reader:
    """A damaged cache is as good as none."""
    plan_cache.cache_directory = lambda: cache  # type: ignore[assignment]
    assert plan.graph is not None
    graph, request = plan.graph, PlanRequest(global_batch=32)
    place = cache / "plans" / f"{plan_cache.request_key(graph, cluster, request)}.json"

    def write(data: bytes, number: int) -> Path:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        return place

    def read(path: Path, number: int) -> str:
        return "read" if plan_cache.cached_plans(graph, cluster, request, lambda _: [], 0.0) else "refused"

    return Reader([json.dumps([plan.to_json()]).encode()], write, read)


def _cached_rows(folder: Path) -> Reader:
    keys = [bytes([k]) * 16 for k in range(8)]
    values = np.arange(24.0).reshape(3, 8)
    folder.mkdir()
    with RowCache(folder, "family").keeping() as cache:
        cache.recall(keys, (3,), lambda missing: values[:, missing])
    (pack,) = folder.glob("*.npz")

    def write(data: bytes, number: int) -> Path:
        pack.write_bytes(data)
        return pack

    def read(path: Path, number: int) -> str:
        made: list[int] = []

        def make(missing: list[int]) -> np.ndarray:
            made.extend(missing)
            return values[:, missing]

        found = RowCache(folder, "family").recall(keys, (3,), make)
        assert found.shape == (3, 8)
        return "refused" if made else "read"

    bomb = io.BytesIO()
    np.savez_compressed(bomb, keys0=np.zeros((2**14, 16), np.uint8), values0=np.zeros((2**10, 2**14)))
    return Reader([pack.read_bytes(), bomb.getvalue()], write, read)


def _checkpoints(folder: Path, parallel: mw.Parallel) -> dict[str, Reader]:
    saved = folder / "checkpoint"
    state = {"place": 3, "order": (1, 2), "noise": torch.ones(3), "table": {1: [2.5, None]}}
    parallel.save_checkpoint(saved, extra={"data": state})
    parallel.wait_for_checkpoint()
    (step,) = saved.glob("step-*")
    good = {name: (step / name).read_bytes() for name in ("manifest.json", "rank-0.safetensors")}

    def at(name: str) -> Callable[[bytes, int], Path]:
        def write(data: bytes, number: int) -> Path:
            for other, content in good.items():
                (step / other).write_bytes(data if other == name else content)
            return step

        return write

    def read(path: Path, number: int) -> str:
        parallel.load_checkpoint(path, extra={"data": None})
        return "read"

    def seal(document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        document.pop("crc32", None)
        return {**document, "crc32": zlib.crc32(json.dumps(document).encode())}

    exported = folder / "exported"
    mw.export_safetensors(step, exported, max_file_bytes=70_000)
    names = sorted(path.name for path in exported.iterdir())
    whole = {name: (exported / name).read_bytes() for name in names}
    index = next(name for name in names if name.endswith(".json"))

    def beside(name: str) -> Callable[[bytes, int], Path]:
        def write(data: bytes, number: int) -> Path:
            for other, content in whole.items():
                (exported / other).write_bytes(data if other == name else content)
            return exported

        return write

    def read_weights(path: Path, number: int) -> str:
        for tensor in mw.open_safetensors(path).values():
            tensor.double().sum()
        return "read"

    return {
        "manifest of a checkpoint": Reader([good["manifest.json"]], at("manifest.json"), read, seal),
        "part of a checkpoint": Reader([good["rank-0.safetensors"]], at("rank-0.safetensors"), read),
        "index of safetensors": Reader([whole[index]], beside(index), read_weights),
        "safetensors": Reader([whole[names[0]]], beside(names[0]), read_weights),
    }
