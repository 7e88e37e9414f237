"""Seconds and bytes of one choice on one mesh."""
