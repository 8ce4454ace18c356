"""All inference replicas as the one engine of a rollout driver.

    agents' loop                            the pool's thread
    await pool.generate(request)    ->      the replica with the least to do, or the one that knows how it begins
                                            tokens as they come; where it dies, another one goes on
    pool.announce()                 ->      what is begun from now on waits for the next version ...
    pool.policy_version = 7         ->      ... and only replicas that have them are asked anything new

The thread is there while the rank trains too: a replica that the first rank has not asked anything for a while takes
the run for dead.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from megatron_rl.inference.api import Completion, GenerationRequest, PartialAnswer, Unsupported
from megatron_rl.inference.replicas.dispatch import Dispatch
from megatron_rl.inference.replicas.links import Start

STOP_S = 10.0
"""That the thread has to end."""

Result = TypeVar("Result")


class ReplicaPool:
    """Implements `ResumableInference` over the replicas of an attempt. A rank that follows a driver has one that was
    never started."""

    def __init__(self, dispatch: Dispatch) -> None:
        """dispatch: for this pool's thread alone, from here on."""
        self._dispatch = dispatch
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)

    def start(self) -> None:
        """Look for replicas, and stay in touch with them."""
        self._thread.start()

    def announce(self) -> None:
        """Weights of a further version are on their way: what is asked from now on waits until they are
        `policy_version`. What is about a prompt that was asked about before, or an earlier one, goes on by those that
        there are: prompts are begun in ascending order."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._dispatch.hold)

    @property
    def policy_version(self) -> int:
        """Of the weights that its answers are sampled by."""
        return self._dispatch.policy_version

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None:
        self._dispatch.policy_version, self._dispatch.starved = policy_version, False
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._dispatch.begin_version)

    @property
    def busy_s(self) -> float:
        """See `ResumableInference.busy_s`: seconds for which replicas computed, or were waited for."""
        return self._dispatch.busy_s

    @property
    def given_up(self) -> str | None:
        """Why there will be no replica any more; None: there may be."""
        return self._dispatch.given_up

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See `InferenceInterface.generate`. A caller that is cancelled leaves nothing behind.

        Raises NoReplica where none could be asked for too long.
        """
        if request.beyond_training:
            raise Unsupported(f"{request.beyond_training}: replicas of a run serve training, which does not need it")
        return await asyncio.wrap_future(self._in_thread(self._dispatch.generate(request)))

    def partial_answers(self) -> list[PartialAnswer]:
        """See `ResumableInference.partial_answers`: as much as the replicas have told of."""
        return self._in_thread(self._dispatch.partial_answers()).result()

    @property
    def starved(self) -> bool:
        """Whether requests wait for weights: replicas are there, and none of them has those of this version, because
        all that had are lost."""
        return self._dispatch.starved

    def starts(self) -> dict[Start, int]:
        """The replicas that answer now, and how many ranks each has."""
        return self._in_thread(self._dispatch.starts()).result()

    def metrics(self) -> dict[str, float]:
        """What happened since they were asked for before: see metrics.names."""
        return self._in_thread(self._dispatch.metrics()).result()

    def call(self, start: Start, path: str, body: dict[str, Any], timeout_s: float = 0.0) -> Future[dict[str, Any]]:
        """Have a replica do something, see `wire`. The future raises ReplicaGone."""
        return self._in_thread(self._dispatch.call(start, path, body, timeout_s))

    def close(self, *, end: bool = False) -> None:
        """End the thread. end: tell all replicas that the run needs them no more."""
        if not self._thread.is_alive():
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
