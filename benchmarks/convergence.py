"""Does training with coded or late gradients arrive where the exact sum does? Every code at its recommended setting.

    python benchmarks/convergence.py [--tasks digits gpt "gpt x3"] [--only NAME ...] [--seeds 3] [--json FILE]

Four workers in one process, each with a fourth of the batch; their gradients are summed by the code, in one bucket.
dga20, dga5: gradients whose mean arrives so many steps late (``delay=20``); local20: parameters averaged every 20 steps
(``local_steps=20``); these run as in ``runtime``, a thread per replica, and end with a flush. digits: a perceptron of
three layers on scikit-learn's digits, the accuracy on what was held out. gpt: a byte-level GPT of two blocks on the
text of the standard library's modules, nats per byte on modules that were held out; "gpt x3": the same at three times
the rate, which is better for the exact sum and not far from where it diverges. "noise": the standard deviation of
the exact sum's results over the seeds. A setting with more steps is compared with the exact sum of as many. Exit status
1 where a code that is not known to fail is worse than the exact sum by more than --tolerance (0.5 % accuracy, 0.02 ×
loss) and three times the noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from threading import Condition
from typing import Any

import torch
from meshwright.costmodel.codecs import CODECS
from meshwright.runtime.compression import BucketSpec, Rehearsal, make_sum
from meshwright.runtime.execution.local_sgd import DelayedGradients, PeriodicAverage
from reporting.results import Record, Spread, save_records
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

WORKERS = 4
SHOWN = {"none": "exact sum", "dga20": "delay=20", "dga5": "delay=5", "local20": "local_steps=20"}
LOCAL = {"dga20": 20, "dga5": 5, "local20": 20}  # steps of delay, or between averages


@dataclass(frozen=True)
class Setting:
    """rate: of SGD, as a multiple of the task's; momentum: of the optimizer; options: of ``make_sum``, in which
    ``warmup_steps`` is a share of all steps; steps: as a multiple of the task's; fails: why it does not arrive."""

    rate: float = 1.0
    momentum: float = 0.9
    options: dict[str, Any] = field(default_factory=dict)
    steps: float = 1.0
    fails: str = ""


_DGC = Setting(momentum=0.0, options={"momentum": 0.9, "warmup_steps": 0.25})
_SHORT = "falls short at any rate that was tried"
_FURTHER = Setting(rate=20 / 3, momentum=0.0)
_PLAIN, _LONGER = Setting(rate=10.0, momentum=0.0), Setting(rate=15.0, momentum=0.0)  # 10: as far as with momentum
SETTINGS: dict[str, dict[str, Setting]] = {
    "digits": {
        "ef-signsgd": Setting(rate=0.5),
        "signsgd": Setting(rate=0.001, fails="falls short by 1.6 % at the best rate that is known"),
        "dgc1%": _DGC,
        "dgc0.1%": _DGC,
        "randomk1%": Setting(rate=5.0, momentum=0.0),
        "randomk10%": _PLAIN,
        "atomo1%": Setting(rate=0.33),
    },
    "gpt": {
        "1bit": _PLAIN,
        "ef-signsgd": _PLAIN,
        "signsgd": Setting(rate=0.003),
        "topk1%": _PLAIN,
        "topk0.1%": _LONGER,
        "threshold10": _LONGER,
        "powersgd1": _PLAIN,
        "dgc1%": replace(_DGC, rate=2.0),
        "dgc0.1%": Setting(rate=20.0, momentum=0.0, options={"momentum": 0.0, "warmup_steps": 0.25}),
        "randomk1%": Setting(rate=2.0, momentum=0.0, fails="does not train in 300 steps at any rate that was tried"),
        "randomk10%": _PLAIN,
        "atomo1%": _PLAIN,
        "dga20": replace(_PLAIN, fails=_SHORT),
    },
    "gpt x3": {
        "1bit": _FURTHER,
        "ef-signsgd": Setting(rate=5.0, momentum=0.0),
        "signsgd": Setting(rate=0.01 / 3),
        "topk1%": _FURTHER,
        "topk0.1%": Setting(rate=5.0, momentum=0.0, fails=_SHORT),
        "threshold10": Setting(rate=5.0, momentum=0.0, fails=_SHORT),
        "int2": Setting(rate=0.5, fails=_SHORT),
        "terngrad": Setting(rate=1 / 3, fails=_SHORT),
        "powersgd1": replace(_FURTHER, fails=_SHORT),
        "dgc1%": replace(_DGC, rate=8 / 3),
        "dgc0.1%": Setting(rate=25 / 3, momentum=0.0, options={"momentum": 0.0, "warmup_steps": 0.25}, fails=_SHORT),
        "randomk1%": Setting(rate=2 / 3, momentum=0.0, fails="does not train in 300 steps at any rate that was tried"),
        "randomk10%": Setting(rate=10 / 3, momentum=0.0, fails=_SHORT),
        "atomo1%": Setting(rate=10 / 3, momentum=0.0, fails=_SHORT),
        "dga20": Setting(rate=10 / 3, momentum=0.0, fails=_SHORT),
        "dga5": Setting(fails=_SHORT),
    },
}


