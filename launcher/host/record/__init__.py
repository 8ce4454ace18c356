"""Records of a run: its files, read once into typed values.

identity    which run a directory is, its token, and its entry in the user's index of runs
ledger      attempts.jsonl
evidence    files of an attempt -> judge.verdict
log_tails   the ends of logs, with errors of srun and slurmstepd
heartbeats  heartbeats of the ranks, polled for hangs
presence    whether the run directory still exists
accounting  pure: the category of every GPU-second; goodput reads it
"""
