"""Pairs of planning questions, a freer and a stricter one: the freer must not get a slower plan.

python benchmarks/monotone.py [--only NAME,…] [--workers N] [--quick] [--json out/monotone.json]

A question is free in everything, or strict in one thing: a constraint, a strategy, a schedule, a number of
microbatches, a level of parameter sharding, a recompute mode, no cuts of sequences. Other pairs compare a cluster with
a larger one of the same hosts, more memory and a faster network. Reported: by how much freer plans are slower,
questions that are refused though a stricter one is not, bounds above a stricter question's step, the gaps, and how far
the clock by which candidates are compared lies from the simulation of the plan that is built from it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import meshwright as mw
import torch
from meshwright import models
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.search.driver import make_plans
from meshwright.compiler.search.request import PlanRequest
from meshwright.costmodel.cluster import Cluster
from reporting.results import Record, computed, save_records, write_results
from rich.console import Console
from rich.table import Table

TOLERANCE = 5e-3  # of a step

WORDS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("1 microbatch", {"microbatches": 1}),
    ("8 microbatches", {"microbatches": 8}),
    ("stages = 1", {"constraints": "stages = 1"}),
    ("stages = 2", {"constraints": "stages = 2"}),
    ("stages <= 4", {"constraints": "stages <= 4"}),
    ("1f1b", {"schedule": "1f1b"}),
    ("zb-v", {"schedule": "zb-v"}),
    ("interleaved", {"schedule": "interleaved"}),
    ("no zero", {"zero": 0}),
    ("zero 2", {"zero": 2}),
    ("recompute full", {"recompute": "full"}),
    ("no sequence cuts", {"sequence": False}),
    ("tensor parallel in a host", {"constraints": "tensor parallel inside a host"}),
)


@dataclass(frozen=True)
class Base:
    """A model, a cluster and a batch; strategies: forced ones beside ``WORDS``; smaller: clusters that are less."""

    model: str
    cluster: str
    batch: int
    strategies: tuple[str, ...] = ()
    smaller: tuple[str, ...] = ()
    layers: int = 0  # of a GPT of 2,048 wide blocks instead of a target

    @property
    def name(self) -> str:
        """Unique among the bases."""
        return f"{self.model} on {self.cluster}, batch {self.batch}"


BASES = (
    Base("gpt-350m", "8x4090:2", 64, ("pp2,dp8", "dp16", "pp16"), ("8x4090:1", "8x4090:2@memory:0.7")),
    Base("gpt-350m", "8x4090:4", 256, ("pp4,dp8",), ("8x4090:1", "8x4090:2")),
    Base("gpt-1.3b", "8x4090:2", 64, ("pp8,tp2",), ("8x4090:1",)),
    Base("gpt-2.6b", "p3.16xlarge:1", 256, ("pp4,dp2", "pp2,dp4", "pp2,dp2,tp2"), ("p3.16xlarge:1@memory:0.8",)),
    Base("gpt-2.6b", "p3.16xlarge:3", 192, ("pp3,dp8", "pp6,dp4"), ("p3.16xlarge:2", "p3.16xlarge:1")),
    Base("gpt-39b", "p3.16xlarge:8", 1024, ("pp8,dp8", "pp8,tp8", "pp16,tp4"), ()),
    Base("llama3-8b", "dgx-h100:4", 256, ("pp8,tp4", "pp2,dp4,tp4", "dp32"), ("dgx-h100:2",)),
    Base("llama3-8b", "dgx-h100:16", 128, ("pp4,dp8,tp4",), ("dgx-h100:4",)),
    Base("llama3-70b", "dgx-h100:8", 64, ("pp8,tp8", "pp4,dp2,tp8"), ()),
    Base("moe-1.3b", "8x4090:2", 128, ("pp2,dp8",), ("8x4090:1",)),
    Base("moe-2.4b", "p3.16xlarge:1", 256, ("pp2,dp4", "dp8"), ("p3.16xlarge:1@network:0.5",)),
    Base("wrn-500m", "p3.16xlarge:2", 64, ("dp16", "pp2,dp8"), ("p3.16xlarge:1",)),
    Base("wrn-500m", "8x4090:2", 128, ("pp4,dp2",), ("8x4090:1",)),
    Base("resnet-152", "8x4090:2", 128, ("pp2,dp8",), ("8x4090:1",)),
    Base("GPT", "p3.16xlarge:1", 64, ("pp2,dp4", "pp4,dp2"), (), layers=4),
    Base("GPT", "two-laptops-wifi:2", 32, ("dp2",), ("two-laptops-wifi:1",), layers=2),
    Base("gpt-175b", "dgx-h100:128", 1536, ("pp16,dp8,tp8",), ()),
    Base("llama3-405b", "dgx-h100:64", 128, ("pp16,tp8,dp4",), ()),
    Base("llama3-405b", "dgx-h100:256", 1024, (), ()),
)  # fmt: skip
QUICK = (BASES[0], BASES[14])


@dataclass
class Answer:
    """The plan of one question; ``error`` where there is none."""

    step_s: float = 0.0
    bound_s: float = 0.0
    seconds: float = 0.0
    what: str = ""
    error: str = ""
    clocks: list[list[float]] = field(default_factory=list)


def clusters(text: str) -> Cluster:
    """The cluster of a text, with ``@memory:F`` and ``@network:F`` for less of them."""
    name, _, change = text.partition("@")
    cluster = mw.Cluster.parse(name)
    what, _, factor = change.partition(":")
    if what == "memory":
        hosts = [
            replace(host, device=replace(host.device, memory_bytes=int(host.device.memory_bytes * float(factor))))
            for host in cluster.hosts
        ]
        cluster = replace(cluster, hosts=tuple(hosts))
    if what == "network":
        link = replace(cluster.link, bytes_per_s=cluster.link.bytes_per_s * float(factor))
        cluster = replace(cluster, link=link)
    return cluster


def graph_of(base: Base) -> Any:
    """The captured model of a base."""
    if base.layers:
        with torch.device("meta"):
            model = models.GPT(vocab=51200, layers=base.layers, hidden=2048, heads=16, sequence=1024).half()
            tokens = torch.zeros(8, 1024, dtype=torch.int64)
        return capture(model, (tokens, tokens), {})
    target = models.build(base.model)
    return capture(target.model, target.args, target.kwargs)


def plan(graph: Any, cluster: Cluster, batch: int, words: Mapping[str, Any]) -> Answer:
    """The answer to one question."""
    start = time.perf_counter()
    try:
        found = make_plans(
            graph,
            cluster,
            PlanRequest.of(words, global_batch=batch, optimizer="AdamW+masters", workers=1, alternatives=False),
        )[0]
    except (ValueError, mw.InfeasibleError) as refused:
        return Answer(seconds=time.perf_counter() - start, error=str(refused))
    told = found.prediction
    what = f"{found.schedule} × {len(found.stages)}, {found.microbatches} microbatches"
    clocks = [list(map(float, both)) for both in found.provenance["clocks"]]
    return Answer(told.step_s, told.bound_s, time.perf_counter() - start, what, clocks=clocks)


def questions(base: Base) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(name, cluster, words) of every question of a base; the first is the free one."""
    yield "free", base.cluster, {}
    for name, words in WORDS:
        if not words.get("microbatches") or base.batch % words["microbatches"] == 0:
            yield name, base.cluster, words
    for strategy in base.strategies:
        yield strategy, base.cluster, {"strategy": strategy}
        yield f"{strategy}, zb-v", base.cluster, {"strategy": strategy, "schedule": "zb-v"}
    for cluster in base.smaller:
        yield cluster, cluster, {}


