"""Our own ops: what PyTorch lacks, or what changes when its data is cut."""
