"""meshwright: an auto-parallelization compiler for PyTorch."""
