"""The first rank of a replica: it is asked, and tells the others what to do next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from megatron_rl.inference.api import Delta, EngineLoad, GenerationRequest
from megatron_rl.inference.broadcast import PlanBroadcast
from megatron_rl.rank.activity import Activity
from megatron_rl.refit.replica_control import TRANSFER_TIMEOUT
from megatron_rl.replica.commands import (
    Command,
    End,
    Generate,
    Join,
    LedEngine,
    Receive,
    Swap,
    Wait,
    Weights,
    carry_out,
)

NEXT_S = TRANSFER_TIMEOUT.total_seconds()
"""That what follows a step of a transfer may take to be asked for; after that it is taken to be given up."""
TELL_EVERY_S = 1.0
"""Seconds between two looks at what unfinished answers have: it synchronises the device with the host."""


class Leader:
    """Implements `ServedEngine` on the first rank. All of it is for the engine's thread.

    Requests are told of as deltas: as they are answered, and what the others have every TELL_EVERY_S.
    """

    def __init__(
        self,
        engine: LedEngine,
        weights: Weights,
        commands: PlanBroadcast[Command] | None,
        activity: Activity,
        tell_every_s: float = TELL_EVERY_S,
        *,
        holds: bool = False,
    ) -> None:
        """holds: whether the engine computes nothing while weights are on their way: see refit/overlapped.py."""
        self.version: int | None = None
        """Policy version of the weights; None: there are none yet."""
        self.failure: Exception | None = None
        """What has ended the engine, and with it the replica."""
        self._engine, self._weights, self._commands, self._activity = engine, weights, commands, activity
        self._tell_every_s = tell_every_s
        self._holds = holds
        self._transfer: Future[None] | None = None  # that the engine is held for: its newest step ...
        self._next_by = 0.0  # ... and when the next one must have been asked for
        self._followed = False  # whether the other ranks follow the engine
        self._asked: dict[str, list[int]] = {}  # tokens of each sample that were told
        self._told_at = time.monotonic()

    @property
    def busy(self) -> bool:
        return not self._held and (self._engine.busy or bool(self._engine.answered))

    @property
    def _held(self) -> bool:
        """Whether the engine is to wait. Not for weights that do not come."""
        if (transfer := self._transfer) is None:
            return False
        return not transfer.done() or (transfer.exception() is None and time.monotonic() < self._next_by)

    @property
    def load(self) -> EngineLoad:
        return self._engine.load

    @property
    def busy_s(self) -> float:
        """See `ResumableInference.busy_s`."""
        return self._engine.busy_s

    @property
    def answered(self) -> Sequence[str]:
        return ()  # told as deltas

    def take(self, request_id: str) -> None:
        return None

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> str:
        self._engine.submit(request)
        known = {sample: len(beginning.tokens) for sample, beginning in request.known.items()}
        self._asked[request.id] = [known.get(sample, 0) for sample in range(request.num_samples)]
        return request.id

    def cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)
        self._asked.pop(request_id, None)

    def step(self) -> None:
        self._activity.beat()
        try:
            if self._engine.busy:
                self._have_follow(True)
                self._engine.step()
            if not self._engine.busy:
                self._have_follow(False)
        except Exception as error:  # whatever ends the engine: the thread tells who asked, and not the replica itself
            self.failure = error
            raise

    def take_deltas(self) -> list[tuple[str, Delta]]:
        """What requests have got since they were told of before."""
        deltas = []
        for request_id in [*self._engine.answered]:
            answers = self._engine.take(request_id) or ()
            told = self._asked.pop(request_id, [0] * len(answers))
            for sample, (first, one) in enumerate(zip(told, answers, strict=True)):
                tokens, logprobs, versions = one.tokens[first:], one.logprobs[first:], one.versions[first:]
                deltas.append(
                    (request_id, Delta(sample, tokens, logprobs, versions, None, one.finish_reason, one.stop))
                )
        if self._engine.busy and time.monotonic() - self._told_at >= self._tell_every_s:
            deltas += self._unfinished()
            self._told_at = time.monotonic()
        return deltas

    def _unfinished(self) -> list[tuple[str, Delta]]:
        deltas = []
        for part in self._engine.partial_answers():
            told, there = self._asked.get(part.request_id), part.prefix
            if told is None or (first := told[part.sample]) >= len(there.tokens):
                continue
            told[part.sample] = len(there.tokens)
            new = Delta(part.sample, there.tokens[first:], there.logprobs[first:], there.versions[first:])
            deltas.append((part.request_id, new))
        return deltas

    # What all ranks do

    def join(self, epoch: dict[str, Any]) -> Future[None]:
        """See Weights.join."""
        return self._carry_out(Join(epoch))

    def receive(self, version: int) -> Future[None]:
        """See Weights.receive."""
        return self._carry_out(Receive(version))

    def swap(self, version: int) -> None:
        """See Weights.swap."""
        self._carry_out(Swap(version))
        self.version = version

    def wait(self) -> None:
        """Tell the other ranks that all is well, however long there is nothing to do."""
        self._activity.beat()
        if not self._followed:
            self._tell(Wait())

    def end(self) -> None:
        """Have the other ranks leave."""
        self._have_follow(False)
        self._tell(End())

    def _carry_out(self, command: Join | Receive | Swap) -> Future[None]:
        self._have_follow(False)
        self._tell(command)
        self._transfer = None
        begun = carry_out(command, self._weights)
        if self._holds and not isinstance(command, Swap):
            self._transfer, self._next_by = begun, time.monotonic() + NEXT_S
        self._activity.beat()
        return begun

    def _have_follow(self, follows: bool) -> None:
        if follows and not self._followed:
            self._tell(Generate())
        elif self._followed and not follows:
            self._engine.let_go()
        self._followed = follows

    def _tell(self, command: Command) -> None:
        if self._commands is not None:
            self._commands.send(command)
