"""Submission of runs: on this machine, to Slurm, in an allocation; and watching them."""
