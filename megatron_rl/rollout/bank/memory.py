"""What a rollout driver asks of its memory, and the one that remembers nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.inference.api import InferenceInterface, ResumableInference


class Memory(Protocol):
    """See `megatron_rl.rollout.bank.bank.Bank`."""

    def groups(self, ordinals: Sequence[int], problem: Callable[[int], Problem]) -> dict[int, TrajectoryGroup]: ...
    def version(self, ordinal: int) -> int: ...
    def inference(self, ordinal: int) -> InferenceInterface: ...
    def keeping(self) -> AbstractAsyncContextManager[None]: ...
    def put(self, group: TrajectoryGroup) -> None: ...
    def saving(self, step: int, next_ordinal: int) -> None: ...
    def saved(self, step: int) -> None: ...
    def close(self) -> None: ...


class NoBank:
    """Remembers nothing."""

    def __init__(self, engine: ResumableInference) -> None:
        self.engine = engine

    def groups(self, ordinals: Sequence[int], problem: Callable[[int], Problem]) -> dict[int, TrajectoryGroup]:
        return {}

    def version(self, ordinal: int) -> int:
        return self.engine.policy_version

    def inference(self, ordinal: int) -> InferenceInterface:
        return self.engine

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        yield

    def put(self, group: TrajectoryGroup) -> None:
        pass

    def saving(self, step: int, next_ordinal: int) -> None:
        pass

    def saved(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass
