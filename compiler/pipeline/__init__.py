"""Schedules, regular pipelines, the dynamic program of irregular ones, and bounds. It knows tables, no graph."""
