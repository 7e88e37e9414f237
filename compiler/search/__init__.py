"""The search for a plan: what was asked, the passes, the candidates, the bounds."""
