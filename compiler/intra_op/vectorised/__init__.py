"""Sections and tables of many cases at once: arrays with a leading axis over (mesh, microbatches)."""
