"""Schedules, and the dynamic program over layers and devices. It knows tables, no graph."""
