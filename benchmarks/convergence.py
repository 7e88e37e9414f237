"""Does training with compressed gradients arrive where the exact sum does? Every code at its recommended setting.

    python benchmarks/convergence.py [--tasks digits gpt] [--only NAME ...] [--seeds 3] [--json out/convergence.json]

Four workers in one process, each with a fourth of the batch; their gradients are summed by the code, in one bucket.
digits: a perceptron of three layers on scikit-learn's digits, the accuracy on what was held out. gpt: a byte-level
GPT of two blocks on the text of the standard library's modules, nats per byte on modules that were held out. "noise":
the standard deviation of the exact sum's results over the seeds. Exit status 1 where a code that is not known to fail
is worse than the exact sum by more than --tolerance (0.5 % accuracy, 0.02 × loss) and three times the noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from meshwright.costmodel.codecs import CODECS
from meshwright.runtime.compression import Rehearsal, make_sum
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

WORKERS = 4


@dataclass(frozen=True)
class Setting:
    """rate: of SGD, as a multiple of the task's; momentum: of the optimizer; options: of ``make_sum``, in which
    ``warmup_steps`` is a share of all steps; fails: why it is not expected to arrive."""

    rate: float = 1.0
    momentum: float = 0.9
    options: dict[str, Any] = field(default_factory=dict)
    fails: str = ""


_DGC = Setting(momentum=0.0, options={"momentum": 0.9, "warmup_steps": 0.25})
SETTINGS: dict[str, Setting] = {
    "ef-signsgd": Setting(rate=0.5),
    "signsgd": Setting(rate=0.01, fails="falls short after 1,000 steps at this rate, and no better one is known"),
    "dgc1%": _DGC,
    "dgc0.1%": _DGC,
    "randomk1%": Setting(rate=5.0, momentum=0.0),
    "randomk10%": Setting(rate=10.0, momentum=0.0),
    "atomo1%": Setting(rate=0.33),
}


# ---- tasks


class Digits:
    """Accuracy, in percent, of a perceptron 64-128-128-10 whose backward is written out for all workers at once."""

    name, rate, steps, better = "digits", 0.1, 1000, 1

    def __init__(self, seed: int, tuning: bool = False) -> None:
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
        known, end = (1077, 1347) if tuning else (1347, len(images))
        self.train, self.test = (x[:known], y[:known]), (x[known:end], y[known:end])
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.long)

    def gradients(self, each: int = 32) -> torch.Tensor:
        """Of each worker's share of the loss, [WORKERS, n]; epochs in random order, the rest of one is left out."""
        if len(self.order) < WORKERS * each:
            self.order = torch.randperm(len(self.train[0]), generator=self.generator)
        rows, self.order = self.order[: WORKERS * each], self.order[WORKERS * each :]
        inputs, y = [self.train[0][rows]], self.train[1][rows]
        layers = [layer for layer in self.model if isinstance(layer, nn.Linear)]
        for layer in layers:
            inputs.append(layer(inputs[-1]).relu())
        error = (layers[-1](inputs[-2]).softmax(1) - F.one_hot(y, 10)) / len(rows)
        found: list[torch.Tensor] = []
        for layer, x in reversed(list(zip(layers, inputs))):
            split = error.view(WORKERS, each, -1)
            weight = split.transpose(1, 2) @ x.view(WORKERS, each, -1)
            found = [weight.flatten(1), split.sum(1), *found]
            error = error @ layer.weight * (x > 0)
        return torch.cat(found, 1)

    def result(self) -> float:
        return 100 * float((self.model(self.test[0]).argmax(1) == self.test[1]).float().mean())


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.mix, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.mix(self.norms[0](x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, hidden: int = 64, layers: int = 2, sequence: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, hidden), nn.Parameter(0.02 * torch.randn(sequence, hidden))
        self.blocks = nn.Sequential(*(Block(hidden, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places)))


class Text:
    """Nats per byte."""

    name, rate, steps, better = "gpt", 0.1, 300, -1

    def __init__(self, seed: int, tuning: bool = False) -> None:
        files = sorted(Path(json.__file__).parent.parent.glob("*.py"))
        texts = [torch.tensor(list(file.read_bytes()), dtype=torch.uint8) for file in files]
        self.train, self.test = torch.cat(texts[::2]), torch.cat(texts[3 if tuning else 1 :: 8])
        torch.manual_seed(seed)
        self.model = GPT()
        self.leaves = list(self.model.parameters())
        self.generator = torch.Generator().manual_seed(seed)

    def loss(self, text: torch.Tensor, batch: int) -> torch.Tensor:
        starts = torch.randint(len(text) - 65, (batch,), generator=self.generator)
        rows = torch.stack([text[s : s + 65] for s in starts.tolist()]).long()
        return F.cross_entropy(self.model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])

    @torch.enable_grad()
    def gradients(self, each: int = 4) -> torch.Tensor:
        losses = [self.loss(self.train, each) / WORKERS for _ in range(WORKERS)]
        grads = [torch.autograd.grad(loss, self.leaves) for loss in losses]
        return torch.stack([torch.cat([grad.reshape(-1) for grad in of]) for of in grads])

    def result(self) -> float:
        self.generator.manual_seed(12345)
        return mean(float(self.loss(self.test, 64)) for _ in range(4))


