"""What benchmarks leave behind: the raw document of a run, records of its figures, and charts."""
