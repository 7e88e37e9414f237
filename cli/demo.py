"""``meshwright demo``: a small GPT learns to write Python from the standard library's own source, on local ranks.

The ranks measure themselves for a few seconds, once. The plan is found on the spot for what they are, shown, trained
by, and held against what happened: what it promised of step, stages and memory (``Parallel.report``), and the loss of
the same run on one device in a plain PyTorch loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from .. import api
from ..compiler.plan.plan import Plan
from ..compiler.text import bytes_text, table
from ..costmodel.cluster import Cluster
from ..costmodel.files import write_atomically
from ..models.architectures import GPT
from ..runtime.profiling.cluster_profile import default_cluster
from ..runtime.profiling.trace import peak_bytes
from ..runtime.transport.launch import spawn_local

__all__ = ["run"]

VOCAB, LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH = 256, 4, 128, 4, 128, 16
STEPS = 200
LEARNING_RATE = 1e-3
CORPUS_BYTES = 4_000_000
WARM_UP = 3  # steps that are not timed: buffers and caches fill


def run(ranks: int = 4, steps: int | None = None, json_path: Path | None = None) -> dict[str, Any]:
    """Plan, train on ``ranks`` local ranks, compare with one device, sample; prints to stdout.

    Returns (and writes to ``json_path``) the figures: loss_first, loss_last, loss_single_device, predicted_step_s,
    measured_step_s, tokens_per_s, ranks, steps, the report (``Report.to_json``), and the plan's document.
    """
    steps = steps or STEPS
    begin = time.perf_counter()
    torch.set_num_threads(1)  # as each rank
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    model, corpus = _model(), _corpus()
    tokens, targets = _batch(corpus, 0)
    with _bar() as report:
        report("measuring these ranks", 0.0)
        cluster = Cluster.from_json(spawn_local("meshwright.cli.demo:measure_rank", ranks)[0])
        report("planning", 0.0)
        plan = api.plan(
            model, cluster, example_inputs=(tokens, targets), optimizer="AdamW", executable=True, progress=report
        )
    parameters = sum(p.numel() for p in model.parameters())
    _say(
        f"A GPT of {LAYERS} layers and {parameters / 1e6:.2f} M parameters learns from {len(corpus) / 1e6:.1f} MB of"
        f" Python's standard library, {BATCH} × {SEQUENCE} bytes a step.\n"
    )
    _say("\n".join([plan.explain(), *(f"  warning: {warning}" for warning in cluster.validate())]))

    _say(f"\nTraining: {steps} steps on {ranks} ranks")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the meter's profiler says on stderr when it starts and stops
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    results = spawn_local("meshwright.cli.demo:train_rank", ranks, (plan.to_json(), steps))
    trained = results[0]
    losses, measured_s = trained["losses"], trained["step_s"]
    tokens_per_s = BATCH * SEQUENCE / measured_s
    _say(f"  loss {losses[0]:.4f} → {losses[-1]:.4f}, {tokens_per_s:,.0f} tokens/s")

    single = _train_alone(corpus, steps)
    _say(f"\n{trained['report_text']}")
    if busy >= 0.5:
        _say(f"  other processes kept {busy:.1f} cores busy at the start: steps take longer than priced")

    _say("\nThe same run on one device, a plain PyTorch loop")
    difference = abs(losses[-1] - single[-1]) / abs(single[-1])
    rows = [
        [name, f"{mine:.6f}", f"{theirs:.6f}"]
        for name, mine, theirs in (("first loss", losses[0], single[0]), ("last loss", losses[-1], single[-1]))
    ]
    _say("\n".join(table(["", f"{ranks} ranks", "one device"], rows, "<>>")))
    _say(f"  the last losses differ by {100 * difference:.4f} %")

    model.load_state_dict({name: torch.from_numpy(value) for name, value in trained["state"].items()})
    _say("\nWhat it writes now")
    _say("\n".join("  │ " + line for line in _sample(model).split("\n")))
    _say(f"\n{time.perf_counter() - begin:.0f} s in all")

    figures = {
        "ranks": ranks,
        "steps": steps,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "loss_single_device": single[-1],
        "predicted_step_s": plan.prediction.step_s,
        "measured_step_s": measured_s,
        "tokens_per_s": tokens_per_s,
        "report": trained["report"],
        "plan": plan.to_json(),
    }
    if json_path is not None:
        write_atomically(json_path, json.dumps(figures, indent=1) + "\n")
    return figures


# ---- what every rank runs


def measure_rank() -> str:
    """The document of the Cluster that ``parallelize`` would plan on for these ranks; the same on every rank."""
    return default_cluster().to_json()


def train_rank(document: dict[str, Any], steps: int) -> dict[str, Any]:
    """``steps`` steps by the plan, the last of them metered. Its losses, seconds a step, the report; on rank 0 the
    weights."""
    plan, corpus = Plan.from_json(document), _corpus()
    tokens, targets = _batch(corpus, 0)
    parallel = api.parallelize(
        _model(),
        example_inputs=(tokens, targets),
        plan=plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
    )

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        last = parallel.session.step == steps - 1
        return float((parallel.metered_step if last else parallel.train_step)(tokens, targets))

    losses, seconds = _loop(step, corpus, steps, "training" if dist.get_rank() == 0 else "")
    state = {name: value.numpy() for name, value in parallel.full_state_dict().items()}
    report = parallel.report()
    return {
        "losses": losses, "step_s": seconds, "state": state, "report": report.to_json(), "report_text": report.text()
    }  # fmt: skip


def _train_alone(corpus: torch.Tensor, steps: int) -> list[float]:
    """The losses of the same steps on one device, without meshwright."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    losses, _ = _loop(step, corpus, steps, "one device")
    return losses


