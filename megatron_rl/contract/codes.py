"""Exit codes, causes, outcomes, and the deadlines, signals and environment variables that two sides share."""

from __future__ import annotations

import signal

# Exit codes
EXIT_FINISHED = 0
EXIT_CRASHED = 1
EXIT_USAGE = 2  # of the command line: bad usage
EXIT_UNKNOWN = 3  # of `mrl`: Slurm does not answer, so the state is unknown
EXIT_DRAINED = 75  # of a rank: saved, to be resumed
EXIT_CONFIG = 78  # of a rank: bad configuration, never retried
EXIT_INTERRUPTED = 130  # of the command line: Ctrl-C, saved

# Causes of a drain (Drain.cause) and of the end of an attempt (AttemptEnd.cause). A local run may have others: the name
# of the signal that mrl-submit or the supervisor received.
CANCELLED = "cancelled"  # a user stops the run: never requeued
REQUEUE = "requeue"
PREEMPTED = "preempted"
TIME_LIMIT = "time limit"
NODE_FAILURE = "node failure"
BAD_NODES = "bad nodes"  # too few passed the health check
SIGNALLED = "signal"  # signalled for a reason that Slurm's record does not contain

# How an attempt ended. Rank 0 writes the first two (Outcome); the ledger has all of them (AttemptEnd).
FINISHED = "finished"
DRAINED = "drained"
CRASHED = "crashed"
MISCONFIGURED = "misconfigured"
LOST = "lost"  # the process that records the end was killed, and the ranks left no record
STOPPED = "stopped"  # drained because a user stopped the run

# State of an inference replica during its attempt (ReplicaState.state)
REPLICA_RUNNING = "running"
REPLICA_WAITING = "waiting"  # it ended and will be restarted
REPLICA_GIVEN_UP = "given up"  # it ended too often, or would end the same way again
REPLICA_FINISHED = "finished"  # the run needs it no more

# Heartbeats
HEARTBEAT_S = 10.0  # seconds between heartbeats, at most
HEARTBEAT_LEFT = "left"  # phase of the last heartbeat of a rank that leaves cleanly
HEARTBEAT_WAIT = "waiting for the other ranks"  # phase of a rank that waits for the others

# Signals from the host side to the ranks
DRAIN_SIGNAL = signal.SIGUSR1  # read the drain file and leave
STACKS_SIGNAL = signal.SIGQUIT  # write the stacks of all threads

HOST_TRIES = 5  # consecutive starts that fail on the host side before the job is held

# Deadlines, in seconds. The later one of each pair is computed from the earlier one, which keeps their order.

# The host side kills remaining ranks this long before Drain.deadline: it needs the time to close the attempt.
LAST_MOMENT_S = 5.0
# The ranks finish, or abandon work that does not fit, this long before Drain.deadline. Otherwise they are killed.
MARGIN_S = LAST_MOMENT_S + 1.0

# Time from STACKS_SIGNAL until the host side kills hanging ranks.
STACKS_LIMIT_S = 2.0
# Time that a rank waits after a collective timed out: the host side must find its error file and send STACKS_SIGNAL.
STACKS_S = STACKS_LIMIT_S + 2.0

# Time that a rank which leaves early waits for rank 0's outcome, without which its exit would look like a crash.
OUTCOME_PATIENCE_S = 5.0
# Time that a rank waits before it reports an error during a drain. Ranks are not killed at the same instant, and the
# error may be a lost connection to a killed rank: then this rank is killed too before it reports a crash.
KILLED_TOO_S = 3.0

# Environment
RUN_DIR_VARIABLE = "MRL_RUN_DIR"  # run directory, by the path in its script
CLUSTER_VARIABLE = "MRL_CLUSTER"  # name of the cluster profile
ATTEMPT_VARIABLE = "MRL_ATTEMPT"  # number of the attempt
STEP_VARIABLE = "MRL_STEP"  # step of the job that a process belongs to: train, infer-0, ...
SUCCEEDS_VARIABLE = "MRL_SUCCEEDS"  # id of the job that this one replaces
START_VARIABLE = "MRL_START"  # number of earlier starts of this replica in this attempt
PARENT_VARIABLE = "MRL_PARENT_PID"  # process id of the parent; a rank ends with it
IMAGE_VARIABLE = "MRL_CONTAINER_IMAGE"  # container image of the ranks
CACHE_VARIABLE = "MRL_CACHE"  # folder for caches
SILENCE_VARIABLE = "MRL_SILENCE_S"  # job.silence_limit_s, for the ranks and their watchers
# For every process that draws problems: some tasks are drawn in the order of a set.
HASH_SEED = {"PYTHONHASHSEED": "0"}
