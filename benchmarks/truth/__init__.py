"""The parts of ``accuracy.py``: trials, their models, what each rank runs, error statistics and tables."""
