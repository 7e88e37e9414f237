"""From a PyTorch model to a graph of layers."""
