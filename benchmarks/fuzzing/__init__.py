"""Files that are wrong in every way: how they are made, and how they are read."""