TASKS: dict[str, Callable[[int, bool], Any]] = {"digits": Digits, "gpt": Text}


# ---- training


@torch.no_grad()
def train(task: Any, name: str, steps: int, seed: int, setting: Setting) -> float:
    """The result of one run; nan if its loss stopped being finite."""
    options = dict(setting.options)
    if "warmup_steps" in options:
        options["warmup_steps"] = int(options["warmup_steps"] * steps)
    leaves = list(task.model.parameters())
    sizes, shapes = [leaf.numel() for leaf in leaves], [tuple(leaf.shape) for leaf in leaves]
    world = Rehearsal(WORKERS)
    sums = [make_sum(name, sum(sizes), e, shapes=shapes, seed=seed, **options) for e in world.exchanges]
    optimizer = torch.optim.SGD(leaves, lr=task.rate * setting.rate, momentum=setting.momentum)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / 50) * (1 - k / steps))
    for _ in range(steps):
        buckets = task.gradients()
        try:
            world.run([one.run(x) for one, x in zip(sums, buckets)])
        except ValueError:
            return float("nan")
        for leaf, grad in zip(leaves, buckets[0].split(sizes)):
            leaf.grad = grad.view_as(leaf)
        optimizer.step()
        schedule.step()
    return float(task.result())


def contest(task: str, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    kind, names, seeds = TASKS[task], asked.only, asked.seeds
    exact: list[float] = []
    for name in ["none", *(name for name in names if name != "none")]:
        setting = replace(SETTINGS.get(name, Setting()), **asked.setting)
        tasks = [kind(seed, asked.tuning) for seed in range(seeds)]
        results = [train(one, name, int(one.steps * asked.share), seed, setting) for seed, one in enumerate(tasks)]
        exact = exact or results
        worse = kind.better * (mean(exact) - mean(results))
        noise = stdev(exact) if seeds > 1 else 0.0
        bound = max(0.5 if task == "digits" else asked.tolerance * mean(exact), 3 * noise)
        yield {
            "task": task, "codec": name, "results": results, "mean": mean(results), "worse_by": worse, "noise": noise,
            "arrives": worse <= bound, "fails": setting.fails, "rate": setting.rate, "momentum": setting.momentum,
            "options": setting.options,
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--only", nargs="+", choices=list(CODECS), default=list(CODECS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps: does it run")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--tuning", action="store_true", help="measure on a part of what is otherwise trained on")
    parser.add_argument("--rate", type=float, help="for all codes, in place of their settings")
    parser.add_argument("--momentum", type=float, help="likewise")
    parser.add_argument("--json", type=Path, default=Path("out/convergence.json"))
    asked = parser.parse_args()
    asked.setting = {key: getattr(asked, key) for key in ("rate", "momentum") if getattr(asked, key) is not None}
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    table = Table(title=f"{WORKERS} workers, {asked.seeds} seeds")
    for column in ("task", "codec", "mean", "worse by", "noise", "rate", "arrives"):
        table.add_column(column, justify="left" if column in ("task", "codec", "arrives") else "right")
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    for task in asked.tasks:
        for row in contest(task, asked):
            rows.append(row)
            asked.json.write_text(json.dumps({"workers": WORKERS, "rows": rows}, indent=1))
            verdict = "yes" if row["arrives"] else f"no{': ' if row['fails'] else ''}{row['fails']}"
            figures = (f"{row[key]:.3f}" for key in ("mean", "worse_by", "noise", "rate"))
            table.add_row(task, row["codec"], *figures, verdict)
            print(task, row["codec"], [round(result, 3) for result in row["results"]], flush=True)
    Console().print(table)
    return int(any(not row["arrives"] and not row["fails"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
