"""The code of a run, as mrl-submit copies it: its snapshot, the files that belong in it, and their state in git."""