# ---- tasks


class Digits:
    """Accuracy, in percent, of a perceptron 64-128-128-10 whose backward is written out for all workers at once."""

    name, rate, steps = "digits", 0.1, 1000

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

    def shares(self, each: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of the next step, [WORKERS, each, …]; epochs in random order, their rests left out."""
        if len(self.order) < WORKERS * each:
            self.order = torch.randperm(len(self.train[0]), generator=self.generator)
        rows, self.order = self.order[: WORKERS * each], self.order[WORKERS * each :]
        return self.train[0][rows].view(WORKERS, each, -1), self.train[1][rows].view(WORKERS, each)

    def gradients(self) -> torch.Tensor:
        """Of each worker's share of the loss, [WORKERS, n]."""
        x, y = self.shares()
        each, y, inputs = x.shape[1], y.flatten(), [x.flatten(0, 1)]
        layers = [layer for layer in self.model if isinstance(layer, nn.Linear)]
        for layer in layers:
            inputs.append(layer(inputs[-1]).relu())
        error = (layers[-1](inputs[-2]).softmax(1) - F.one_hot(y, 10)) / len(y)
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

    name, rate, steps = "gpt", 0.1, 300

    def __init__(self, seed: int, tuning: bool = False) -> None:
        files = sorted(Path(json.__file__).parent.parent.glob("*.py"))
        texts = [torch.tensor(list(file.read_bytes()), dtype=torch.uint8) for file in files]
        self.train, self.test = torch.cat(texts[::2]), torch.cat(texts[3 if tuning else 1 :: 8])
        torch.manual_seed(seed)
        self.model = GPT()
        self.leaves = list(self.model.parameters())
        self.generator = torch.Generator().manual_seed(seed)

    def rows(self, text: torch.Tensor, batch: int) -> torch.Tensor:
        """Of 65 bytes, at random."""
        starts = torch.randint(len(text) - 65, (batch,), generator=self.generator)
        return torch.stack([text[s : s + 65] for s in starts.tolist()]).long()

    def shares(self, each: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of the next step, [WORKERS, each, 64]."""
        rows = torch.stack([self.rows(self.train, each) for _ in range(WORKERS)])
        return rows[..., :-1], rows[..., 1:]

    @torch.enable_grad()
    def gradients(self) -> torch.Tensor:
        """Of each worker's share of the loss, [WORKERS, n]."""
        losses = [loss(self.model, x, y) / WORKERS for x, y in zip(*self.shares())]
        grads = [torch.autograd.grad(loss, self.leaves) for loss in losses]
        return torch.stack([torch.cat([grad.reshape(-1) for grad in of]) for of in grads])

    def result(self) -> float:
        self.generator.manual_seed(12345)
        tests = [self.rows(self.test, 64) for _ in range(4)]
        return mean(float(loss(self.model, rows[:, :-1], rows[:, 1:])) for rows in tests)


class FastText(Text):
    """The same, at a rate that is better for the exact sum."""

    name, rate = "gpt x3", 0.3


TASKS: dict[str, Callable[[int, bool], Any]] = {"digits": Digits, "gpt": Text, "gpt x3": FastText}


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of outputs [batch, …, classes]."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


# ---- training


def train(task: Any, name: str, steps: int, seed: int, setting: Setting) -> float:
    """The result of one run; nan if its loss stopped being finite."""
    return (train_apart if name in LOCAL else train_together)(task, name, steps, seed, setting)


@torch.no_grad()
def train_together(task: Any, name: str, steps: int, seed: int, setting: Setting) -> float:
    options = dict(setting.options)
    if "warmup_steps" in options:
        options["warmup_steps"] = int(options["warmup_steps"] * steps)
    leaves = list(task.model.parameters())
    sizes, shapes = [leaf.numel() for leaf in leaves], [tuple(leaf.shape) for leaf in leaves]
    world = Rehearsal(WORKERS)
    bucket = BucketSpec(sum(sizes), shapes=tuple(shapes), seed=seed)
    sums = [make_sum(name, bucket, exchange, **options) for exchange in world.exchanges]
    optimizer, schedule = stepping(leaves, task.rate * setting.rate, setting.momentum, steps)
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


def stepping(leaves: list[nn.Parameter], rate: float, momentum: float, steps: int) -> tuple[Any, Any]:
    """SGD, and its rate's schedule: up in 50 steps, down to nothing in all."""
    optimizer = torch.optim.SGD(leaves, lr=rate, momentum=momentum)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / 50) * (1 - k / steps))


