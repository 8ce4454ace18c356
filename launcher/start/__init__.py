"""Starts runs: which runs a request plans, their drafts, the submission to Slurm, and the start on this machine."""
