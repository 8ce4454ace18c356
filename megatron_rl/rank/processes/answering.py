"""A process that answers numbered requests. For one asyncio loop.

stdin    requests in its language; the request None gives up the one of that number
stdout   a line of JSON per answer, {"number": NUMBER, ...}; number 0 is its greeting, once it has begun
stderr   text; after each answer a mark with its number, if the language has marks
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from subprocess import PIPE
from typing import Any

from megatron_rl.contract.children import how_ended
from megatron_rl.rank.processes.guard import END, END_S, code_of
from megatron_rl.rank.processes.printed import CHUNK, Printed

GIVE_UP_S = 5.0  # seconds in which a coroutine must end when it is cancelled. One that does not has its process killed
CLOSED_S = 1.0  # seconds until a process that has closed its output, and so cannot answer any more, is ended
LONGEST_REPLY = 2**26


class Late(Exception):
    """An answer exceeded its limit."""


class Died(Exception):
    """The process ended while it worked on this answer, and perhaps others."""

    printed = ""  # output of a process that ended before its greeting

    def __init__(self, how: str, killed: bool) -> None:
        """killed: whether something outside killed it, such as the kernel's out-of-memory killer."""
        super().__init__(how)
        self.killed = killed


class EndedBefore(Exception):
    """The process ended before the answer's turn."""


@dataclass(frozen=True, slots=True)
class Language:
    encode: Callable[[int, Any], bytes]
    mark: str | None = None
    """Mark on stderr after each answer; None: there are none, and stderr is that of this process."""
    cancel_s: float | None = None
    """Seconds in which the process must give up a cancelled request. One that does not is stuck, and is ended. None: it
    may take its time."""
    grace_s: float = 0.0  # seconds that its guard gives it to end


@dataclass(frozen=True, slots=True)
class Reply:
    said: Mapping[str, Any]
    printed: str
    alone: bool  # whether it worked on no other answer meanwhile


@dataclass(slots=True)
class _PendingRequest:
    reply: asyncio.Future[Reply]
    limit_s: float = math.inf
    said: Mapping[str, Any] | None = None
    printed: str | None = None
    alone: bool = True


