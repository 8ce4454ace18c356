"""What the batch host does while the steps run: pass a request to leave on to them and hold them to its deadline, and
end them when they hang."""

import argparse
import os
import sys
import time
from typing import Any, Dict, Optional

from launcher.host.attempt.context import Here
from launcher.host.attempt.drain import complete
from launcher.host.judge.hang import Silence
from launcher.host.record.heartbeats import Vigil, record_hang
from launcher.host.slurm import client
from megatron_rl.contract.codes import EXIT_FINISHED, SILENCE_VARIABLE
from megatron_rl.run_dir import read_json

TICK = 1.0  # seconds between looks at the run directory
REMIND = 5.0  # seconds between signals to steps that were asked to leave
LEARN = 10.0  # seconds over which Slurm is asked what a request to leave does not say
LAST_MOMENT = 5.0  # seconds before the deadline at which ranks that have not left are ended: `close` needs them
STACKS_LIMIT = 2.0  # seconds that the ranks of a hang have to write their stacks


def watch(here: Here, options: argparse.Namespace) -> int:
    """Until the script ends: have the steps leave when they are asked to, and end them when they hang."""
    script = os.getppid()
    watcher = Watcher(here, options, script)
    while os.getppid() == script:
        time.sleep(TICK)
        try:
            watcher.look(time.time())
        except (client.SlurmRefused, OSError) as error:  # a full disk, too, is no reason to watch no more
            print("the watch over the steps tries again: {}".format(error), file=sys.stderr)
    return EXIT_FINISHED


class Watcher:
    """Over the steps of one attempt. What it does is done once, unless Slurm did not hear it.

    Args:
        script: process id of the batch script.
    """

    def __init__(self, here: Here, options: argparse.Namespace, script: int) -> None:
        self.here, self.options, self.script = here, options, script
        self.vigil = Vigil(here.attempt, float(os.environ.get(SILENCE_VARIABLE, "0")))
        self.silence: Optional[Silence] = None
        self.stacks_asked = self.ended = False
        self.asked = self.reminded = 0.0

    def look(self, now: float) -> None:
        """Raises SlurmRefused or OSError: this look came to nothing."""
        if not self.ended:
            self._look_for_hang(now)
        request = read_json(self.here.attempt.drain)
        if request is not None:
            self._obey(request, now)

    def _look_for_hang(self, now: float) -> None:
        attempt = self.here.attempt
        if self.silence is None and attempt.nodes.exists():  # the ranks are started next
            self.silence = self.vigil.look(now)
            if self.silence is not None:
                record_hang(attempt, self.silence)
        if not self.stacks_asked and (self.silence is not None or self._waited_in_vain()):
            client.signal_steps(self.here.job_id, "QUIT")
            self.stacks_asked = True
        if self.silence is not None:
            time.sleep(STACKS_LIMIT)
            self._end_steps()

    def _waited_in_vain(self) -> bool:
        """Whether a rank's collective timed out: it holds on for a moment, so that all can say where they are."""
        return any((read_json(path) or {}).get("waited") for path in self.here.attempt.errors())

    def _obey(self, request: Dict[str, Any], now: float) -> None:
        attempt = self.here.attempt
        self.asked = self.asked or time.monotonic()
        if not self.ended and request["deadline"] is not None and now >= request["deadline"] - LAST_MOMENT:
            print("the ranks have not left in time and are ended")
            self._end_steps()
        elif not (attempt.outcome.exists() or attempt.errors()) and time.monotonic() >= self.reminded + REMIND:
            self.reminded = time.monotonic()
            os.kill(self.script, self.options.interrupt)  # it may be waiting for something that a drain makes needless
            client.signal_steps(self.here.job_id, "USR1")
        if time.monotonic() < self.asked + LEARN:
            complete(self.here, self.options.notice)

    def _end_steps(self) -> None:
        client.kill_steps(self.here.job_id)
        self.ended = True
