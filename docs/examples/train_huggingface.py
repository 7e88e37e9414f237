"""Train a Llama of Hugging Face on the standard library's own source, by a trainer of our own; run it again to go on.

torchrun --nproc-per-node 2 train_huggingface.py --steps 200
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from train_gpt import text
from trainer import Trainer, TrainingArguments
from transformers import LlamaConfig, LlamaForCausalLM

SEQUENCE = 64


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Pieces of a text, byte by byte, as a causal model of Hugging Face takes them."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // SEQUENCE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.data[index * SEQUENCE : (index + 1) * SEQUENCE].long()
        return {"input_ids": piece, "labels": piece}


def main() -> None:
    """Train, and say how it ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="runs/llama")
    parser.add_argument("--strategy", help="force a shape, such as tp2")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    data = text()
    cut = len(data) * 9 // 10
    arguments = TrainingArguments(
        options.folder, steps=options.steps, batch_size=16, evaluate_every=max(options.steps // 2, 1), save_every=100
    )
    trainer = Trainer(
        LlamaForCausalLM(config), arguments, Bytes(data[:cut]), Bytes(data[cut : cut + 64 * SEQUENCE]),
        strategy=options.strategy,
    )  # fmt: skip
    loss = trainer.train()
    if dist.get_rank() == 0:
        print(f"step {trainer.step}: loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
