"""All inference replicas as the one engine of a rollout driver.

    agents' loop                            the pool's thread
    await pool.generate(request)    ->      ask a replica: that of the prompt's prefix, or the least busy;
                                            receive tokens as they come; if it dies, ask another one
    pool.announce()                 ->      new prompts wait for the next version ...
    pool.policy_version = 7         ->      ... and are sent to replicas that have it

The thread also runs while the rank trains: a replica that the first rank has not asked anything for a while considers
the run dead.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.generate.engine.interface import Completion, GenerationRequest, PartialAnswer, Unsupported
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.links import Start
from megatron_rl.generate.replicas.requests_in_flight import KeptWeights
from megatron_rl.generate.replicas.wire import State

STOP_S = 10.0
"""Seconds in which the thread must end."""

Result = TypeVar("Result")


class ReplicaPool:
    """Implements `ResumableInference` over the replicas of an attempt. A rank that follows a driver has a pool that is
    never started."""

    def __init__(self, dispatch: Dispatch) -> None:
        """dispatch: used only in this pool's thread from here on."""
        self._dispatch = dispatch
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)

    def start(self) -> None:
        """Start to look for replicas, and keep in contact with them."""
        self._thread.start()

    def announce(self) -> None:
        """Announce that weights of a new version are on their way: new prompts wait until they are `policy_version`.
        Prompts are started in ascending order, so requests about an ordinal that was requested before, or a smaller
        one, still use the present weights."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._dispatch.hold)

    @property
    def policy_version(self) -> int:
        return self._dispatch.policy_version

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None:
        self._dispatch.policy_version, self._dispatch.starved = policy_version, False
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._dispatch.begin_version)

    def know_vocabulary(self, vocab_size: int) -> None:
        """Give up replicas that answer with other tokens than those of the run's tokenizer."""
        self._dispatch.vocab_size = vocab_size

    @property
    def busy_s(self) -> float:
        """Seconds in which replicas computed, or were waited for."""
        return self._dispatch.busy_s

    @property
    def given_up(self) -> str | None:
        """Why there will be no replica any more; None if there may be one."""
        return self._dispatch.given_up

    async def generate(self, request: GenerationRequest, kept: KeptWeights | None = None) -> list[Completion]:
        """Answer a request. Cancelling the caller cancels it.

        kept: the only weights that may answer; None: any of `policy_version` or newer.

        Raises NoReplica if no replica could be asked within the limit, and WeightsGone if none has kept the weights.
        """
        if request.beyond_training:
            raise Unsupported(f"{request.beyond_training}: replicas of a run do not support it")
        return await asyncio.wrap_future(self._in_thread(self._dispatch.generate(request, kept)))

    def partial_answers(self) -> list[PartialAnswer]:
        return self._in_thread(self._dispatch.partial_answers()).result()

    @property
    def starved(self) -> bool:
        """Whether requests wait for weights: there are replicas, but every replica that had this version is lost, or
        asleep. One that failed to take the version sleeps until the ranks publish again."""
        return self._dispatch.starved

    def ready(self) -> frozenset[Start]:
        """Return the replicas that have the newest weights."""
        return self._in_thread(self._dispatch.ready()).result()

    def starts(self) -> dict[Start, ReplicaAddress]:
        return {start: address for start, (address, _) in self._in_thread(self._dispatch.reached()).result().items()}

    def states(self) -> dict[Start, State]:
        """State of each replica in its last response. Each responds every few seconds."""
        return {start: state for start, (_, state) in self._in_thread(self._dispatch.reached()).result().items()}

    def metrics(self) -> dict[str, float]:
        """Return what happened since the last call, see metrics.names."""
        return self._in_thread(self._dispatch.metrics()).result()

    def call(self, start: Start, path: str, body: dict[str, Any], timeout_s: float = 0.0) -> Future[dict[str, Any]]:
        """Make a replica execute a command, see `wire`. The future raises ReplicaGone."""
        return self._in_thread(self._dispatch.call(start, path, body, timeout_s))

    def close(self, *, end: bool = False) -> None:
        """End the thread. end: notify all replicas that the run no longer needs them."""
        if not self._thread.is_alive():
            self._loop.close()
            return
        with suppress(TimeoutError):
            self._in_thread(self._dispatch.close(end=end)).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    def _in_thread(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._dispatch.begin)
        self._loop.run_forever()
        self._loop.close()
