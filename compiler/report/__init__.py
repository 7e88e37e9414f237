"""Reports: a plan as text, why it has its choices, and its prediction against what was measured."""
