"""The engine of a replica, whichever it is, as the HTTP routes use it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from megatron_rl.generate.engine.interface import EngineLoad, GenerationRequest
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.replica.driver_inbox import OpenRequest
from megatron_rl.generate.replica.lifecycle import Running
from megatron_rl.generate.replicas.wire import State


class TakesTurns(Protocol):
    """Says whose turn it is on the devices that an engine shares with the ranks that train."""

    @property
    def state(self) -> State: ...

    @property
    def rested_s(self) -> float:
        """Seconds in which the engine was not awake so far."""
        ...

    def start(self) -> None:
        """Begin to start the engine, which is asleep afterwards. No-op the second time."""
        ...

    async def sleep(self) -> None:
        """Leave the device to the ranks, once the engine has started. No-op while it is asleep without any weights, and
        before it is to start. Raises RuntimeError."""
        ...


class ReplicaLeader(Running, Protocol):
    """The engine of a replica and its weights. All methods belong to the HTTP loop."""

    @property
    def version(self) -> int | None:
        """Policy version of the weights; None before the first ones, and while the engine is not awake."""
        ...

    @property
    def turns(self) -> TakesTurns | None:
        """None: the engine has its devices to itself."""
        ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def busy_s(self) -> float: ...

    def submit(self, request: GenerationRequest, news: asyncio.Event) -> OpenRequest:
        """Begin to answer a request. Raises one of REFUSED, or EngineGone.

        news: set whenever there are new results.
        """
        ...

    async def receive(self, version: int, epoch: dict[str, Any] | None) -> asyncio.Future[None]:
        """Begin to receive a version: next to the weights in use, while the engine continues, or while it is asleep.
        Both this and what it returns may raise RuntimeError.

        epoch: whose transfer group to join before (`refit.epoch.Epoch.to_json`); None: the group remains.
        """
        ...

    async def swap(self, version: int, probe: Probe | None) -> None:
        """Make the engine use the received weights, which are complete. Raises RuntimeError.

        probe: log-probs under these weights, which an engine that is probed must report (`capabilities`).
        """
        ...
