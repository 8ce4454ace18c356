"""A vLLM with another model than the policy, whose weights never change: the teacher or the reward model."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from megatron_rl.generate.engine.engine_thread import EngineGone
from megatron_rl.generate.vllm.process import VllmGone, VllmRefused
from megatron_rl.generate.vllm.running import RunningVllm

Answer = TypeVar("Answer")


class FixedVllm:
    """Implements `Running`."""

    def __init__(self, vllm: RunningVllm, limit_s: float) -> None:
        """limit_s: seconds that an answer may take."""
        self.vllm, self.limit_s = vllm, limit_s
        self._open = 0

    def running(self) -> AbstractAsyncContextManager[None]:
        return self.vllm.running()

    async def watch(self) -> None:
        await self.vllm.watch(lambda: self._open > 0)

    async def answered(self, call: Awaitable[Answer]) -> Answer:
        """Return the result of a call of the client. Raises ValueError if vLLM refuses the request, and EngineGone."""
        self._open += 1
        try:
            found = await call
        except (VllmRefused, VllmGone) as error:
            of_request = isinstance(error, VllmRefused) and error.status < 500
            raise (ValueError if of_request else EngineGone)(str(error)) from error
        finally:
            self._open -= 1
        self.vllm.activity.beat()
        return found
