"""Parameters on one rank: state, gradients, optimizer shards, and the reductions between ranks."""
