"""Predicted against measured, for ``accuracy.py``: trials and their models, what ranks run, errors, tables."""
