"""Comparison of two answers, in processes that may hang, grow or crash without harm."""

from __future__ import annotations

import importlib.util
import logging
from enum import StrEnum

from megatron_rl.agent.sandbox.limits import Ending, ProcessLimits
from megatron_rl.agent.sandbox.process_pools import WorkerPool
from megatron_rl.agent.scoring import NotJudged
from megatron_rl.recipe.extras import needed

logger = logging.getLogger(__name__)

LIMITED = (Ending.CPU_LIMIT, Ending.MEMORY_LIMIT)
WARN_AT = frozenset(10**power for power in range(9))
LONGEST_ANSWER = 500
"""Longest answer to compare, in characters, unless the right one is longer: a model that boxes its whole text is wrong,
and parsing a thousand characters takes seconds."""


REFERENCE_ALONE = "-987654321"
"""Answer with which a right answer is compared to see whether it can be decided at all."""
STALL_S = 60.0
"""Wall-clock seconds after which a comparison is lost: the machine is stalled, since processor time is limited too."""


class MathVerdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    UNDECIDED = "undecided"
    """The answer exceeds a limit, and the right one alone does not: it counts as wrong. If it were lost, a policy whose
    answers are wrong could drift into answers that cost too much."""


class Verifier:
    """Compares answers in `processes` workers, which start on first use and end with this object."""

    def __init__(self, processes: int, timeout_s: float, memory_gib: float) -> None:
        """timeout_s: processor time of a comparison. Raises ValueError if math-verify is not installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(f"environment math needs {needed('math')}")
        limits = ProcessLimits.of(timeout_s, memory_gib)._replace(wall_s=STALL_S + timeout_s)
        self._pool = WorkerPool("megatron_rl.agent.environments.math.equality:equal", processes, limits)
        self._decided: dict[str, bool] = {}
        self._undecided = 0
        self.close = self._pool.close

    async def judge(self, golden: str, answer: str) -> MathVerdict:
        """Whether `answer` equals `golden` mathematically. The event loop keeps running. Raises NotJudged if the right
        answer itself exceeds a limit, or if the process died for another reason."""
        if golden == answer:
            return MathVerdict.RIGHT
        if len(answer) > max(LONGEST_ANSWER, 2 * len(golden)):
            return MathVerdict.WRONG
        outcome = await self._pool.ask([golden, answer])
        if outcome.ending is Ending.OK:
            return MathVerdict.RIGHT if outcome.value else MathVerdict.WRONG
        if outcome.ending not in LIMITED or not await self._is_decided(golden):
            timed = outcome.ending in (Ending.TIME_OUT, Ending.CPU_LIMIT)
            key = "verify_timeout_s" if timed else "verify_memory_gib"
            raise NotJudged(f"{outcome} (environment.args.{key})")
        self._undecided += 1
        if self._undecided in WARN_AT:
            logger.warning(
                "%d answers count as wrong because comparing them exceeds a limit; the latest: %r for %r (%s)",
                *(self._undecided, answer[:200], golden[:200], outcome),
            )
        return MathVerdict.UNDECIDED

    async def _is_decided(self, golden: str) -> bool:
        if golden not in self._decided:
            outcome = await self._pool.ask([golden, REFERENCE_ALONE])
            if outcome.ending is not Ending.OK and outcome.ending not in LIMITED:
                return False  # a process that died or a stalled machine says nothing of the right answer
            self._decided[golden] = outcome.ending is Ending.OK
        return self._decided[golden]
