"""Plan documents with forced parameter sharding and gradient communication, and what a rank does with one."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import meshwright as mw
import torch
from meshwright.compiler.cost.parameter_sharding import shardings_by_pattern
from meshwright.compiler.cost.pricing import partial_axes
from meshwright.compiler.frontend.mixed_precision import in_precision
from meshwright.compiler.ir.spec import P, Pair, R
from meshwright.compiler.plan.plan import GradientReduction, Plan, Stage
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.space import Space
from meshwright.costmodel.cluster import Cluster
from meshwright.runtime.profiling.memory_meter import storages_alive

from tests.support.clusters import fast_links
from tests.support.graphs import graph_of, shared_plan
from tests.support.parity import STEPS, case, make_optimizer, single_device
from tests.support.peak_memory import least_peak
from tests.support.zoo import ZOO


def rewired(document: dict[str, Any], algorithm: str, compressor: str = "none") -> dict[str, Any]:
    """Every sum of gradients goes this way."""

    def wired(stage: Stage) -> Stage:
        axes = {partial_axes(home.compute, stage.mesh_shape) for home in stage.homes.values()} - {()}
        return replace(stage, wire=tuple(GradientReduction(one, algorithm, compressor) for one in sorted(axes)))

    plan = Plan.from_json(document)
    return replace(plan, stages=tuple(map(wired, plan.stages))).to_json()


PATTERNS = ("zero1", "zero2", "zero3")
BATCH = 8


def forced(
    name: str, patterns: tuple[str, ...], strategy: str, m: int, cluster: Cluster | None = None,
    precision: str = "model", schedule: str | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """A plan's document in which every parameter takes the first of ``patterns`` that its shape permits, in turn."""
    graph = in_precision(graph_of(name, BATCH, **options), precision)
    shape = parse_strategy(strategy)
    cluster = cluster or fast_links(shape.num_devices)
    plan = shared_plan(graph, cluster, BATCH, m, shape, schedule, space=Space(loose=True))
    nodes = {node.meta["source"].name: node for node in graph.placeholders("parameter")}
    stages = []
    for stage in plan.stages:
        homes = dict(stage.chunks[0].parameters)
        for index, (key, home) in enumerate(homes.items()):
            kind, trained = nodes[key].meta["type"], nodes[key].meta["source"].requires_grad
            value = home.compute.value  # all that is whole may be a sum of gradients
            pair = Pair(value, tuple(P if p == R else p for p in value)) if trained else home.compute
            found = dict(shardings_by_pattern(kind, pair, stage.mesh_shape, trained))
            homes[key] = found.get(patterns[index % len(patterns)], found["replicated"])
        stages.append(replace(stage, chunks=(replace(stage.chunks[0], parameters=homes),)))
    return replace(plan, stages=tuple(stages)).to_json()


def train(document: dict[str, Any], name: str, kind: str, options: dict[str, Any], clip: float | None = None):
    """One rank: losses, norms, the full state dict (rank 0), collectives by phase and kind."""

    model, args, kwargs = case(name, **options)
    plan = Plan.from_json(document)
    parallel = mw.parallelize(
        model,
        example_inputs=args,
        example_kwargs=kwargs,
        optimizer=make_optimizer(kind),
        plan=plan,
        clip_grad_norm=clip,
    )
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(parallel.train_step(*args, **kwargs)))
        norms.append(float(parallel.grad_norm))
    return losses, norms, parallel.full_state_dict(), *sent(parallel)


def sent(parallel: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Collectives of one step by phase and kind: how many, and their bytes."""
    comm = parallel.session.comm
    found = (comm.counts, comm.bytes) if comm is not None else ({}, {})
    counts, nbytes = ({f"{phase} {kind}": n / STEPS for (phase, kind), n in some.items()} for some in found)
    return counts, nbytes


def agree(results: Any, name: str, kind: str, m: int, options: dict[str, Any]) -> None:
    expected, reference = single_device(name, kind, m, **options)
    for losses, *_ in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    state = results[0][2]
    assert set(state) == set(reference)
    for key, value in reference.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=2e-5, msg=lambda t, k=key: f"{k}: {t}")


def measure(document: dict[str, Any], name: str, options: dict[str, Any]) -> int:

    gc.collect()
    before = sum(storages_alive().values())
    model, args, kwargs = ZOO[name](BATCH, device="meta", **options)
    parallel = mw.parallelize(
        model, plan=Plan.from_json(document), example_inputs=args, example_kwargs=kwargs,
        optimizer=make_optimizer("adamw"), init=lambda name, x: torch.nn.init.normal_(x, std=0.02),
    )  # fmt: skip
    parallel.train_step(*args, **kwargs)
    return least_peak(lambda: parallel.train_step(*args, **kwargs)) - before
