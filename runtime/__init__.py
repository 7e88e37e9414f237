"""Binds a plan to real ranks over torch.distributed."""
