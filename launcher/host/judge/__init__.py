"""Pure: what an attempt left behind -> how it ended, why, and what becomes of the job.

evidence   what is known of an attempt that ended, read once (launcher.host.record.evidence)
verdict    evidence -> how it ended
causes     Slurm's record -> why it was asked to leave, or was ended
hang       heartbeats -> the rank that the others wait for
nodes      reports, plan -> which nodes are unfit, which host does which step
policy     history, verdict -> what becomes of the job
sentence   the ledger's end -> one line for the user
"""
