"""From a model to a plan: capture, rules, the search, lowering. Starts no process group."""
