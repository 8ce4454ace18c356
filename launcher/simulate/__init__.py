"""Event simulation of a run: how long its steps take on each split of its nodes."""
