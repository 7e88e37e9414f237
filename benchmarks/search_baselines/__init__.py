"""Other ways to a plan (annealing, families such as Megatron-style grids), and models that the command line lacks."""
