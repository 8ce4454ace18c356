"""A function of the user's that scores answers in separate processes, called from any event loop.

    event loop of a rank -> thread with its own loop -> processes (scoring_worker.py)

The thread keeps the processes busy, and their limits, while the rank trains. A plain function scores one answer at a
time in each process, in the order of the calls; a coroutine awaits all of them at once.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import pickle
import sys
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from megatron_rl.agent.scoring import Call, NotScored, Scored, UnusableFunction
from megatron_rl.contract.children import module_command
from megatron_rl.rank.processes.answering import AnsweringProcess, Died, EndedBefore, Language, Late, Reply
from megatron_rl.rank.processes.printed import LogBudget

logger = logging.getLogger(__name__)

WORKER = "megatron_rl.agent.own_process.scoring_worker"
AHEAD = 32
"""Answers that a process holds while it scores the first of them, so that it need not wait for the rank in between."""
START_S = 600.0
"""Seconds to import the user's file, perhaps from a slow shared file system, with what it loads."""
CLOSE_S = 15.0

Result = TypeVar("Result")


class OwnFunction:
    """A function that is imported when this object is made, and again after its process has ended. `close` ends the
    processes; so does the end of this one."""

    def __init__(self, file: Path, name: str, processes: int) -> None:
        """Raises UnusableFunction."""
        self._slots = [_Slot(file, name) for _ in range(processes)]
        self._next = cycle(self._slots)
        self._scoring: set[asyncio.Task[None]] = set()
        self._calls: asyncio.Queue[tuple[Call, asyncio.Future[Scored]]] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._run(self._prepare()).result()
        except BaseException:
            self.close()
            raise
        described = self._slots[0].described
        self.parameters: list[tuple[str, str, bool]] = [tuple(one) for one in described["parameters"]]
        """Name, kind and whether there is a default, of each parameter."""
        self.place: str = described["place"]

    @property
    def answers(self) -> int:
        return sum(slot.answers for slot in self._slots)

    @property
    def seconds_per_answer(self) -> float:
        """Mean over all answers, or the time of the present one if it takes longer."""
        answers = self.answers
        mean = sum(slot.seconds for slot in self._slots) / answers if answers else 0.0
        now = self._loop.time()
        return max([mean, *(slot.present_s(now) for slot in self._slots)])

    async def __call__(self, call: Call) -> Scored:
        """Return the reward of one answer. Raises NotScored. A cancelled call is forgotten. A plain function cannot be
        interrupted: it continues with its answer until it is done or `close` kills it."""
        return await asyncio.wrap_future(self._run(self._call(call)))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        with suppress(TimeoutError):
            self._run(self._end_all()).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _end_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*(slot.end() for slot in self._slots))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare(self) -> None:
        await self._slots[0].started()
        self._waits = self._slots[0].described["waits"]
        if not self._waits:
            self._consumers = [asyncio.create_task(self._consume(slot)) for slot in self._slots]

    async def _call(self, call: Call) -> Scored:
        if self._waits:
            return await next(self._next).scored(call)
        done: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((call, done))
        return await done

    async def _consume(self, slot: _Slot) -> None:
        # The semaphore is acquired before a call is taken off the queue. The other way round, each process would hold
        # one call that it has no room for, while another process is idle. With AHEAD = 1 a process would idle between
        # two answers until this thread has sent the next one, and it shares the interpreter with the training loop.
        ahead = asyncio.Semaphore(AHEAD)
        while True:
            await ahead.acquire()
            call, done = await self._calls.get()
            task = asyncio.create_task(_complete(slot, call, done))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
            task.add_done_callback(lambda _: ahead.release())