def _loop(
    step: Callable[[torch.Tensor, torch.Tensor], float], corpus: torch.Tensor, steps: int, title: str
) -> tuple[list[float], float]:
    """(losses, median seconds a step) of ``steps`` steps; shown as a bar if there is a title."""
    losses: list[float] = []
    seconds: list[float] = []
    with _bar() if title else contextlib.nullcontext(_silent) as report:
        for number in range(steps):
            tokens, targets = _batch(corpus, number)
            began = time.perf_counter()
            losses.append(step(tokens, targets))
            seconds.append(time.perf_counter() - began)
            rate = BATCH * SEQUENCE / seconds[-1]
            text = f"{title}  step {number + 1}/{steps}  loss {losses[-1]:.3f}  {rate:,.0f} tokens/s"
            report(f"{text}  {bytes_text(peak_bytes())}", (number + 1) / steps)
    return losses, median(seconds[WARM_UP:-1] or seconds)  # the last step may be metered


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(VOCAB, LAYERS, HIDDEN, HEADS, SEQUENCE)


# ---- data


def _corpus() -> torch.Tensor:
    """The source of the standard library's top-level modules, in order of name: uint8 [at most ``CORPUS_BYTES``]."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    if len(text) <= SEQUENCE + 1:
        raise ValueError(f"the demo learns from the standard library's source, but found none in {folder}")
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def _batch(corpus: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the bytes that follow them, int64 [BATCH, SEQUENCE]: equal on every rank for equal steps."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(corpus) - SEQUENCE - 1, (BATCH, 1), generator=generator)
    rows = corpus[starts + torch.arange(SEQUENCE + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@torch.no_grad()
def _sample(model: GPT, prompt: str = "    def ", length: int = 300, temperature: float = 0.6) -> str:
    """``length`` bytes after the prompt, drawn from the model."""
    generator = torch.Generator().manual_seed(0)
    model.eval()
    text = torch.tensor(list(prompt.encode()))[None]
    for _ in range(length):
        logits = model(text[:, -SEQUENCE:])[0, -1] / temperature
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        text = torch.cat([text, drawn[None]], dim=1)
    decoded = bytes(text[0].tolist()).decode(errors="replace")
    return "".join(c if c == "\n" or c.isprintable() else "·" for c in decoded.replace("\t", "    "))


# ---- the terminal


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str, fraction: float) -> None:
    """No terminal, no bar."""


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr that is gone afterwards; without a terminal a line for every tenth part."""
    if sys.stderr.isatty():
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeRemainingColumn())
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
            task = bar.add_task("", total=None)

            def draw(text: str, fraction: float) -> None:
                bar.update(task, description=text, total=1.0 if fraction else None, completed=min(fraction, 1.0))

            yield draw
        return
    tenth = [-1]

    def write(text: str, fraction: float) -> None:
        if int(fraction * 10) > tenth[0]:
            tenth[0] = int(fraction * 10)
            print(f"  {text}", file=sys.stderr, flush=True)

    yield write
