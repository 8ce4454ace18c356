"""The rank's side of its programs: a nursery that is started when it is needed, and again when it has died or its
folder is gone."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from megatron_rl.agent.endpoint.agent import RolloutLost
from megatron_rl.agent.environments.program.nursery_wire import MESSAGE_BYTES, READY, Program, ProgramEnd, ProgramJob
from megatron_rl.agent.sandbox.image_root import UNPACK_S
from megatron_rl.contract.child import Child
from megatron_rl.contract.children import how_ended, module_command
from megatron_rl.contract.owned_folders import OwnedFolder
from megatron_rl.recipe.errors import ConfigurationError

logger = logging.getLogger(__name__)

NURSERY = "megatron_rl.agent.environments.program.nursery"
START_S = 300.0
"""Seconds for a nursery to import the user's module, perhaps from a slow shared file system."""
HAND_OVER_S = 10.0
"""Seconds for a nursery, which only forks, to take a job."""
LEAVE_S = 15.0
PASSING = (1, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a nursery that may work next time: an error such as a full disk, or a signal from outside. It reports
errors of the user's module."""


class ProgramRunner:
    def __init__(self, program: Program, variables: Mapping[str, str]) -> None:
        """variables: the whole environment of the program, except what a job adds."""
        self._program, self._variables = program, variables
        self._nursery: Child | None = None
        self._control: socket.socket | None = None
        self._folder: OwnedFolder | None = None
        self._starting = asyncio.Lock()

    async def run(self, job: ProgramJob) -> ProgramEnd:
        """Run the program and return its end. Cancellation ends the program.

        Raises:
            RolloutLost: a process that supervises the program was killed.
            ConfigurationError: the program can never run.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                await self._hand_over(theirs)
            except OSError as error:
                ours.close()
                raise RolloutLost(f"program: the process that starts programs does not answer: {error}") from error
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(json.dumps(job).encode() + b"\n")
            reported = await reader.read()
        except OSError:
            reported = b""  # the same as an end without a report
        finally:
            writer.transport.abort()
        if not reported:
            raise RolloutLost("program: the process that supervises the program was killed")
        return ProgramEnd(*json.loads(reported))

    async def close(self) -> None:
        await self._end_nursery()
        self._remove_folder()

    async def _end_nursery(self) -> None:
        nursery, control = self._nursery, self._control
        self._nursery = self._control = None
        if nursery is not None and control is not None:
            await asyncio.to_thread(_end, nursery, control)

    async def _hand_over(self, connection: socket.socket) -> None:
        """Give the nursery the end of a connection for one job. Raises OSError if it cannot take it."""
        async with self._starting:
            if self._nursery is not None and (why := self._why_useless(self._nursery)) is not None:
                logger.warning("the process that starts programs %s; it is started again", why)
                await self._end_nursery()
            if self._nursery is None:
                await self._start()
            assert self._control is not None  # it was started
            socket.send_fds(self._control, [b"1"], [connection.fileno()])

    def _why_useless(self, nursery: Child) -> str | None:
        if (code := nursery.exit_code()) is not None:
            return f"has ended ({how_ended(code)})"
        if self._folder is not None and self._folder.is_gone():
            return f"has lost its folder {self._folder.path}, which somebody has removed"
        return None

    async def _start(self) -> None:
        self._remove_folder()
        self._folder = OwnedFolder("programs")
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as undo:  # also upon a cancellation, such as by a drain
            undo.callback(self._remove_folder)
            undo.callback(control.close)
            with theirs:
                command = [*module_command(NURSERY), str(os.getpid()), str(theirs.fileno()), str(self._folder.path)]
                nursery = Child(command, self._variables, inherited=[theirs.fileno()])
            undo.callback(nursery.close)
            why_not = await self._prepared(control)
            if why_not is not None:
                code = await asyncio.to_thread(_end, nursery, control)
                ended = f"the process that starts programs has ended: {how_ended(code)}"
                if not why_not and code in PASSING:
                    raise RuntimeError(f"{ended}; its last lines stand above this in the log")
                raise ConfigurationError(why_not or ended)
            undo.pop_all()
        self._nursery, self._control = nursery, control

    def _remove_folder(self) -> None:
        """Delete the working directories of runs whose supervisors were killed; the others are gone."""
        if self._folder is not None:
            self._folder.close()
        self._folder = None

    async def _prepared(self, control: socket.socket) -> str | None:
        """Wait until a new nursery is ready and return None, or return why it cannot be; empty if it has ended."""
        limit_s = START_S if self._program.image is None else START_S + UNPACK_S
        control.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                await loop.sock_sendall(control, json.dumps(self._program).encode())
                answer = await loop.sock_recv(control, MESSAGE_BYTES)
        except TimeoutError:
            slow = "function: it is not imported" if self._program.image is None else "container: it is not unpacked"
            return f"environment.args.{slow} after {limit_s:g} s"
        except OSError:
            return ""
        control.settimeout(HAND_OVER_S)
        return None if answer == READY else answer.decode()


def _end(nursery: Child, control: socket.socket) -> int:
    """End a nursery, which may have been killed, and all that it has started; return its exit code."""
    # Its supervisors end their programs now. They are in its process group, and what a program has started is not:
    # killed too early, they would leave that behind. They all keep the other end of the socket open.
    deadline = time.monotonic() + LEAVE_S
    with control, suppress(OSError):
        control.settimeout(LEAVE_S)
        control.shutdown(socket.SHUT_WR)
        while control.recv(MESSAGE_BYTES):
            pass
    code = nursery.wait(max(0.0, deadline - time.monotonic()))
    nursery.close()
    return -signal.SIGKILL if code is None else code
