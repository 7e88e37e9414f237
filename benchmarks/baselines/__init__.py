"""A training step written by hand, as a person would write it, and ours beside it, on the same ranks and in turns."""
