"""Who is free to do more is never slower: the freer question against stricter ones, on small models and clusters.

``benchmarks/monotone.py`` asks hundreds of pairs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search.driver import make_plans
from meshwright.compiler.search.request import PlanRequest
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.memory import FRAMEWORK_BYTES, usable_bytes
from meshwright.models import GPT, TransformerMoE

from tests.support.random_instances import with_memory

BATCH = 64
WORSE = 5e-3  # of a step, by which the freer plan may be slower
MODELS = {
    "gpt": lambda: GPT(vocab=2048, layers=4, hidden=512, heads=8, sequence=64, tied=False),
    "tied gpt": lambda: GPT(vocab=8192, layers=4, hidden=512, heads=8, sequence=64),
    "small tied gpt": lambda: GPT(vocab=2048, layers=1, hidden=512, heads=8, sequence=64),
    "wide gpt": lambda: GPT(vocab=2048, layers=4, hidden=2048, heads=16, sequence=256),
    "moe": lambda: TransformerMoE(2048, 4, 256, 4, 4, 64, feed_forward=1024),
}
PAIRS = [
    ("gpt", "p3.16xlarge/4", {"microbatches": 4}),
    ("gpt", "p3.16xlarge/4", {"strategy": "pp2,tp2"}),
    ("gpt", "p3.16xlarge/8 with 90 MiB", {"recompute": "none"}),
    ("gpt", "p3.16xlarge/8 with 90 MiB", {"zero": 1}),
    ("gpt", "p3.16xlarge/8 with 90 MiB", {"schedule": "1f1b"}),
    ("gpt", "p3.16xlarge/8 with 90 MiB", {"strategy": "dp8"}),
    ("gpt", "p3.16xlarge+dgx-a100-80", {"schedule": "interleaved"}),
    ("gpt", "p3.16xlarge+dgx-a100-80", {"cluster": "dgx-a100-80"}),
    ("tied gpt", "8x4090:2", {"constraints": "stages = 1"}),
    ("tied gpt", "8x4090:2", {"constraints": "stages = 4; no tensor parallel"}),
    ("tied gpt", "8x4090:2", {"strategy": "pp4,dp4", "schedule": "zb-v"}),
    ("tied gpt", "8x4090:2", {"strategy": "dp16"}),
    ("tied gpt", "8x4090:2", {"schedule": "1f1b"}),
    ("tied gpt", "8x4090:2", {"schedule": "interleaved"}),
    ("tied gpt", "8x4090:2", {"cluster": "8x4090"}),
    ("small tied gpt", "p3.16xlarge/3", {"zero": 0}),
    ("small tied gpt", "p3.16xlarge/3", {"schedule": "gpipe"}),
    ("small tied gpt", "p3.16xlarge/3", {"constraints": "stages = 3"}),
    ("small tied gpt", "p3.16xlarge/3", {"cluster": "p3.16xlarge/2"}),
    ("moe", "p3.16xlarge/3", {"regular": "only"}),
    ("moe", "p3.16xlarge/3", {"regular": "any"}),  # faster, but by less than an irregular plan has to gain
    ("moe", "p3.16xlarge/6", {"sequence": False}),
    ("moe", "p3.16xlarge/6", {"schedule": "zb-h1", "microbatches": 8}),
    ("moe", "p3.16xlarge/6", {"cluster": "p3.16xlarge/3"}),
]


@lru_cache
def graph_of(model: str) -> Graph:
    with torch.device("meta"):
        tokens = torch.zeros(BATCH, 256 if model == "wide gpt" else 64, dtype=torch.int64)
        return capture(MODELS[model](), (tokens, tokens))


def cluster_of(text: str) -> Cluster:
    """A preset; ``/4``: four devices of its host; ``with 90 MiB``: so much on each beside the framework."""
    name, _, memory = text.partition(" with ")
    name, _, devices = name.partition("/")
    cluster = Cluster.parse(name)
    if devices:
        cluster = replace(cluster, hosts=(replace(cluster.hosts[0], num_devices=int(devices)),))
    if memory:
        framework = FRAMEWORK_BYTES[cluster.device(0).kind]
        cluster = with_memory(cluster, int(framework + float(memory.split()[0]) * 2**20))
    return cluster


@lru_cache
def planned(model: str, cluster: str, asked: tuple[tuple[str, Any], ...] = ()) -> Plan | None:
    """The plan of a question; None if nothing fits. It fits the devices."""
    request = PlanRequest(global_batch=BATCH, alternatives=False, **dict(asked))
    machines = cluster_of(cluster)
    try:
        (plan,) = make_plans(graph_of(model), machines, request)
    except InfeasibleError:
        return None
    usable = usable_bytes(machines)
    for stage, price in zip(plan.stages, plan.prediction.stages):
        held = price.peak_bytes - price.memory_bytes["framework"]
        assert held <= min(usable[device] for device in stage.devices)
    assert plan.check() == []
    return plan


def _named(value: object) -> str:
    return "; ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("model", "cluster", "narrower"), PAIRS, ids=_named)
def test_the_freer_question_has_no_slower_plan(model: str, cluster: str, narrower: dict[str, Any]) -> None:
    words = {name: value for name, value in narrower.items() if name != "cluster"}
    strict = planned(model, narrower.get("cluster", cluster), tuple(words.items()))
    free = planned(model, cluster)
    assert strict is not None  # else the pair says nothing
    assert free is not None
    told_s = 0.0
    if "cluster" in narrower:  # devices that stay idle are told the loss, too
        told_s = max(stage.seconds.get("loss", 0.0) for stage in free.prediction.stages)
    assert free.prediction.step_s - told_s <= strict.prediction.step_s * (1 + WORSE)
    assert free.prediction.bound_s <= strict.prediction.step_s * (1 + 1e-9)
    assert strict.prediction.bound_s <= strict.prediction.step_s


KNOWN = pytest.mark.xfail(strict=True, reason="1.7 % slower than on one host; the cause is not known")


@pytest.mark.parametrize(("memory", "microbatches"), [pytest.param(130, 2, marks=KNOWN), (90, 4)])
def test_idle_devices_do_not_hide_that_memory_is_scarce(memory: int, microbatches: int) -> None:
    """On all devices of a larger cluster the model is small; in the few that it is fastest on, it is not."""
    asked = (("schedule", "zb-v"), ("microbatches", microbatches))
    few, many = (planned("gpt", f"p3.16xlarge:{hosts} with {memory} MiB", asked) for hosts in (1, 4))
    assert few is not None
    assert many is not None
    assert many.prediction.step_s <= few.prediction.step_s * (1 + WORSE)


def test_whole_gradients_hide_where_shards_do_not() -> None:
    """Shards save memory, so nothing need run again, but their messages are exposed."""
    asked = (("strategy", "dp8"),)
    free, whole = (planned("wide gpt", "8x4090 with 4000 MiB", one) for one in (asked, (*asked, ("zero", 0))))
    assert free is not None
    assert whole is not None
    assert free.prediction.step_s <= whole.prediction.step_s * (1 + WORSE)
