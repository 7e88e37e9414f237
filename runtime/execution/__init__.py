"""A training step on one rank: the session, the executor of the schedule, and the bound chunks."""