class AnsweringProcess:
    """One start of a process, under a guard."""

    def __init__(self, process: asyncio.subprocess.Process, language: Language) -> None:
        self._process, self._language = process, language
        self._numbers = count(1)
        self._asked: dict[int, _PendingRequest] = {}
        self._watched: asyncio.TimerHandle | None = None
        mark = (language.mark or "").encode()
        self._printed = Printed(re.compile(b"\0" + mark + rb" (\d+)\n"), self._marked)
        self._reading: list[asyncio.Task[None]] = []
        self.greeting = Reply({}, "", alone=True)
        self.ended = False
        self.turn_began: float | None = None
        """Time of the loop at which a process that takes one request at a time took the present one."""

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        language: Language,
        limit_s: float,
        *,
        env: Mapping[str, str] | None = None,
        opening: bytes = b"",
    ) -> AnsweringProcess:
        """Start a process and wait for its greeting.

        Args:
            command: a guard, see `guard.py`.
            opening: the first that is written to it.

        Raises OSError, Died, and TimeoutError after `limit_s`.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=None if language.mark is None else PIPE,
            env=env,
            limit=LONGEST_REPLY,
            start_new_session=True,  # Ctrl-C in a terminal is meant for the run
        )
        one = cls(process, language)
        first = one._asked[0] = _PendingRequest(asyncio.get_running_loop().create_future())
        one._reading = [asyncio.create_task(one._read_printed()), asyncio.create_task(one._read_replies())]
        assert process.stdin is not None
        process.stdin.write(opening)
        try:
            async with asyncio.timeout(limit_s):
                one.greeting = await first.reply
        except Died as died:
            died.printed = one.printed()
            raise
        except BaseException:
            await one.end()
            raise
        return one

    @property
    def described(self) -> Mapping[str, Any]:
        return self.greeting.said

    @property
    def _in_turn(self) -> bool:
        return not self.described.get("waits", True)

    async def ask(self, request: Any, limit_s: float = math.inf) -> Reply:
        """Return the answer to a request. A process that takes one at a time answers in the order of the calls.

        Raises Late, Died and EndedBefore. After Late the process has ended, unless it could give up the request.
        """
        number = next(self._numbers)
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        asked = _PendingRequest(answered, limit_s, alone=self._in_turn or not self._asked)
        if not self._in_turn:
            for each in self._asked.values():
                each.alone = False
        self._asked[number] = asked
        self._write(number, request)
        # A process that takes one request at a time gets several ahead, so a request's limit may begin only when its
        # turn comes: `_watch` keeps one timer, for the oldest request. With limits of 10 s and answers of 6 s, the
        # third request waits 12 s for its turn and is still in time. A process that awaits all requests at once has a
        # timer for each. The future is shielded from the cancellation of its asker, because `_end_if_stuck` reads from
        # it whether the process has answered.
        if self._in_turn:
            if len(self._asked) == 1:
                self._watch()
            return await asyncio.shield(asked.reply)
        try:
            async with asyncio.timeout(None if limit_s == math.inf else limit_s):
                return await asyncio.shield(asked.reply)
        except TimeoutError:
            await self._give_up(number, asked)
            raise Late from None
        except asyncio.CancelledError:
            self._write(number, None)
            if (patience_s := self._language.cancel_s) is not None:
                asyncio.get_running_loop().call_later(patience_s, self._end_if_stuck, asked)
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

    def _too_late(self, asked: _PendingRequest) -> None:
        if not asked.reply.done():
            asked.reply.set_exception(Late())
        self._ending = asyncio.create_task(self.end())

    def _end_if_stuck(self, asked: _PendingRequest) -> None:
        if not asked.reply.done():
            self._ending = asyncio.create_task(self.end())

    async def _give_up(self, number: int, asked: _PendingRequest) -> None:
        """Cancel a request; if that does not end it, end the process."""
        self._write(number, None)
        with suppress(TimeoutError, Died):
            async with asyncio.timeout(GIVE_UP_S):
                await asyncio.shield(asked.reply)
            return
        await self.end()

    async def end(self) -> None:
        """End the process with all that it has started."""
        self.ended = True
        self._order_end()
        try:
            async with asyncio.timeout(self._language.grace_s + 2 * END_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.gather(*self._reading, return_exceptions=True)

    def _order_end(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, END)  # Popen.send_signal would reap it, which asyncio's watcher must do

    def printed(self) -> str:
        """Return what was printed since the last answer, for a process that has ended."""
        return self._printed.take()

    def _write(self, number: int, request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(self._language.encode(number, request))

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
            try:
                async with asyncio.timeout(CLOSED_S):
                    await self._process.wait()
            except TimeoutError:
                self._order_end()
            code = code_of(await self._process.wait())
            await self._reading[0]
            died = Died(how_ended(code), killed=code == -signal.SIGKILL)
            for place, asked in enumerate(self._asked.values()):
                if not asked.reply.done():
                    asked.reply.set_exception(EndedBefore() if self._in_turn and place else died)
                    asked.reply.exception()  # its asker may be gone
            self._asked.clear()
            self._watch()

    async def _read_printed(self) -> None:
        while (stream := self._process.stderr) and (part := await stream.read(CHUNK)):
            self._printed.add(part)

    def _marked(self, number: int, printed: str) -> None:
        self._asked[number].printed = printed
        self._deliver(number)

    def _deliver(self, number: int) -> None:
        asked = self._asked[number]
        if asked.said is not None and (asked.printed is not None or self._language.mark is None):
            del self._asked[number]
            if not asked.reply.done():
                asked.reply.set_result(Reply(asked.said, asked.printed or "", asked.alone))
            if self.turn_began is not None:
                self._watch()
