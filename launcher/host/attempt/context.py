"""The run and the job that the environment of a batch script names."""

import time
from typing import Dict

from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import write_json


class Refused(Exception):
    """This job cannot run this run; it is not started again."""


class Here:
    def __init__(self, environ: Dict[str, str]) -> None:
        self.run = RunDir(environ["MRL_RUN_DIR"])
        self.cluster = environ.get("MRL_CLUSTER", "")
        self.job_id = environ["SLURM_JOB_ID"]
        self.nodelist = environ.get("SLURM_JOB_NODELIST", "")
        self.given = int(environ.get("MRL_NODES_GIVEN", "0"))  # nodes of the allocation before any died; 0: none has
        self.succeeds = environ.get("MRL_SUCCEEDS")  # the job that submitted this one in its place
        self.restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self._attempt = environ.get("MRL_ATTEMPT")

    @property
    def attempt(self) -> Attempt:
        return self.run.attempt(int(self._attempt or 0))


def ask_to_leave(attempt: Attempt, cause: str, by: str) -> None:
    """Write the drain file. The first cause is the cause: what follows, follows from it. `draining.complete` adds the
    deadline, and the end of the job that Slurm has on record."""
    if not attempt.drain.exists():
        write_json(attempt.drain, {"cause": cause, "by": by, "at": time.time(), "deadline": None, "end": None})
