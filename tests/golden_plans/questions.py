"""Planning questions whose answers are recorded: models, clusters and wishes, all through the public API.

``QUICK`` is planned by the test suite, some 75 CPU seconds together; ``LARGE`` (published models on real clusters, up
to minutes each) only by ``record.py --all``. None has a time limit, which would make its plan depend on the machine's
load. What an InfeasibleError proposes is looked for during 5 seconds, so infeasible questions are small: a second each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import meshwright as mw
import torch
from meshwright import models

from tests.support.zoo import ZOO, Case

__all__ = ["BY_NAME", "LARGE", "QUICK", "Question"]

MIB = 2**20


@dataclass(frozen=True)
class Model:
    """A model and its example inputs: of ``tests/support/zoo.py`` ("zoo"), a built-in target ("target"), or a
    built-in family ("family") of a small shape, whose inputs have ``inputs`` extents: [batch, sequence] or
    [batch, 3, height, width].
    """

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    dtype: str = "float32"

    def build(self) -> Case:
        """(model on the meta device, args, kwargs)."""
        if self.kind == "zoo":
            return ZOO[self.name](device="meta", **self.options)
        if self.kind == "target":
            target = models.build(self.name)
            return target.model, target.args, target.kwargs
        dtype = getattr(torch, self.dtype)
        with torch.device("meta"):
            model = getattr(models, self.name)(**self.options).to(dtype).train()
            if len(self.inputs) == 2:
                first = labels = torch.zeros(self.inputs, dtype=torch.int64)
            else:
                batch, _, height, width = self.inputs
                extents = (batch, height, width) if self.name == "UNet" else (batch,)
                first, labels = torch.zeros(self.inputs, dtype=dtype), torch.zeros(extents, dtype=torch.int64)
        return model, (first, labels), {}


@dataclass(frozen=True)
class Hardware:
    """A cluster that ``Cluster.parse`` reads, or a file of this folder.

    devices: how many each of its hosts has, in place of the preset's number; memory_mib: of each device, likewise.
    """

    text: str
    devices: tuple[int, ...] = ()
    memory_mib: float | None = None

    def build(self) -> mw.Cluster:
        """The cluster."""
        file = Path(__file__).parent / self.text
        cluster = mw.Cluster.load(file) if file.is_file() else mw.Cluster.parse(self.text)
        hosts = list(cluster.hosts)
        if self.devices:
            hosts = [replace(host, num_devices=count) for host, count in zip(hosts, self.devices, strict=True)]
        if self.memory_mib is not None:
            size = int(self.memory_mib * MIB)
            hosts = [replace(host, device=replace(host.device, memory_bytes=size)) for host in hosts]
        return replace(cluster, hosts=tuple(hosts))


@dataclass(frozen=True)
class Question:
    """One call of ``mw.plan`` or ``mw.pareto`` (``call``). why: names that ``Plan.why`` is asked about."""

    name: str
    model: Model
    cluster: Hardware
    asked: Mapping[str, Any] = field(default_factory=dict)
    call: str = "plan"
    why: tuple[str, ...] = ()

    def plans(self, workers: int = 1) -> list[mw.Plan]:
        """The answer. Raises what the call raises."""
        model, args, kwargs = self.model.build()
        ask: Callable[..., Any] = getattr(mw, self.call)
        extra: dict[str, Any] = {"cache": False} if self.call == "plan" else {}  # pareto keeps nothing
        if next(model.parameters()).dtype.itemsize == 2:
            extra["optimizer"] = "AdamW+masters"
        found = ask(
            model,
            self.cluster.build(),
            example_inputs=args,
            example_kwargs=kwargs,
            workers=workers,
            **extra,
            **self.asked,
        )
        return found if isinstance(found, list) else [found]


def _zoo(name: str, batch: int = 8, **options: Any) -> Model:
    return Model("zoo", name, {"batch": batch, **options})


def _target(name: str) -> Model:
    return Model("target", name)


_GPT = Model("family", "GPT", {"vocab": 512, "layers": 4, "hidden": 256, "heads": 4, "sequence": 64}, (16, 64))
_WIDE_GPT = Model("family", "GPT", {"vocab": 512, "layers": 4, "hidden": 1024, "heads": 8, "sequence": 64}, (16, 64))
_LLAMA = Model(
    "family",
    "Llama",
    {"vocab": 512, "layers": 2, "hidden": 512, "inner": 1024, "heads": 8, "kv_heads": 2},
    (16, 128),
    "bfloat16",
)
_MOE = Model(
    "family",
    "TransformerMoE",
    {"vocab": 512, "layers": 2, "hidden": 256, "heads": 4, "num_experts": 8, "sequence": 64},
    (16, 64),
    "float16",
)
_UNET = Model("family", "UNet", {"channels": 16, "steps": 2, "classes": 8}, (16, 3, 64, 64))
_VIT_MOE = Model(
    "family",
    "ViTMoE",
    {"layers": 2, "hidden": 128, "heads": 4, "num_experts": 4, "image": 64, "patch": 16},
    (32, 3, 64, 64),
    "float16",
)
_WRN = Model("family", "WideResNet", {"depth": 50, "channels": 32, "width_factor": 2}, (32, 3, 64, 64))

_V100 = "p3.16xlarge:1"
_TWO, _FOUR, _EIGHT = Hardware(_V100, (2,)), Hardware(_V100, (4,)), Hardware(_V100)
_A100, _H100 = Hardware("dgx-a100-40:1", (4,)), Hardware("dgx-h100:1", (4,))
_FAR = Hardware("p3.16xlarge:2@world", (2, 2))
_MEASURED = Hardware("clusters/measured.json")  # 4 ranks of one CPU machine, as ``meshwright profile`` wrote it

_PLAIN = {"recompute": "none", "zero": 0}

QUICK: tuple[Question, ...] = (
    # every built-in family
    Question("gpt", _GPT, _H100, {"microbatches": 2}, why=("blocks.1.attention",)),
    Question("llama-two-hosts", _LLAMA, Hardware("p3.16xlarge:2", (2, 2)), {"microbatches": 2}),
    Question("moe", _MOE, _FOUR, {"microbatches": 1, "global_batch": 256}),
    Question("wrn", _WRN, _FOUR, {"microbatches": 2, "strategy": "pp2,dp2"}),
    Question("unet", _UNET, _A100, {"microbatches": 1}),
    Question("unet-space", _UNET, _FOUR, {"strategy": "tp4", "microbatches": 1}),
    Question("vit-moe", _VIT_MOE, _FOUR, {"microbatches": 1, "schedule": "1f1b", "global_batch": 512}),
    # small graphs, whose pipelines are tried by what they really take
    Question("zoo-mlp", _zoo("mlp", 64), _FOUR, {"global_batch": 65536}),
    Question("zoo-mlp-one-host", _zoo("mlp", 64), Hardware("cpu:1")),
    Question("zoo-gpt", _zoo("gpt", 16), _TWO),
    Question("zoo-moe", _zoo("moe", 16), _TWO, {"microbatches": 2}),
    Question("zoo-convnet", _zoo("convnet", 16), _FOUR, {"global_batch": 1024, "microbatches": 1}),
    Question("zoo-t5", _zoo("t5"), _FOUR, {"strategy": "pp2,tp2", "microbatches": 2, "schedule": "1f1b"}),
    Question("zoo-vit", _zoo("vit"), _TWO, {"microbatches": 1, "global_batch": 512}),
    Question("zoo-mixtral", _zoo("mixtral"), _TWO, {"microbatches": 1, "global_batch": 1024}),
    # forced strategies and schedules
    Question("forced-gpipe", _GPT, _FOUR, {"strategy": "pp2,dp2", "schedule": "gpipe", "microbatches": 4}),
    Question("forced-1f1b", _GPT, _FOUR, {"strategy": "pp4", "schedule": "1f1b", "microbatches": 8}),
    Question("forced-interleaved", _GPT, _FOUR, {"strategy": "pp2,tp2", "schedule": "interleaved", "microbatches": 4}),
    Question("forced-zb-h1", _GPT, _FOUR, {"strategy": "pp2,dp2", "schedule": "zb-h1", "microbatches": 4}),
    Question("forced-zb-v", _GPT, _FOUR, {"strategy": "pp2,dp2", "schedule": "zb-v", "microbatches": 4}),
    Question("forced-pipedream", _zoo("gpt", 16), _TWO, {
        "strategy": "pp2", "schedule": "pipedream", "microbatches": 4,
    }),
    Question("forced-division", _GPT, _FOUR, {"strategy": "1:dp1 + 1:dp1 + 2:dp2", "microbatches": 4, **_PLAIN}),
    Question("forced-tensor", _LLAMA, _FOUR, {"strategy": "tp4", "microbatches": 1}, why=("blocks.1.down",)),
    Question("forced-experts", _MOE, _FOUR, {"strategy": "dp2,tp2", "microbatches": 1}),
    # what else may be asked
    Question("constraints", _GPT, _FOUR, {
        "constraints": [
            "stage boundary at blocks.2.attention", "recompute none,full", "zero <= 1", "tensor parallel inside a host",
        ],
        "microbatches": 4,
    }),
    Question(
        "zero-3", _WIDE_GPT, _FOUR, {"strategy": "dp4", "zero": 3, "microbatches": 2}, why=("blocks.1.feed_forward",)
    ),
    Question("recompute-full", _GPT, _FOUR, {"strategy": "dp4", "recompute": "full", "microbatches": 1}),
    Question("recompute-by-layer", _GPT, _FOUR, {
        "strategy": "pp2,dp2", "microbatches": 2, "recompute": {"blocks.*": "selective", "blocks.3*": "full"},
    }),
    Question("bf16", _GPT, _H100, {"precision": "bf16", "strategy": "dp2,tp2", "microbatches": 2}),
    Question("precision-auto", _GPT, _H100, {"precision": "auto", "strategy": "dp4", "microbatches": 1}),
    Question("communication-auto", _GPT, Hardware("p3.16xlarge:4", (1, 1, 1, 1)), {
        "communication": "auto", "strategy": "dp4", "microbatches": 1, **_PLAIN,
    }),
    Question("communication-auto-lossy", _GPT, _FAR, {
        "communication": "auto-lossy", "strategy": "dp4", "microbatches": 1, **_PLAIN,
    }),
    Question("coded-activations-and-weights", _GPT, _FOUR, {
        "communication": {"activations": "int8", "weights": "bf16"},
        "strategy": "pp2,dp2", "microbatches": 4, "zero": 3,
    }),
    Question("no-sequence", _LLAMA, _FOUR, {"sequence": False, "strategy": "tp4", "microbatches": 1}),
    Question("executable", _GPT, _FOUR, {"executable": True, "microbatches": 2, "optimizer": "SGD"}),
    # other hardware
    Question("mixed-clusters", _GPT, Hardware("dgx-h100:1+p3.16xlarge:1", (2, 2)), {"microbatches": 4, **_PLAIN}),
    Question("measured-prices", _zoo("gpt", 64), _MEASURED, {"microbatches": 2, "schedule": "1f1b"}),
    Question("measured-mlp", _zoo("mlp", 64), _MEASURED, {"microbatches": 2, "global_batch": 4096}),
    Question("measured-codes", _GPT, _MEASURED, {
        "strategy": "dp4", "microbatches": 1, "communication": "bf16,powersgd2", **_PLAIN,
    }),
    Question("whole-host", _GPT, _EIGHT, {"strategy": "dp8", "zero": 1, "microbatches": 1}),
    Question("shared-link", _GPT, Hardware("8x4090:1", (4,)), {"strategy": "dp2,tp2", "microbatches": 2}),
    Question("laptops", _zoo("convnet", 16), Hardware("two-laptops-wifi:2"), {"strategy": "dp2", "microbatches": 2}),
    Question("two-networks", _GPT, Hardware("dgx-a100-80:2", (2, 2)), {"strategy": "pp2,tp2", "microbatches": 2}),
    Question("three-devices", _GPT, Hardware(_V100, (3,)), {"global_batch": 24}),
    Question("six-devices", _zoo("convnet", 24), Hardware(_V100, (6,)), {"microbatches": 2}),
    Question("seven-devices", _zoo("mlp", 56), Hardware("p3.16xlarge:2", (4, 3)), {
        "microbatches": 2, "global_batch": 5600000,
    }),
    # little memory
    Question("tight-memory", _WIDE_GPT, Hardware(_V100, (4,), 800 + 340), {"global_batch": 32}),
    Question("tight-memory-data", _WIDE_GPT, Hardware(_V100, (4,), 800 + 340), {"strategy": "dp4", "microbatches": 1}),
    # … of small graphs, where only the trial of what stages really hold finds the plan
    Question("tight-memory-mlp", _zoo("mlp", 64), Hardware(_V100, (2,), 800 + 0.6), {"global_batch": 256}),
    Question("tight-memory-mlp-four", _zoo("mlp", 64), Hardware(_V100, (4,), 800 + 0.6), {"global_batch": 256}),
    Question("tight-memory-mlp-tightest", _zoo("mlp", 64), Hardware(_V100, (2,), 800 + 0.15), {"global_batch": 256}),
    # several plans
    Question("pareto", _GPT, _FOUR, {"points": 3, "microbatches": 2}, call="pareto"),
    Question("top-k", _GPT, _TWO, {"top_k": 3}),
    # no plan
    Question("infeasible-memory", _WIDE_GPT, Hardware(_V100, (2,), 800 + 500), {
        "strategy": "dp2", "microbatches": 2, **_PLAIN,
    }),
    Question("infeasible-constraints", _WIDE_GPT, Hardware(_V100, (4,), 800 + 340), {
        "constraints": ["no zero", "stages = 1", "no tensor parallel"], "microbatches": 8, "global_batch": 32,
    }),
    Question("infeasible-overfull", _WIDE_GPT, Hardware(_V100, (4,), 800 + 260), {
        "strategy": "dp4", "microbatches": 2,
    }),
    Question("infeasible-weight", _WIDE_GPT, Hardware(_V100, (2,), 800 + 10), {"microbatches": 2}),
    Question("infeasible-strategy", _GPT, _FOUR, {"strategy": "pp3,dp2"}),
)  # fmt: skip

LARGE: tuple[Question, ...] = (
    Question("large-gpt-2.6b", _target("gpt-2.6b"), _EIGHT),
    Question("large-gpt-39b", _target("gpt-39b"), Hardware("p3.16xlarge:8")),
    Question("large-llama3-8b", _target("llama3-8b"), Hardware("dgx-h100:8")),
    Question("large-moe-2.4b", _target("moe-2.4b"), Hardware("p3.16xlarge:2")),
    Question("large-wrn-1b", _target("wrn-1b"), _EIGHT),
    Question("large-wrn-500m", _target("wrn-500m"), Hardware("8x4090:2"), {"global_batch": 128}),
    Question("large-resnet-152", _target("resnet-152"), _EIGHT),
    Question("large-unet", _target("unet"), Hardware("dgx-a100-40:1")),
    Question("large-vit-moe", _target("vit-moe"), Hardware("dgx-h100:1")),
    Question("large-t5-3b", _target("t5-3b"), Hardware("p3.16xlarge:2")),
    Question("large-gpt-1.3b-mixed", _target("gpt-1.3b"), Hardware("dgx-h100:1+p3.16xlarge:1")),
)

BY_NAME = {question.name: question for question in (*QUICK, *LARGE)}