def pairs(answers: Mapping[str, Answer]) -> Iterator[tuple[str, str]]:
    """(freer, stricter) names of questions of one base."""
    for name in answers:
        if name != "free":
            yield "free", name
        head, _, rest = name.partition(", ")
        if rest and head in answers:
            yield head, name
        if rest == "zb-v" and "zb-v" in answers:
            yield "zb-v", name
    if "stages <= 4" in answers:
        yield from (("stages <= 4", name) for name in ("stages = 1", "stages = 2"))


def compared(base: Base, answers: Mapping[str, Answer]) -> list[dict[str, Any]]:
    """One line per pair of a base of which the stricter question has a plan."""
    lines = []
    for freer, stricter in pairs(answers):
        free, strict = answers[freer], answers[stricter]
        if strict.error:
            continue
        lines.append(
            {
                "base": base.name,
                "freer": freer,
                "stricter": stricter,
                "freer_s": None if free.error else free.step_s,
                "stricter_s": strict.step_s,
                "slower": None if free.error else free.step_s / strict.step_s - 1,
                "bound_above": not free.error and free.bound_s > strict.step_s * (1 + 1e-9),
            }
        )
    return lines


def run_base(base: Base) -> tuple[dict[str, Answer], list[dict[str, Any]]]:
    """The answers to all questions of a base, and its pairs."""
    graph, answers = graph_of(base), dict[str, Answer]()
    for name, cluster, words in questions(base):
        answers[name] = plan(graph, clusters(cluster), base.batch, words)
        one = answers[name]
        said = one.error[:90] or f"{one.step_s:.5g} s, {one.what}, gap {1 - one.bound_s / one.step_s:.1%}"
        print(f"{base.name}: {name}: {said} ({one.seconds:.1f} s)", flush=True)
    return answers, compared(base, answers)


