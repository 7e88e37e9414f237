"""The parts of ``peers.py``: models, the contenders on each rank, and the interleaved measurement."""
