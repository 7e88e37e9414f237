"""Sums over ranks by algorithm: what every rank of ``benchmarks/collectives.py`` runs."""
