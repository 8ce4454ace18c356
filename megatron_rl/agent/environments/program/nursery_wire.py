"""Messages between a rank and the processes that run its programs: JSON objects over Unix sockets.

NamedTuples of the standard library, because the processes are forked by the hundred and start quickly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from megatron_rl.agent.sandbox.container import ContainerLimits, ProgramContainer
from megatron_rl.recipe.errors import task_location

OUTPUT_CHARACTERS = 4000
"""Characters that are kept of a program's output, from its end."""
ENDING_BYTES = 2**15
"""Bytes that are kept of its standard output, from its end; the reward is in their last line."""
MESSAGE_BYTES = 2**16
READY = b"ready"
"""Message of a nursery that has prepared the program; any other message says why it cannot."""


class ProgramImage(NamedTuple):
    """Container of a program, as `environment.args.container` asks for it."""

    path: str
    limits: ContainerLimits
    network: bool
    variables: dict[str, str]
    """All environment variables of the program but those of the image and of a job."""


class Program(NamedTuple):
    command: list[str] | None
    function: str | None
    files: list[str]
    """Files that are copied into every working directory under their own names."""
    image: ProgramImage | None = None
    """Image of its container; None: it runs without one."""


class ProgramJob(NamedTuple):
    problem: str
    """One JSON object on one line."""
    variables: dict[str, str]
    """Environment variables that this run adds, such as the key of its session."""
    limit_s: float
    grace_s: float = 5.0
    """Seconds from there until it is killed."""
    reaches: tuple[str, int] | None = None
    """Host and port that the program reaches in a container without a network, there as 127.0.0.1."""


class ProgramEnd(NamedTuple):
    code: int
    """Exit code, negative for a signal."""
    over_limit: bool = False
    ending: str = ""
    output: str = ""
    """End of its standard output and error output, as they arrived."""
    returned: Any = None
    raised: str = ""
    """Kind of the error of a function, with its place; empty if it returned."""
    unstarted: str = ""
    """Reason why the program could not be started; empty if it was."""
    exceeded: str = ""
    """Limit of its container that the program exceeded; empty if none."""


Rollout = Callable[[Any, Any], Awaitable[Any]]
"""async def rollout(client, problem) -> float | dict"""


class PreparedProgram(NamedTuple):
    command: list[str] | None
    rollout: Rollout | None
    files: dict[str, bytes]
    folder: str
    """Parent of all working directories."""
    container: ProgramContainer | None = None
    variables: Mapping[str, str] = {}
    """Environment variables within the container."""


def place(error: BaseException) -> str:
    """Return the place in the user's code where an error arose, such as ` (agent.py:12)`; empty if it is unknown."""
    where, _, _ = task_location(error).partition(": ")
    return f" ({where})" if where else ""
