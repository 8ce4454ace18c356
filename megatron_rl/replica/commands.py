"""Commands from the first rank of a replica, which all of its ranks execute together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.inference.api import GenerationRequest, PartialAnswer
from megatron_rl.inference.broadcast import PlanBroadcast
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.server.engine_thread import SteppedEngine

logger = logging.getLogger(__name__)


class LedEngine(SteppedEngine, Protocol):
    """An engine that a replica uses."""

    @property
    def busy_s(self) -> float: ...

    def submit(self, request: GenerationRequest) -> str: ...

    def partial_answers(self) -> list[PartialAnswer]: ...

    def follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None: ...

    def release_followers(self) -> None: ...


class Weights(Protocol):
    """This rank's end of the transfer of weights from the training ranks. Calls are collective over the replica."""

    def join(self, epoch: dict[str, Any]) -> Future[None]:
        """Begin to join the transfer group of an epoch, and leave the previous one. It may fail with a RuntimeError."""
        ...

    def receive(self, version: int) -> Future[None]:
        """Begin to receive a version next to the weights in use, while the engine continues. It may fail with a
        RuntimeError."""
        ...

    def swap(self, version: int) -> None:
        """Make the engine use the received weights, once they are complete. Raises RuntimeError."""
        ...


@dataclass(frozen=True, slots=True)
class Generate:
    """Follow the engine until it releases its followers."""


@dataclass(frozen=True, slots=True)
class Join:
    epoch: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Receive:
    version: int


@dataclass(frozen=True, slots=True)
class Swap:
    version: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing: a sign of life."""


@dataclass(frozen=True, slots=True)
class End:
    """Leave the replica."""


Command = Generate | Join | Receive | Swap | Wait | End


def commands_over(ranks: EngineRanks) -> PlanBroadcast[Command] | None:
    """Return the channel from the first rank of a replica to the others; None if there are none."""
    return None if ranks.alone else PlanBroadcast[Command](ranks.control)


def follow(commands: PlanBroadcast[Command], engine: LedEngine, weights: Weights | None, activity: Activity) -> None:
    """Execute the first rank's commands, up to and including `End`. Raises RuntimeError if that rank is gone.

    weights: None for a model that does not change.
    """
    while True:
        with activity.waits():
            command = commands.receive()
        match command:
            case End():
                return
            case Generate():
                engine.follow(activity.waits)
            case Join() | Receive() | Swap():
                assert weights is not None, "these weights do not change"
                try:
                    carry_out(command, weights)
                except RuntimeError as error:  # the first rank gets the same error, and reports it
                    logger.warning("%s", error)


def carry_out(command: Join | Receive | Swap, weights: Weights) -> Future[None]:
    """Execute this rank's part of a command about weights. Raises RuntimeError."""
    match command:
        case Join(epoch):
            return weights.join(epoch)
        case Receive(version):
            return weights.receive(version)
        case Swap(version):
            done: Future[None] = Future()
            weights.swap(version)
            done.set_result(None)
            return done