def records(lines: Sequence[Mapping[str, Any]], answers: Sequence[Answer]) -> list[Record]:
    """The figures for docs/measured.md."""
    slower = [line["slower"] for line in lines if line["slower"] is not None]
    gaps = [1 - one.bound_s / one.step_s for one in answers if not one.error]
    errors = [abs(clock / step - 1) for one in answers for clock, step in one.clocks[:1]]
    figures = (
        ("pairs of questions", len(lines), "", 0),
        ("freer plans slower by more than 0.5 %", sum(one > TOLERANCE for one in slower), "", 0),
        ("the most by which a freer plan is slower", 100 * max(slower, default=0.0), "%", 2),
        ("freer questions refused", sum(line["slower"] is None for line in lines), "", 0),
        ("bounds above a stricter question's step", sum(line["bound_above"] for line in lines), "", 0),
        ("median gap to the bound", 100 * median(gaps or [0.0]), "%", 1),
        ("median error of the search's clock", 100 * median(errors or [0.0]), "%", 2),
        ("largest error of the search's clock", 100 * max(errors, default=0.0), "%", 1),
    )
    return [Record(name, float(value), unit, digits, computed(float(value))) for name, value, unit, digits in figures]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two small models")
    parser.add_argument("--only", default="", help="parts of the names of bases, by commas")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with one base at a time")
    parser.add_argument("--json", type=Path, default=Path("out/monotone.json"), help="where the results go")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    wanted = options.only.split(",")
    bases = QUICK if options.quick else [base for base in BASES if any(part in base.name for part in wanted)]
    lines: list[dict[str, Any]] = []
    answers: list[Answer] = []
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for found, compared_ in pool.map(run_base, bases):
            answers += found.values()
            lines += compared_
            write_results(options.json, {"pairs": lines})
    table = Table(title="freer questions with slower plans, or none, or a bound above the stricter question's step")
    for heading in ("base", "freer", "stricter", "freer s", "stricter s", "slower"):
        table.add_column(heading)
    for line in lines:
        if line["slower"] is None or line["slower"] > TOLERANCE or line["bound_above"]:
            shown = "none" if line["slower"] is None else f"{line['slower']:.1%}"
            table.add_row(
                line["base"], line["freer"], line["stricter"], f"{line['freer_s'] or 0:.5g}",
                f"{line['stricter_s']:.5g}", shown + (", bound above" if line["bound_above"] else ""),
            )  # fmt: skip
    console.print(table)
    made = records(lines, answers)
    for record in made:
        console.print(f"{record.row}: {record.value:.4g} {record.unit}")
    save_records("monotone", made, options.quick or bool(options.only))
    return int(any(line["slower"] is None or line["slower"] > TOLERANCE or line["bound_above"] for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
