"""Pure: evidence about an attempt -> how it ended, why, and what happens to the job.

verdict           evidence, read once (launcher.host.record.evidence) -> how the attempt ended
causes            Slurm's record -> why it was asked to leave, or was ended
hang              heartbeats -> the rank that the others wait for
nodes             reports, plan -> unfit nodes, host of each step
policy            history, verdict -> what happens to the job
replica_restarts  an inference replica that ended -> whether and when it starts again
sentence          the ledger's end -> one line for the user
"""
