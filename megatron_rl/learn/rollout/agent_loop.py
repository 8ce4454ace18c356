"""The asyncio loop in which a rank's agents run: alternately with its training, or in a thread beside it."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from megatron_rl.generate.engine.interface import RankEngine, ResumableInference
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import POLL_S, LeaveAgreed, SafePoints

STOP_S = 10.0  # seconds to wait for the end of the agents' thread

Result = TypeVar("Result")

Scored = Callable[[], tuple[int, str]]
"""Returns the number of answers that slow functions have scored, and a note for the user about them."""


@dataclass(frozen=True, slots=True)
class TrainingDriver:
    """A rank's role among those that run agents, where the training ranks generate nothing: the first rank of each
    data-parallel replica drives."""

    index: int  # number of the driver that this rank is or follows, among `count`
    count: int
    drives: bool

    @classmethod
    def of(cls, groups: Groups) -> TrainingDriver:
        first = groups.model.rank() == 0 and groups.context.rank() == 0
        return cls(groups.data.rank(), groups.data.size(), first)


DriverRole = TrainingDriver | EngineRanks


class RemoteRefit(Protocol):
    """Weight transfer to engines on other machines: the methods of `Refit` that a loop needs, and more."""

    @property
    def starved(self) -> bool:
        """Whether requests wait for weights that no replica has."""
        ...

    def finish(self) -> None:
        """Wait until the newest version is published. Collective over all ranks."""

    def renew(self) -> None:
        """Publish the newest version again. Collective over all ranks."""


class AgentLoop(ABC):
    """The asyncio loop of a driver's agents, whose tasks may outlive a step."""

    continues: bool  # whether the agents run while the rank does something else
    spare_s: float
    """Seconds for which agents continue at a time while this driver's share of a batch is finished and another's is
    not."""

    def __init__(self, role: DriverRole, inference: ResumableInference, safe_points: SafePoints) -> None:
        self.role = role
        self._inference, self._safe_points = inference, safe_points
        self._progress: object = None

    @property
    def busy_s(self) -> float:
        return self._inference.busy_s

    @property
    @abstractmethod
    def starved(self) -> bool:
        """Whether requests wait for weights that no replica has."""

    @abstractmethod
    def do(self, work: Callable[[asyncio.AbstractEventLoop], Result]) -> Result:
        """Call `work` with the loop while none of its tasks runs, and return its result. Only on a rank that drives."""

    @abstractmethod
    def advance(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let the agents run until `work` is done, which only a rank that drives executes. Collective over the ranks
        that generate together."""

    @abstractmethod
    def pause(self) -> None:
        """Free resources for training. Collective over the ranks that generate together."""

    @abstractmethod
    def catch_up(self) -> None:
        """Wait until the engines have the newest weights. Collective over all ranks."""

    @abstractmethod
    def feed(self) -> None:
        """Publish the newest weights again. Collective over all ranks."""

    @abstractmethod
    def close(self) -> None: ...

    async def wait(
        self,
        tasks: Sequence[asyncio.Task[Any]],
        scored: Scored,
        *,
        once: bool = False,
    ) -> None:
        """Wait until these tasks are done, one fails, this rank is asked to leave, or the loop is starved.

        Wait at most POLL_S seconds with `once`, or if the agents continue meanwhile: other ranks may be asked to leave.
        Every progress of the tasks sends a heartbeat, and a slow function that scores is named in the live view.
        """
        while pending := [task for task in tasks if not task.done()]:
            done, _ = await asyncio.wait(pending, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
            answers, note = scored()
            if (progress := (self._inference.busy_s, answers, len(pending), len(done))) != self._progress:
                self._progress = progress
                self._safe_points.activity.beat()
            self._safe_points.activity.note(note)
            failed = any(task.exception() for task in done)
            if once or failed or self.continues or self.starved or self._safe_points.drain.asked:
                return

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]], scored: Scored) -> Result | None:
        """Return the result of `work`; None on a rank that follows. Collective over all ranks.

        Raises LeaveAgreed, with `work` cancelled, when a rank is asked to leave.
        """
        self.catch_up()
        tasks = [self.do(lambda loop: loop.create_task(work()))] if self.role.drives else []
        try:
            self.complete(tasks, scored)
        except LeaveAgreed:  # raised on all ranks; after another error, collectives with the others would only hang
            self.cancel(tasks)
            self.pause()
            raise
        self.pause()
        return tasks[0].result() if tasks else None

    def complete(self, tasks: Sequence[asyncio.Task[Any]], scored: Scored) -> None:
        """Let the agents run until the tasks of all ranks are done. Collective over all ranks. Raises the exception of
        a task of this rank, and LeaveAgreed when a rank is asked to leave."""
        while True:
            self.advance(partial(self.wait, tasks, scored))
            unfinished, starved = self._look(tasks)
            if not unfinished:
                return
            if starved:
                self.feed()

    def finished(self, tasks: Sequence[asyncio.Task[Any]]) -> bool:
        """Whether the tasks of all ranks are done, without waiting. Collective and raising as `complete`."""
        return not self._look(tasks)[0]

    def cancel(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Cancel tasks and wait for their end. Collective over the ranks that generate together."""
        self.advance(partial(_cancel, tasks))

    def _look(self, tasks: Sequence[asyncio.Task[Any]]) -> tuple[bool, bool]:
        """Return whether any rank has unfinished tasks, and whether any rank is starved. Collective. Raises the
        exception of a task of this rank."""
        for task in tasks:
            if task.done():
                task.result()
        own = torch.tensor([any(not task.done() for task in tasks), self.starved], dtype=torch.int32)
        unfinished, starved = self._safe_points.maximum(own).bool().tolist()
        return unfinished, starved


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EngineInTurn(AgentLoop):
    """Loop of a rank that trains and generates alternately. While it trains, unfinished answers hold no cache; they
    resume from their tokens in the next phase."""

    continues = False
    spare_s = 0.05
    starved = False  # the engine has this rank's weights

    def __init__(self, role: DriverRole, engine: RankEngine, safe_points: SafePoints) -> None:
        super().__init__(role, engine, safe_points)
        self._engine, self._runner = engine, asyncio.Runner()

    def do(self, work: Callable[[asyncio.AbstractEventLoop], Result]) -> Result:
        """Call `work`: between two calls of `advance` the loop does not run."""
        return work(self._runner.get_loop())

    def advance(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self.role.drives:
            # Runner.run would also install a handler of SIGINT, which costs a millisecond of each step.
            self._runner.get_loop().run_until_complete(work())
            self._engine.release_followers()
        else:
            self._engine.follow(self._safe_points.activity.waits)

    def pause(self) -> None:
        self._engine.end_phase()

    def catch_up(self) -> None:
        """Do nothing: the engine has this rank's weights."""

    def feed(self) -> None:
        """Do nothing: no request waits for weights."""

    def close(self) -> None:
        self._runner.close()


class AgentThread(AgentLoop):
    """Loop of a rank that only trains. It runs in its own thread, and replicas or a server generate."""

    continues = True
    spare_s = 0.0

    def __init__(
        self, role: DriverRole, inference: ResumableInference, safe_points: SafePoints, refit: RemoteRefit
    ) -> None:
        super().__init__(role, inference, safe_points)
        self._refit = refit
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    @property
    def starved(self) -> bool:
        return self._refit.starved

    def do(self, work: Callable[[asyncio.AbstractEventLoop], Result]) -> Result:
        async def call() -> Result:
            return work(self._loop)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def advance(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self.role.drives:
            asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    def pause(self) -> None:
        """Do nothing: the agents share no resources with training."""

    def catch_up(self) -> None:
        self._refit.finish()

    def feed(self) -> None:
        self._refit.renew()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
