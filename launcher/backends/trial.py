"""An environment tried out by a child process: the launcher has none of the libraries that environments need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from launcher.backends.child import Child
from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.contract.codes import EXIT_FINISHED

MODULE = "megatron_rl.agent.trial"


def tried(environment: EnvironmentConfig, problems: int) -> Iterator[dict[str, Any]]:
    """Each of its first problems, as they are tried: see `megatron_rl.agent.trial.tried`.

    Raises BadInput where it cannot be built, Failed where the process did not end well.
    """
    with Child(MODULE) as child:
        child.send(json.dumps({"environment": environment.model_dump(), "problems": problems}))
        child.end_input()
        yield from child.said()
        code = child.wait()
        if code != EXIT_FINISHED:
            raise child.failure(code)
