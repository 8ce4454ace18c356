"""What is kept of a run: read into typed values once, written as records.

reading      records that a decision needs: what cannot be read is an error of the file system
ledger       attempts.jsonl
evidence     what an attempt left behind -> judge.evidence
logs         the ends of logs, and what srun and slurmstepd say in them
heartbeats   of the ranks, from time to time
accounting   pure: where every GPU-second went;  goodput reads and writes it
submissions  the user's index of runs
striping     the folder of the checkpoints, and how Lustre lays out what is in it
"""
