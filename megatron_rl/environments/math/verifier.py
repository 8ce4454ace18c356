"""Comparison of two answers, in processes that may hang, grow or crash without harm."""

from __future__ import annotations

import importlib.util

from megatron_rl.agent.sandbox.api import Ending, ProcessLimits
from megatron_rl.agent.sandbox.pool import WorkerPool
from megatron_rl.recipe.extras import install_command

LONGEST_ANSWER = 500
"""Longest answer to compare, in characters, unless the right one is longer: a model that boxes its whole text is wrong,
and parsing a thousand characters takes seconds."""


class NoVerdict(Exception):
    """Two answers could not be compared."""


class Verifier:
    """Compares answers in `processes` workers, which start on first use and end with this object."""

    def __init__(self, processes: int, timeout_s: float, memory_gib: float) -> None:
        """Raises ValueError if math-verify is not installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(f"environment math needs math-verify: `{install_command('math')}`")
        self._pool = WorkerPool(
            "megatron_rl.environments.math.equality:equal", processes, ProcessLimits.of(timeout_s, memory_gib)
        )
        self.close = self._pool.close
        """End the workers. They also end with this object and with the interpreter."""

    async def equal(self, golden: str, answer: str) -> bool:
        """Whether `answer` equals `golden` mathematically. The event loop keeps running.

        Raises NoVerdict if the comparison exceeds its limit of time or memory.
        """
        if golden == answer:
            return True
        if len(answer) > max(LONGEST_ANSWER, 2 * len(golden)):
            return False
        outcome = await self._pool.ask([golden, answer])
        if outcome.ending is not Ending.OK:
            key = "verify_timeout_s" if outcome.ending is Ending.TIME_OUT else "verify_memory_gib"
            raise NoVerdict(f"{outcome} (environment.args.{key})")
        return bool(outcome.value)
