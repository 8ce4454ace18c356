"""The rank's side of one process that scores answers (worker.py). For one asyncio loop."""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from megatron_rl.agent.own_process.api import Unusable
from megatron_rl.agent.own_process.printed import CHUNK, Printed
from megatron_rl.agent.own_process.worker import END, END_S, SIGNALLED
from megatron_rl.contract.children import how_ended, module_command

WORKER = "megatron_rl.agent.own_process.worker"
START_S = 600.0
"""Seconds to import the user's file, perhaps from a slow shared file system, with what it loads."""
GIVE_UP_S = 5.0
"""Seconds in which a coroutine must end when it is cancelled. One that does not has its process killed."""
LONGEST_REPLY = 2**24


class Late(Exception):
    """The function exceeded its limit."""


class Died(Exception):
    """The process ended while it scored this answer, and perhaps others."""

    def __init__(self, how: str, killed: bool) -> None:
        """killed: whether something outside killed it, such as the kernel's out-of-memory killer."""
        super().__init__(how)
        self.killed = killed


class Interrupted(Exception):
    """The process ended before the answer's turn."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of a function for one answer."""

    said: Mapping[str, Any]
    """Line of the worker: see worker.py."""
    printed: str
    """Text that it printed meanwhile."""
    alone: bool
    """Whether it scored no other answer meanwhile."""


@dataclass(slots=True)
class _Asked:
    reply: asyncio.Future[Reply]
    limit_s: float = START_S
    said: Mapping[str, Any] | None = None
    printed: str | None = None
    alone: bool = True


class OwnProcess:
    """One start of a worker."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        self._process = process
        self._numbers = count(1)
        self._asked: dict[int, _Asked] = {}
        self._watched: asyncio.TimerHandle | None = None
        self._printed = Printed(re.compile(b"\0" + mark.encode() + rb" (\d+)\n"), self._marked)
        self._reading: list[asyncio.Task[None]] = []
        self.described: Mapping[str, Any] = {}
        """First line of the worker."""
        self.ended = False
        self.turn_began: float | None = None
        """Time of the loop at which a plain function took the answer that it scores now."""

    @classmethod
    async def start(cls, file: Path, function: str) -> OwnProcess:
        """Start a worker that has imported the function. Raises Unusable."""
        mark = uuid4().hex
        job = {"parent": os.getpid(), "file": str(file), "function": function, "path": sys.path, "mark": mark}
        try:
            process = await asyncio.create_subprocess_exec(
                *module_command(WORKER),
                json.dumps(job),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                limit=LONGEST_REPLY,
                start_new_session=True,  # Ctrl-C in a terminal is meant for the run
            )
        except OSError as error:
            raise Unusable(f"its process cannot be started: {error}") from error
        one = cls(process, mark)
        first = one._asked[0] = _Asked(asyncio.get_running_loop().create_future())
        one._reading = [asyncio.create_task(one._read_replies()), asyncio.create_task(one._read_printed())]
        try:
            async with asyncio.timeout(START_S):
                greeting = await first.reply
        except TimeoutError:
            await one.end()
            raise Unusable(f"it is not imported after {START_S:g} s") from None
        except Died as error:
            raise Unusable(f"its process ended while it was imported ({error}){_below(one._printed.take())}") from error
        except BaseException:
            await one.end()
            raise
        if (why := greeting.said.get("unusable")) is not None:
            await one.end()
            lacks = greeting.said["lacks"]
            lacking = ImportError(why, name=lacks) if lacks is not None else None
            raise Unusable(f"{why}{_below(greeting.printed)}") from lacking
        one.described = greeting.said
        return one

    async def ask(self, positional: Sequence[Any], named: Mapping[str, Any], limit_s: float) -> Reply:
        """Return what the function does with these arguments. A plain function takes one answer at a time, in the order
        of the calls.

        Raises Late, Died and Interrupted. After Late the process has ended, unless its function is a coroutine that
        could be cancelled.
        """
        number, waits = next(self._numbers), self.described["waits"]
        asked = _Asked(asyncio.get_running_loop().create_future(), limit_s, alone=not (waits and self._asked))
        if waits:
            for each in self._asked.values():
                each.alone = False
        self._asked[number] = asked
        self._write((number, positional, named))
        if not waits:
            if len(self._asked) == 1:
                self._watch()
            return await asyncio.shield(asked.reply)
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(asked.reply)
        except TimeoutError:
            await self._give_up(number, asked)
            raise Late from None
        except asyncio.CancelledError:
            self._write((number, None, None))
            raise

    def _watch(self) -> None:
        """Begin the time of the answer whose turn it is."""
        if self._watched is not None:
            self._watched.cancel()
        self._watched = self.turn_began = None
        if self._asked and not self.ended:
            loop, asked = asyncio.get_running_loop(), next(iter(self._asked.values()))
            self.turn_began = loop.time()
            if asked.limit_s < math.inf:
                self._watched = loop.call_later(asked.limit_s, self._too_late, asked)

    def _too_late(self, asked: _Asked) -> None:
        if not asked.reply.done():
            asked.reply.set_exception(Late())
        self._ending = asyncio.create_task(self.end())

    async def _give_up(self, number: int, asked: _Asked) -> None:
        """Cancel a coroutine; if that does not end it, end the process."""
        self._write((number, None, None))
        with suppress(TimeoutError, Died):
            async with asyncio.timeout(GIVE_UP_S):
                await asyncio.shield(asked.reply)
            return
        await self.end()

    async def end(self) -> None:
        """Kill the worker with all that it has started."""
        self.ended = True
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, END)  # Popen.send_signal would reap it, which asyncio's watcher has to
        try:
            async with asyncio.timeout(2 * END_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.gather(*self._reading, return_exceptions=True)

    def printed(self) -> str:
        """Return what was printed since the last answer, for a process that has ended."""
        return self._printed.take()

    def _write(self, request: tuple[int, Any, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(request))

    async def _read_replies(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                said = json.loads(line)
                number = said.pop("number")
                self._asked[number].said = said
                self._deliver(number)
        finally:
            self.ended = True
            code = await self._process.wait()
            await self._reading[1]
            code = SIGNALLED - code if code > SIGNALLED else code
            died = Died(how_ended(code), killed=code == -signal.SIGKILL)
            in_turn = not self.described.get("waits", True)
            for place, asked in enumerate(self._asked.values()):
                if not asked.reply.done():
                    asked.reply.set_exception(Interrupted() if in_turn and place else died)
                    asked.reply.exception()  # its asker may be gone
            self._asked.clear()
            self._watch()

    async def _read_printed(self) -> None:
        assert self._process.stderr is not None
        while part := await self._process.stderr.read(CHUNK):
            self._printed.add(part)

    def _marked(self, number: int, printed: str) -> None:
        self._asked[number].printed = printed
        self._deliver(number)

    def _deliver(self, number: int) -> None:
        """Complete an answer whose reply and mark have both arrived."""
        asked = self._asked[number]
        if asked.said is not None and asked.printed is not None:
            del self._asked[number]
            if not asked.reply.done():
                asked.reply.set_result(Reply(asked.said, asked.printed, asked.alone))
            if self.turn_began is not None:
                self._watch()


def _below(printed: str) -> str:
    return f"\n{printed.rstrip()}" if printed.strip() else ""
