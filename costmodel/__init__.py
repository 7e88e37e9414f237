"""Prices work (FLOPs, bytes, collective steps) on hardware. Knows no graph."""
