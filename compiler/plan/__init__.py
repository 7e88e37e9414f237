"""The plan: its document, its validation, and the local programs that it lowers to."""
