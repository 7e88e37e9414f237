"""The frontend: it turns a PyTorch model into a graph, and the graph into layers."""
