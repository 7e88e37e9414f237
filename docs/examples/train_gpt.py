"""Train a small GPT on the standard library's own source, byte by byte, by a plan found on the spot.

torchrun --nproc-per-node 2 train_gpt.py --steps 50
python train_gpt.py --steps 3            # one rank is a world too
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path

import meshwright as mw
import torch
import torch.distributed as dist
from meshwright.models import GPT

BATCH, SEQUENCE = 16, 64


def text(num_bytes: int = 1 << 18) -> torch.Tensor:
    """uint8 [num_bytes]: sources of the standard library, the same on every rank of a machine."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= num_bytes:
            break
    return torch.frombuffer(found[:num_bytes], dtype=torch.uint8)


def batch(data: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 tokens and targets [BATCH, SEQUENCE]: targets are one byte further."""
    starts = torch.randint(len(data) - SEQUENCE - 1, (BATCH,), generator=generator)
    rows = torch.stack([data[start : start + SEQUENCE + 1] for start in starts.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--strategy", help="force a shape, such as tp2")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(vocab=256, layers=2, hidden=64, heads=4, sequence=SEQUENCE)
    data = text()
    training, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    generator = torch.Generator().manual_seed(1)  # every rank draws the same batches
    tokens, targets = batch(training, generator)

    parallel = mw.parallelize(
        model,
        example_inputs=(tokens, targets),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        clip_grad_norm=1.0,
        strategy=options.strategy,
    )
    main_rank = dist.get_rank() == 0
    if main_rank:
        for stage in parallel.plan.stages:
            print(
                "devices", stage.devices, "mesh", stage.mesh_shape, "layers", [chunk.layers for chunk in stage.chunks]
            )
    metrics = mw.MetricsLogger(parallel, every=10)
    for _ in range(options.steps):
        metrics.on_step(parallel.train_step(*batch(training, generator)))

    tokens, targets = batch(held_out, generator)
    logits = parallel.eval()(tokens)  # whole, on every rank
    parallel.train()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    report = parallel.report()
    if main_rank:
        print(f"held out: loss {loss:.3f}")
        print(f"predicted {report['predicted_step_s']:.4f} s a step, measured {report['measured_step_s']:.4f} s")

    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)  # one folder for all
        saved = parallel.save_checkpoint(shared[0])
        if main_rank:
            print("checkpoint:", sorted(path.name for path in saved.iterdir()))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
