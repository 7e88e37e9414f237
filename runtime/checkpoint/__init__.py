"""The state of a training session: kept in checkpoints, and taken over by a session of another plan."""

from .live_state import LiveState
from .training_state import CheckpointWriter, load_checkpoint, load_state, save_checkpoint

__all__ = ["CheckpointWriter", "LiveState", "load_checkpoint", "load_state", "save_checkpoint"]
