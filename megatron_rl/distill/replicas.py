"""The teacher's replicas, as the training ranks find them: their addresses in the attempt's folder."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.contract.paths import TEACHER, Attempt, RunDir
from megatron_rl.inference.openai import Endpoint
from megatron_rl.inference.replicas.links import Roster
from megatron_rl.inference.replicas.wire import digest_of

ROWS = 8
"""Sequences that a replica holds in its cache together."""


class NoTeacher(RuntimeError):
    """No replica of the teacher is left."""


class TeacherRoster:
    """Replicas of the teacher that run now."""

    def __init__(self, run_dir: RunDir, attempt: Attempt, answer_limit_s: float) -> None:
        """answer_limit_s: seconds that one answer may take."""
        self._roster = Roster(lambda: attempt.replicas(TEACHER), digest_of(run_dir.resolved))
        self._token_file, self._answer_limit_s = run_dir.token, answer_limit_s

    def __call__(self) -> Sequence[Endpoint]:
        """Return the endpoints of the replicas that have said where they answer; another start has another one. Reads
        files. Raises NoTeacher if all replicas are given up."""
        addresses, given_up = self._roster.read()
        if given_up is not None:
            raise NoTeacher(f"all replicas of the teacher are given up: {given_up}")
        return [
            Endpoint(
                url=f"http://{address.host}:{address.port}/v1",
                model="teacher",
                token_file=self._token_file,
                timeout_s=self._answer_limit_s,
            )
            for address in addresses
        ]
