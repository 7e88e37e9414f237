"""Train a LightningModule by a plan: ``fit`` takes its ``training_step`` and ``configure_optimizers``. Copy it and
change it.

torchrun --nproc-per-node 2 train_lightning.py --steps 200
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from typing import Any

import meshwright as mw
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate
from train_gpt import text

try:
    from lightning import LightningModule
except ImportError:  # what follows needs nothing else of it
    LightningModule = nn.Module

SEQUENCE = 32


class Step(nn.Module):
    """A LightningModule whose forward takes the tensors of a batch and returns the loss of its ``training_step``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        result = self.module.training_step(batch, 0)
        return result["loss"] if isinstance(result, Mapping) else result


def configured(module: nn.Module) -> tuple[torch.optim.Optimizer, Any, str]:
    """The optimizer and the schedule (or None) of ``configure_optimizers``, and "step" or "epoch": when it goes on."""
    found = module.configure_optimizers()
    if isinstance(found, tuple) and len(found) == 2:
        found = {"optimizer": found[0][0], "lr_scheduler": found[1][0]}
    if not isinstance(found, Mapping):
        found = {"optimizer": found[0] if isinstance(found, list) else found}
    schedule, interval = found.get("lr_scheduler"), "epoch"
    if isinstance(schedule, Mapping):
        schedule, interval = schedule["scheduler"], schedule.get("interval", "epoch")
    if len(found["optimizer"].param_groups) > 1:
        raise ValueError("fit takes one group of parameters, but got several; give parallelize an optimizer")
    return found["optimizer"], schedule, interval


def fit(
    module: nn.Module, data: Dataset[Any], batch_size: int, steps: int, folder: str, seed: int = 0, **plan: Any
) -> dict[str, torch.Tensor]:
    """Train for so many steps, with a log in ``folder``; the module's weights afterwards, on rank 0.

    plan: further keywords of ``meshwright.parallelize``, such as ``strategy``.
    """
    told, schedule, interval = configured(module)
    known = inspect.signature(type(told)).parameters
    options = {name: value for name, value in told.defaults.items() if name in known}
    parallel = mw.parallelize(
        Step(module),
        example_inputs=tuple(default_collate([data[index] for index in range(batch_size)])),
        optimizer=lambda parameters: type(told)(parameters, **options),
        **plan,
    )
    loader = mw.distributed_loader(data, parallel, seed=seed)
    done = 0

    def follow() -> None:
        """Take the rate of the module's own optimizer, which its schedule has changed."""
        for ours, theirs in zip(parallel.optimizer.param_groups, told.param_groups, strict=True):
            ours["lr"] = theirs["lr"]

    follow()
    told.step()  # of no gradients: a schedule wants to see one before it goes on
    with mw.MetricsLogger(parallel, folder, every=max(1, steps // 10)) as metrics:
        while done < steps:
            for batch in loader:
                loss = parallel.train_step(*batch)
                metrics.on_step(loss)
                done += 1
                if schedule is not None and interval == "step":
                    schedule.step()
                    follow()
                if done == steps:
                    break
            if schedule is not None and interval == "epoch":
                schedule.step()
                follow()
    return {name.removeprefix("module."): value for name, value in parallel.full_state_dict().items()}


class ByteModel(LightningModule):
    """Predicts the next byte from the ones before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.encoder = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embed(tokens), mask, is_causal=True))

    def training_step(self, batch: tuple[torch.Tensor, ...], index: int) -> torch.Tensor:
        tokens, targets = batch
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train, and compare with the module as it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="runs/lightning")
    parser.add_argument("--strategy", help="force a shape, such as tp2")
    options = parser.parse_args()
    torch.manual_seed(0)
    whole = text().long()
    pieces = whole[: len(whole) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    data = TensorDataset(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())
    module = ByteModel()
    before = float(Step(module)(*data[:64]).detach())
    weights = fit(module, data, 32, options.steps, options.folder, strategy=options.strategy)
    if dist.get_rank() == 0:
        module.load_state_dict(weights)
        after = float(Step(module)(*data[:64]).detach())
        print(f"loss {before:.2f} → {after:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
