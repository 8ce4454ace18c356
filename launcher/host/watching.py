"""What the batch host does while the steps run: pass a request to leave on to them, and hold them to its deadline."""

import argparse
import os
import sys
import time

from launcher.host import slurm
from launcher.host.here import Here
from megatron_rl.run_dir import EXIT_FINISHED, read_json

TICK = 1.0  # seconds between looks at the run directory
REMIND = 5.0  # seconds between signals to steps that were asked to leave
LAST_MOMENT = 5.0  # seconds before the deadline at which ranks that have not left are ended: `close` needs them


def watch(here: Here, options: argparse.Namespace) -> int:
    """Until the script ends: pass a drain file on to the script and its steps, and hold them to its deadline."""
    attempt, script = here.attempt, os.getppid()
    reminded, ended = 0.0, False
    while os.getppid() == script:
        time.sleep(TICK)
        request = read_json(attempt.drain)
        if request is None:
            continue
        try:
            if not ended and request["deadline"] is not None and time.time() >= request["deadline"] - LAST_MOMENT:
                print("the ranks have not left in time and are ended")
                slurm.kill_steps(here.job_id)
                ended = True
            elif not (attempt.outcome.exists() or attempt.errors()) and time.monotonic() >= reminded + REMIND:
                reminded = time.monotonic()
                os.kill(script, options.interrupt)  # it may be waiting for something that a drain makes needless
                slurm.signal_steps(here.job_id, "USR1")
        except slurm.SlurmRefused as error:
            print("could not reach the steps, trying again: {}".format(error), file=sys.stderr)
    return EXIT_FINISHED
