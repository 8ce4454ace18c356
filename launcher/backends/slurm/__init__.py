"""Slurm as the login side uses it: submission, states of jobs, parsers of its output."""
