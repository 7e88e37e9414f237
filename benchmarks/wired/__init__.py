"""Compressed sums over links: what every rank of ``benchmarks/wire.py`` runs, and its tables."""
