"""Commands from the first rank of a replica, which all of its ranks execute together."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.inference.broadcast import PlanBroadcast
from megatron_rl.inference.engine import Engine
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.replica.weights import ReceivedWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """generate: follow the engine until it releases its followers. wait: do nothing, a sign of life. end: leave the
    replica. Others: the method of ReceivedWeights, with its arguments."""

    name: Literal["generate", "wait", "end", "receive", "swap"]
    arguments: tuple[Any, ...] = ()


def commands_over(ranks: EngineRanks) -> PlanBroadcast[Command] | None:
    """Return the channel from the first rank of a replica to the others; None if there are none."""
    return None if ranks.alone else PlanBroadcast[Command](ranks.control)


def follow(
    commands: PlanBroadcast[Command], engine: Engine, weights: ReceivedWeights | None, activity: Activity
) -> None:
    """Execute the first rank's commands, up to and including `end`. Raises RuntimeError if that rank is gone.

    weights: None for a model that does not change.
    """
    while True:
        with activity.waits():
            command = commands.receive()
        assert isinstance(command, Command), "the first rank of a replica sends nothing else"
        if command.name == "end":
            return
        if command.name == "generate":
            engine.follow(activity.waits)
        elif command.name != "wait":
            try:
                carry_out(command, weights)
            except RuntimeError as error:  # the first rank gets the same error, and reports it
                logger.warning("%s", error)


def carry_out(command: Command, weights: ReceivedWeights | None) -> Future[None]:
    """Execute this rank's part of a command about weights. Raises RuntimeError."""
    assert weights is not None, "these weights do not change"
    begun: Future[None] = getattr(weights, command.name)(*command.arguments)
    return begun
