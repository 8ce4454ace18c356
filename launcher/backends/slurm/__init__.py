"""Slurm as the login side uses it: submission, the state of jobs, what its commands print."""
