"""Layers on a mesh as one numeric problem: sections, stages, and their costs."""
