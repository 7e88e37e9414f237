"""Solvers of the intra-op problem: elimination, Lagrange multipliers, integer programs. They know no graph."""
