"""The code of a run: its snapshot, the files that belong in it, and their state in git."""
