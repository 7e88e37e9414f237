"""Checkpoints of a training session."""

from .training_state import CheckpointWriter, load_checkpoint, save_checkpoint

__all__ = ["CheckpointWriter", "load_checkpoint", "save_checkpoint"]
