"""Training a GPT over slow links: seconds to a target loss, of DistributedDataParallel, its hooks, and ours.

    sudo -E python benchmarks/slow_network.py [--quick] [--links hundred far] [--only NAME ...] [--json FILE]

Four ranks, links of 100 Mbit/s, without and with 50 ms of delay one way (``network``; Linux, root). A byte-level GPT of
10.8 million parameters on the text of the standard library's modules, AdamW; a step's compute is padded to half a
second by sleeping. Two things are measured and multiplied:

    steps to the target      on this machine, without links and padding: until the smoothed mean loss over the ranks is
                             at the target, which is what the exact sum has at 0.7 of --steps
    seconds per step         over the links, with padding, of --timed steps; of ours with a delay after as many steps as
                             the delay, so that each waits for an old mean

"ceiling": padded compute alone, with the exact sum's steps: what a network without cost would give. The columns are
seconds per step, the ceiling's over these, steps and seconds to the target, and the ceiling's seconds over these. Exit
status 1 where ours at its best is below 0.8 of the ceiling.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import meshwright as mw
import torch
import torch.distributed as dist
from convergence import GPT
from meshwright.runtime.transport.launch import spawn_local
from network.links import missing
from network.ranks import FAR_LINKS, run_over_links
from reporting.results import Record, save_records
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F

RANKS, SEQUENCE, BATCH, STEP_S = 4, 32, 1, 0.5
SMOOTHED = 10  # steps that one value of the loss is the mean of
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """kind: "ddp" (hook: "", "bf16" or "powersgd"), "alone", or "ours" (way: algorithm and code of the plan's wire).
    curve: the contender whose losses it has, up to rounding."""

    kind: str
    hook: str = ""
    way: tuple[str, str] = ("backend", "none")
    options: tuple[tuple[str, int], ...] = ()
    curve: str = ""


CEILING, EXACT = "ceiling", "ours exact"
CONTENDERS: dict[str, Contender] = {
    CEILING: Contender("alone", curve=EXACT),
    "DDP": Contender("ddp", curve=EXACT),
    "DDP, bf16 hook": Contender("ddp", hook="bf16"),
    "DDP, PowerSGD hook": Contender("ddp", hook="powersgd"),
    EXACT: Contender("ours"),
    "ours powersgd4": Contender("ours", way=("recursive_doubling", "powersgd4")),
    "ours 1bit": Contender("ours", way=("backend", "1bit")),
    "ours delay 4, powersgd4": Contender("ours", way=("recursive_doubling", "powersgd4"), options=(("delay", 4),)),
    "ours delay 4, 1bit": Contender("ours", way=("backend", "1bit"), options=(("delay", 4),)),
    "ours local 20": Contender("ours", options=(("local_steps", 20), ("delay", 10))),
}

# ---- on ranks


@cache
def text() -> torch.Tensor:
    files = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    return torch.cat([torch.tensor(list(file.read_bytes()), dtype=torch.uint8) for file in files])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    starts = torch.randint(len(text()) - SEQUENCE - 1, (RANKS * BATCH,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text()[s : s + SEQUENCE + 1] for s in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def model(quick: bool) -> nn.Module:
    torch.manual_seed(0)
    return GPT(*((64, 2) if quick else (384, 6)), SEQUENCE)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-4, betas=(0.9, 0.95))


@dataclass(frozen=True)
class Made:
    """A step: (global inputs, targets) → loss; and the parameters that its backward has gradients of."""

    step: Step
    parameters: list[torch.Tensor]


def ours(contender: Contender, quick: bool) -> Made:
    """Ours, the plan's wire as the contender has it."""
    x, y = batch(0)
    examples: dict[str, Any] = {"example_inputs": (x,), "targets": (y,), "loss_fn": loss_of}
    made = mw.plan(
        model(quick), mw.Cluster.local(RANKS), strategy={"dp": RANKS}, microbatches=1, zero=0, recompute="none",
        executable=True, cache=False, **examples,
    )  # fmt: skip
    (stage,) = made.stages
    algorithm, code = contender.way
    wires = tuple(replace(wire, algorithm=algorithm, compressor=code) for wire in stage.wire)
    parallel = mw.parallelize(
        model(quick), plan=replace(made, stages=(replace(stage, wire=wires),)), optimizer=make_optimizer,
        **dict(contender.options), **examples,
    )  # fmt: skip
    leaves = list(parallel.session.state.parameters.values())
    return Made(lambda x, y: parallel.train_step(x, targets=y), leaves)


def theirs(contender: Contender, quick: bool) -> Made:
    """DistributedDataParallel; or, as the ceiling, each rank alone."""
    alone = model(quick)
    wrapped: nn.Module = alone
    if contender.kind == "ddp":
        # its later sums start in callbacks: with several buckets in another order on each rank, which ends Gloo
        cap_mb = 1024 if contender.hook == "powersgd" else None
        wrapped = nn.parallel.DistributedDataParallel(alone, bucket_cap_mb=cap_mb)
        if contender.hook == "bf16":
            # by another name: torch refuses it by its own on Gloo, where it runs, too
            wrapped.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
        elif contender.hook:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer, rank = make_optimizer(alone.parameters()), dist.get_rank()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(wrapped(x.chunk(RANKS)[rank]), y.chunk(RANKS)[rank])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Made(step, list(alone.parameters()))


def make(name: str, quick: bool) -> Made:
    """A contender."""
    contender = CONTENDERS[name]
    return (ours if contender.kind == "ours" else theirs)(contender, quick)


def curves(names: Sequence[str], steps: int, quick: bool) -> dict[str, list[float]]:
    """Of each contender the mean loss over the ranks, step by step."""
    found = {}
    for name in names:
        step = make(name, quick).step
        losses = torch.stack([step(*batch(index)).reshape(()) for index in range(steps)])
        dist.all_reduce(losses)
        found[name] = (losses / RANKS).tolist()
    return found


def padding(quick: bool) -> float:
    """Seconds to sleep in a step of compute alone, on all ranks at once, for it to take ``STEP_S``: ranks that sleep by
    turns are in each other's way less than their bare compute is, so these seconds are found by trying."""
    pad_s = 0.0
    for _ in range(4):
        pad_s = max(pad_s + STEP_S - pace(slowed(make(CEILING, quick), pad_s), 2, 6), 0.0)
    return pad_s


def pace(step: Step, before: int, count: int) -> float:
    """Seconds of a step, of the slowest rank: the mean of ``count`` that follow ``before`` others."""
    for index in range(before):
        step(*batch(index))
    dist.barrier()
    started = time.perf_counter()
    for index in range(count):
        step(*batch(index))
    seconds = torch.tensor((time.perf_counter() - started) / count)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def slowed(made: Made, pad_s: float) -> Step:
    """The step with sleep: a third before the forward, the rest before each gradient, in the share of its elements."""
    trained = [x for x in made.parameters if x.requires_grad]
    share = pad_s * 2 / 3 / sum(x.numel() for x in trained)

    def sleeper(seconds: float) -> Callable[[torch.Tensor], None]:
        return lambda grad: time.sleep(seconds)

    for x in trained:
        x.register_hook(sleeper(share * x.numel()))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        time.sleep(pad_s / 3)
        return made.step(x, y)

    return step


def timed(names: Sequence[str], steps: int, quick: bool) -> dict[str, float]:
    """Of each contender the seconds of a step, of the slowest rank; "padding": those slept."""
    found = {"padding": padding(quick)}
    for name in names:
        step, options = slowed(make(name, quick), found["padding"]), dict(CONTENDERS[name].options)
        every = options.get("local_steps", 1)
        before = 2 + (options.get("delay", 0) if every == 1 else every)
        found[name] = pace(step, before, max(steps, every))
    return found


# ---- the table


def smoothed(losses: Sequence[float]) -> list[float]:
    """Means over ``SMOOTHED`` steps up to each."""
    return [sum(losses[max(0, i + 1 - SMOOTHED) : i + 1]) / min(i + 1, SMOOTHED) for i in range(len(losses))]


def steps_to(losses: Sequence[float], target: float) -> int | None:
    """How many steps it takes; None: more than there were."""
    reached = (index + 1 for index, loss in enumerate(smoothed(losses)) if index + 1 >= SMOOTHED and loss <= target)
    return next(reached, None)


def rows_of(seconds: dict[str, float], losses: dict[str, list[float]], target: float) -> list[dict[str, Any]]:
    """What the table shows of one kind of links."""
    ceiling = steps_to(losses[EXACT], target)
    assert ceiling is not None
    best = seconds[CEILING] * ceiling
    rows = []
    for name in seconds:
        if name == "padding":
            continue
        steps = steps_to(losses[CONTENDERS[name].curve or name], target)
        whole = None if steps is None else steps * seconds[name]
        rows.append({"contender": name, "step_s": seconds[name], "rate": seconds[CEILING] / seconds[name],
                     "steps": steps, "target_s": whole, "share": 0.0 if whole is None else best / whole})  # fmt: skip
    return rows


def table_of(links: str, rows: Sequence[dict[str, Any]], target: float) -> Table:
    """For people."""
    rate, delay_s = FAR_LINKS[links]
    table = Table(
        title=f"{rate / 1e6:.0f} Mbit/s, {1e3 * delay_s:.0f} ms, {RANKS} ranks, to {target:.3f} nats per byte"
    )
    for column in ("contender", "step s", "of ceiling", "steps", "to target s", "of ceiling "):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for row in rows:
        late = row["steps"] is None
        table.add_row(
            row["contender"], f"{row['step_s']:.2f}", f"{row['rate']:.2f}", "-" if late else str(row["steps"]),
            "-" if late else f"{row['target_s']:.0f}", f"{row['share']:.2f}",
        )  # fmt: skip
    return table


def records(links: str, rows: Sequence[dict[str, Any]]) -> list[Record]:
    """Per contender: seconds of a step, and its share of the ceiling per step and to the target loss; ours are held
    against the best of DistributedDataParallel's."""
    rate, delay_s = FAR_LINKS[links]
    where = f"{rate / 1e6:.0f} Mbit/s" + (f" with {1e3 * delay_s:.0f} ms" if delay_s else "")
    peers = [row for row in rows if row["contender"].startswith("DDP")]
    best = max(peers, key=lambda row: float(row["share"]), default=None)
    found = []
    for row in rows:
        name, ours = row["contender"], row["contender"].startswith("ours") and best is not None
        found.append(Record(f"{name}, {where}: step", row["step_s"], "s", 2))
        found.append(Record(f"{name}, {where}: per step", row["rate"], "of the ceiling", 2))
        reached = row["share"] if row["steps"] is not None else None
        found.append(Record(
            f"{name}, {where}: to the loss", reached, "of the ceiling", 2, None, best["contender"] if ours else "",
            best["share"] if ours else None, "more", "" if reached is not None else "not reached",
        ))  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds to a target loss over slow links.")
    parser.add_argument("--quick", action="store_true", help="a small model, few steps: does it run, not how fast")
    parser.add_argument("--links", nargs="+", choices=sorted(FAR_LINKS), default=list(FAR_LINKS))
    parser.add_argument("--only", nargs="+", choices=sorted(CONTENDERS), help="these, the exact sum and the ceiling")
    parser.add_argument("--steps", type=int, default=80, help="of the loss curves")
    parser.add_argument("--timed", type=int, default=5, help="steps that are timed")
    parser.add_argument("--json", type=Path, default=Path("out/slow_network.json"))
    options = parser.parse_args()
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    names = [name for name in CONTENDERS if not options.only or name in (*options.only, CEILING, EXACT)]
    steps, count = (40, 2) if options.quick else (options.steps, options.timed)
    alone = list(dict.fromkeys(CONTENDERS[name].curve or name for name in names if name != CEILING))
    losses = spawn_local("slow_network:curves", RANKS, (alone, steps, options.quick))[0]
    target = smoothed(losses[EXACT])[int(0.7 * steps)]
    found: dict[str, Any] = {"target": target, "losses": losses, "links": {}}
    for links in options.links:
        seconds = run_over_links("slow_network:timed", (names, count, options.quick), RANKS, links, timeout_s=600)
        rows = rows_of(seconds, losses, target)
        found["links"][links] = {"padding_s": seconds["padding"], "rows": rows}
        Console(width=110).print(table_of(links, rows, target))
        save_records("slow_network", records(links, rows), options.quick)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1))
    best = [
        max(row["share"] for row in one["rows"] if row["contender"].startswith("ours"))
        for one in found["links"].values()
    ]
    return 0 if options.quick or min(best) >= 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