async def start_worker(file: Path, function: str) -> AnsweringProcess:
    """Start a worker that has imported the function. Raises UnusableFunction."""
    mark = uuid4().hex
    job = {"parent": os.getpid(), "file": str(file), "function": function, "path": sys.path, "mark": mark}
    language = Language(lambda number, call: pickle.dumps((number, *(call or (None, None)))), mark)
    try:
        process = await AnsweringProcess.start([*module_command(WORKER), json.dumps(job)], language, START_S)
    except TimeoutError:
        raise UnusableFunction(f"it is not imported after {START_S:g} s") from None
    except OSError as error:
        raise UnusableFunction(f"its process cannot be started: {error}") from error
    except Died as error:
        raise UnusableFunction(f"its process ended while it was imported ({error}){_below(error.printed)}") from error
    if (why := process.described.get("unusable")) is not None:
        await process.end()
        lacks = process.described["lacks"]
        lacking = ImportError(why, name=lacks) if lacks is not None else None
        raise UnusableFunction(f"{why}{_below(process.greeting.printed)}") from lacking
    return process


def _below(printed: str) -> str:
    return f"\n{printed.rstrip()}" if printed.strip() else ""


async def _complete(slot: _Slot, call: Call, done: asyncio.Future[Scored]) -> None:
    if done.done():  # cancelled
        return
    try:
        scored = await slot.scored(call)
    except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
        if not done.done():
            done.set_exception(error)
    else:
        if not done.done():
            done.set_result(scored)


class _Slot:
    def __init__(self, file: Path, name: str) -> None:
        self._file, self._name = file, name
        self._process: AnsweringProcess | None = None
        self._starting = asyncio.Lock()
        self._budget = LogBudget()
        self.answers, self.seconds = 0, 0.0
        self.described: Mapping[str, Any] = {}

    async def started(self) -> AnsweringProcess:
        async with self._starting:
            if self._process is None or self._process.ended:
                self._process = await start_worker(self._file, self._name)
                self.described = self._process.described
            return self._process

    def present_s(self, now: float) -> float:
        began = self._process.turn_began if self._process is not None else None
        return 0.0 if began is None else now - began

    async def end(self) -> None:
        if self._process is not None:
            await self._process.end()

    async def scored(self, call: Call) -> Scored:
        """Return the reward of one answer. Raises NotScored."""
        left_s, attempts = call.timeout_s, call.retries + 1
        while True:
            process = await self._running()
            try:
                reply = await process.ask((call.positional, call.named), left_s)
                self.answers, self.seconds = self.answers + 1, self.seconds + reply.said["seconds"]
                left_s -= reply.said["seconds"]
                return self._scored(reply, call)
            except EndedBefore:
                continue
            except Late:
                left_s = 0.0
                limit = f"no score within {call.timeout_s:g} s (environment.reward_timeout_s)"
                failure = NotScored(f"{self._name}: TimeoutError: {limit}", printed=process.printed())
            except Died as error:
                failure = self._death(process, error)
            except NotScored as error:
                failure = error
            attempts -= 1
            if failure.wrong or not attempts or left_s <= 0:
                raise failure

    async def _running(self) -> AnsweringProcess:
        if self._process is not None and not self._process.ended:
            return self._process  # without a pause, so that answers keep their order
        try:
            return await self.started()
        except UnusableFunction as error:  # it could be imported before
            raise NotScored(f"{self._name}: its process cannot be started again: {error}") from error

    def _scored(self, reply: Reply, call: Call) -> Scored:
        said, printed = reply.said, reply.printed
        if printed and (text := self._budget.spend(printed)) is not None:
            logger.info("%s printed, scoring %.200r:\n%s", self._name, call.positional[0], text.rstrip())
        if "value" in said:
            return Scored(said["value"], printed if reply.alone else "")
        place = said.get("place") or self.described["place"]
        if "wrong" in said:
            raise NotScored(f"{self.described['place']}: {self._name} returned {said['wrong']}", fault=True, wrong=True)
        kind = f"{self._name} at {place}: {said['raised']}"
        raise NotScored(
            f"{kind}: {said['text']}", kind=kind, fault=not said["outside"], trace=said["trace"], printed=printed
        )

    def _death(self, process: AnsweringProcess, error: Died) -> NotScored:
        kind = f"{self._name} at {self.described['place']}: its process ended"
        return NotScored(f"{kind} ({error})", kind=kind, fault=not error.killed, printed=process.printed())
