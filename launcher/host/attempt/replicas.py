"""Inference replicas: a step each, started again when it ends. A lost one takes neither the trainer nor its sisters
along."""

from typing import Dict, List

from launcher.host.attempt.slurm_steps import SlurmSteps
from launcher.host.process.processes import Child

RESTARTS = 5  # of each replica in one attempt
PAUSE_S = 5.0  # whatever ended it may pass


class Replicas:
    """The inference replicas of one attempt.

    Args:
        hosts: step of a replica -> its nodes.
    """

    def __init__(self, steps: SlurmSteps, hosts: Dict[str, List[str]]) -> None:
        self._steps, self._hosts = steps, hosts
        self._running: Dict[str, Child] = {name: steps.start(name, nodes) for name, nodes in hosts.items()}
        self._restarts = dict.fromkeys(hosts, 0)
        self._due: Dict[str, float] = {}

    def restart_ended(self, now: float) -> None:
        """Start those again that ended a moment ago. Raises OSError."""
        for name, child in list(self._running.items()):
            if child.exit_code() is not None and self._restarts[name] < RESTARTS:
                self._restarts[name] += 1
                self._due[name] = now + PAUSE_S
                del self._running[name]
                told = "replica {} ended; start {} of at most {} more"
                print(told.format(name, self._restarts[name], RESTARTS))
        for name in [name for name, at in self._due.items() if now >= at]:
            self._running[name] = self._steps.start(name, self._hosts[name])
            del self._due[name]
