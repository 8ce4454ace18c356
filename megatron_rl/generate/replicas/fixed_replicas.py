"""Addresses of the replicas that hold another model than the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_rl.contract.paths import FIXED, Attempt, RunDir
from megatron_rl.generate.engine.openai import Endpoint
from megatron_rl.generate.replicas.links import Roster
from megatron_rl.generate.replicas.wire import digest_of

Running = Callable[[], Sequence[Endpoint]]
"""Returns the endpoints of the replicas that run now; another start of one has another endpoint. It reads files, and
raises FixedModelLost."""


class FixedModelLost(RuntimeError):
    """All replicas of a model are given up: the run ends."""


def running_replicas(run_dir: RunDir, attempt: Attempt, kind: str, answer_limit_s: float) -> Running:
    """Look for the replicas of a kind again and again. answer_limit_s: seconds that one answer may take."""
    roster, digest = Roster(attempt, kind), digest_of(run_dir.resolved)

    def running() -> list[Endpoint]:
        found = roster.read()
        if found.given_up is not None:
            raise FixedModelLost(f"all replicas of the {FIXED[kind]} are given up: {found.given_up}")
        urls = (f"http://{each.host}:{each.port}/v1" for each in found.addresses if each.digest == digest)
        return [Endpoint(url, kind, token_file=run_dir.token, timeout_s=answer_limit_s) for url in urls]

    return running
