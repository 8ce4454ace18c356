"""Exit codes, causes, outcomes, and what two sides must agree on in time, signals and environment."""

from __future__ import annotations

import signal

# Exit codes
EXIT_FINISHED = 0
EXIT_CRASHED = 1
EXIT_USAGE = 2  # of the command line itself
EXIT_UNKNOWN = 3  # of `mrl`: Slurm cannot be asked, so the answer is not known
EXIT_DRAINED = 75  # of a rank: saved, resume me
EXIT_CONFIG = 78  # of a rank: bad configuration, never retried
EXIT_INTERRUPTED = 130  # of the command line: Ctrl-C, saved

# Causes of a drain (Drain.cause), and why an attempt ended (AttemptEnd.cause). A local run may have others: the name of
# the signal that its mrl-submit or its supervisor got, in words.
CANCELLED = "cancelled"  # somebody wants it to stop: never requeued
REQUEUE = "requeue"
PREEMPTED = "preempted"
TIME_LIMIT = "time limit"
NODE_FAILURE = "node failure"
BAD_NODES = "bad nodes"  # too few passed the health check
SIGNALLED = "signal"  # by somebody, and Slurm's record does not say why

# How an attempt ended. Rank 0 writes the first two (Outcome), the ledger has them all (AttemptEnd).
FINISHED = "finished"
DRAINED = "drained"
CRASHED = "crashed"
MISCONFIGURED = "misconfigured"
LOST = "lost"  # whoever had to record the end was killed, and the ranks have left no word of it
STOPPED = "stopped"  # drained because somebody wanted the run to stop

# What becomes of an inference replica while its attempt goes on (ReplicaState.state)
REPLICA_RUNNING = "running"
REPLICA_WAITING = "waiting"  # it ended, and is started again in a moment
REPLICA_GIVEN_UP = "given up"  # it ended too often, or would end so again

# Heartbeats
HEARTBEAT_S = 10.0  # seconds between heartbeats, at most
HEARTBEAT_LEFT = "left"  # phase of the last heartbeat of a rank that leaves in order
HEARTBEAT_WAIT = "waiting for the other ranks"  # phase of a rank that waits for the others

# Signals from the host side to the ranks
DRAIN_SIGNAL = signal.SIGUSR1  # look at the drain file and leave
STACKS_SIGNAL = signal.SIGQUIT  # write down where every thread is

HOST_TRIES = 5  # starts in a row that come to nothing because of the host side: then the job is held

# Deadlines, in seconds. Of each pair the later one is computed, so that its order cannot be lost.

# Before Drain.deadline the host side ends ranks that are still there: it needs the rest to close the attempt.
LAST_MOMENT_S = 5.0
# Before Drain.deadline the ranks are done, or have given up what does not fit: or they are ended over it.
MARGIN_S = LAST_MOMENT_S + 1.0

# From STACKS_SIGNAL until the host side ends the ranks of a hang.
STACKS_LIMIT_S = 2.0
# That a rank whose collective timed out holds on: the host side has to find its error file and to send STACKS_SIGNAL.
STACKS_S = STACKS_LIMIT_S + 2.0

# That a rank which leaves early waits for rank 0's outcome, without which its exit would look like a crash.
OUTCOME_PATIENCE_S = 5.0
# That a rank whose work fails while it is asked to leave waits before it reports an error. Ranks are not killed all at
# once, and what failed may be the connection to one that was: then this one is killed too before it reports a crash.
KILLED_TOO_S = 3.0

# Environment
RUN_DIR_VARIABLE = "MRL_RUN_DIR"  # the run, by the name that its script knows it by
CLUSTER_VARIABLE = "MRL_CLUSTER"  # name of the cluster profile
ATTEMPT_VARIABLE = "MRL_ATTEMPT"  # number of the attempt
STEP_VARIABLE = "MRL_STEP"  # step of the job that a process belongs to: train, infer-0, ...
SUCCEEDS_VARIABLE = "MRL_SUCCEEDS"  # id of the job that submitted this one in its place
START_VARIABLE = "MRL_START"  # how often this replica was started in this attempt before, from 0
PARENT_VARIABLE = "MRL_PARENT_PID"  # process without which a rank ends at once
CACHE_VARIABLE = "MRL_CACHE"  # folder for what is costly to make and may be lost
SILENCE_VARIABLE = "MRL_SILENCE_S"  # of the ranks and of what watches them: job.silence_limit_s
# Of every process that draws problems: some tasks are drawn in the order of a set.
HASH_SEED = {"PYTHONHASHSEED": "0"}
