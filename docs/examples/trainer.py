"""A trainer in the manner of Hugging Face's, on ``parallelize``: a schedule, a log, evaluation, checkpoints that a
later run continues. Copy it and change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshwright as mw
import torch
from torch.utils.data import Dataset


@dataclass
class TrainingArguments:
    """What a run is told."""

    folder: str
    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    log_every: int = 10
    evaluate_every: int = 100
    save_every: int = 100
    keep: int = 2  # checkpoints
    seed: int = 0


class Trainer:
    """Trains a model whose forward takes the keys of a batch and returns an output with a ``loss``.

    plan: further keywords of ``meshwright.parallelize``, such as ``strategy`` or ``plan``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: TrainingArguments,
        training: Dataset[dict[str, torch.Tensor]],
        held_out: Dataset[dict[str, torch.Tensor]],
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        **plan: Any,
    ) -> None:
        self.arguments, self.held_out = arguments, held_out
        example = torch.utils.data.default_collate([training[index] for index in range(arguments.batch_size)])
        self.parallel = mw.parallelize(
            model,
            example_kwargs=example,
            optimizer=optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=arguments.learning_rate)),
            **plan,
        )
        warmup = max(arguments.warmup_steps, 1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.parallel.optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )
        self.loader = mw.distributed_loader(training, self.parallel, seed=arguments.seed)
        self.step = 0

    def train(self) -> float:
        """Train up to ``steps``, from the last checkpoint if there is one; the last loss."""
        arguments = self.arguments
        self._resume()
        loss = torch.tensor(float("nan"))
        with mw.MetricsLogger(self.parallel, arguments.folder, every=arguments.log_every) as metrics:
            while self.step < arguments.steps:
                for batch in self.loader:  # an epoch, or what is left of it
                    loss = self.parallel.train_step(batch)
                    self.schedule.step()
                    self.step += 1
                    metrics.on_step(loss)
                    if self.step % arguments.evaluate_every == 0:
                        metrics.on_evaluate(loss=self.evaluate())
                    if self.step % arguments.save_every == 0 or self.step == arguments.steps:
                        metrics.on_checkpoint(self.save())
                    if self.step == arguments.steps:
                        break
        return float(loss)

    def evaluate(self) -> float:
        """The mean loss on the held-out data, whose order does not matter."""
        losses = []
        self.parallel.eval()
        loader = torch.utils.data.DataLoader(self.held_out, batch_size=self.arguments.batch_size, drop_last=True)
        for batch in loader:
            losses.append(float(self.parallel(**batch).loss))
        self.parallel.train()
        return sum(losses) / len(losses)

    # ---- checkpoints

    def save(self) -> Path:
        """Write a checkpoint of this step, and remove the oldest ones."""
        return self.parallel.save_checkpoint(self.arguments.folder, extra=self._extra(), keep=self.arguments.keep)

    def _resume(self) -> None:
        if mw.latest_checkpoint(self.arguments.folder) is not None:
            saved = self.parallel.load_checkpoint(self.arguments.folder, extra=self._extra())
            self.step = saved["step"]

    def _extra(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "loader": self.loader, "step": self.step}