class Meeting:
    """Sums over replicas that are threads of one process: the k-th that each starts are one sum."""

    def __init__(self, replicas: int) -> None:
        self.started: list[list[torch.Tensor]] = [[] for _ in range(replicas)]
        self.changed, self.done = Condition(), 0

    def start(self, replica: int, x: torch.Tensor) -> int:
        with self.changed:
            self.started[replica].append(x)
            while all(len(started) > self.done for started in self.started):
                addends = [started[self.done] for started in self.started]
                total = torch.stack(addends).sum(0)
                for addend in addends:
                    addend.copy_(total)
                self.done += 1
                self.changed.notify_all()
            return len(self.started[replica])

    def wait(self, number: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.done >= number, timeout=60):
                raise TimeoutError(f"sum {number} is not there: another replica has stopped")


@dataclass
class Replica:
    """Of ``runtime.execution.replicas.Replicas`` what delays and averages ask for: ``count``, and sums."""

    meeting: Meeting
    index: int
    count: int = WORKERS

    def backend_sum(self, *_: Any) -> Any:
        return self

    def start(self, x: torch.Tensor) -> Any:
        return Awaited(self.meeting, self.meeting.start(self.index, x))


@dataclass
class Awaited:
    meeting: Meeting
    number: int

    def wait(self) -> None:
        self.meeting.wait(self.number)


def train_apart(task: Any, name: str, steps: int, seed: int, setting: Setting) -> float:
    """By replicas that step by themselves."""
    shares, meeting = [task.shares() for _ in range(steps)], Meeting(WORKERS)
    models = [deepcopy(task.model) for _ in range(WORKERS)]

    def replica(index: int) -> None:
        leaves, beside = list(models[index].parameters()), Replica(meeting, index)
        optimizer, schedule = stepping(leaves, task.rate * setting.rate, setting.momentum, steps)
        late = name.startswith("dga")
        means: Any = (
            DelayedGradients(leaves, beside, LOCAL[name], beside.backend_sum)  # type: ignore[arg-type]
            if late
            else PeriodicAverage(leaves, beside, LOCAL[name], 0, None, beside.backend_sum)  # type: ignore[arg-type]
        )
        for x, y in shares:
            optimizer.zero_grad()
            loss(models[index], x[index], y[index]).backward()
            if late:
                means.correct()
            optimizer.step()
            if not late:
                means.step()
            schedule.step()
        means.flush(optimizer)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(replica, range(WORKERS)))
    task.model.load_state_dict(models[0].state_dict())
    with torch.no_grad():
        return float(task.result())


