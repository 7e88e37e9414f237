"""Sums of gradients as every rank of ``collectives.py`` and ``wire.py`` runs them, and the planner's picks of them."""