def compare(task: str, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    kind, exact = TASKS[task], {}

    def results(name: str, setting: Setting) -> list[float]:
        tasks = [kind(seed, asked.tuning) for seed in range(asked.seeds)]
        return [
            train(one, name, int(one.steps * setting.steps * asked.share), seed, setting)
            for seed, one in enumerate(tasks)
        ]

    for name in ["none", *(name for name in asked.only if name != "none")]:
        setting = replace(SETTINGS[task].get(name, Setting()), **asked.setting)
        if setting.steps not in exact:
            exact[setting.steps] = results("none", Setting(steps=setting.steps))
        reference = exact[setting.steps]
        found = reference if name == "none" else results(name, setting)
        yield row(task, name, setting, found, reference, asked.tolerance)


def row(
    task: str, name: str, setting: Setting, results: list[float], exact: list[float], tolerance: float
) -> dict[str, Any]:
    """exact: the exact sum's results after as many steps."""
    worse = (1 if task == "digits" else -1) * (mean(exact) - mean(results))
    noise = stdev(exact) if len(exact) > 1 else 0.0
    bound = max(0.5 if task == "digits" else tolerance * mean(exact), 3 * noise)
    return {
        "task": task, "codec": name, "results": results, "mean": mean(results), "exact": mean(exact), "worse_by": worse,
        "noise": noise, "bound": bound, "arrives": worse <= bound, "fails": setting.fails, "rate": setting.rate,
        "momentum": setting.momentum, "steps": setting.steps, "options": setting.options,
    }  # fmt: skip


def records(rows: list[dict[str, Any]]) -> list[Record]:
    """Per task and code: what training comes to, held against the worst result that still counts as the exact sum's."""
    found = []
    for one in rows:
        better, unit, decimals = ("more", "% accuracy", 2) if one["task"] == "digits" else ("less", "nats per byte", 3)
        exact = one["codec"] == "none"
        even = None if exact else one["exact"] + (one["bound"] if better == "less" else -one["bound"])
        seeds = len(one["results"])
        spread = Spread(min(one["results"]), max(one["results"]), f"{seeds} seeds") if seeds > 1 else None
        note = f"rate × {one['rate']:.3g}, momentum {one['momentum']:g}"
        row = f"{one['task']}: {SHOWN.get(one['codec'], one['codec'])}"
        peer = "" if exact else "exact sum"
        found.append(Record(row, one["mean"], unit, decimals, spread, peer, even, better, note))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--only", nargs="+", choices=[*CODECS, *LOCAL], default=[*CODECS, *LOCAL])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps: does it run")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--tuning", action="store_true", help="measure on a part of what is otherwise trained on")
    parser.add_argument("--rate", type=float, help="for all codes, in place of their settings")
    parser.add_argument("--momentum", type=float, help="likewise")
    parser.add_argument("--steps", type=float, help="likewise, as a multiple of the task's")
    parser.add_argument("--json", type=Path, default=Path("out/convergence.json"))
    asked = parser.parse_args()
    asked.setting = {
        key: getattr(asked, key) for key in ("rate", "momentum", "steps") if getattr(asked, key) is not None
    }
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    table = Table(title=f"{WORKERS} workers, {asked.seeds} seeds")
    for column in ("task", "codec", "mean", "worse by", "noise", "rate", "momentum", "steps", "arrives"):
        left = column in ("task", "codec", "arrives")
        table.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=column == "codec")
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    for task in asked.tasks:
        for one in compare(task, asked):
            rows.append(one)
            asked.json.write_text(json.dumps({"workers": WORKERS, "rows": rows}, indent=1))
            verdict = "yes" if one["arrives"] else f"no{': ' if one['fails'] else ''}{one['fails']}"
            figures = (f"{one[key]:.3f}" for key in ("mean", "worse_by", "noise", "rate", "momentum", "steps"))
            table.add_row(task, one["codec"], *figures, verdict)
            print(task, one["codec"], [round(result, 3) for result in one["results"]], flush=True)
    Console().print(table)
    save_records("convergence", records(rows), asked.share < 1 or asked.tuning or bool(asked.setting))
    return int(any(not one["arrives"] and not one["fails"] for one in rows))


if __name__ == "__main__":
    sys.exit(main())
