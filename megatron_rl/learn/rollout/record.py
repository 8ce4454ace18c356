"""Record of the groups of each step: see contract/rollout_records.py."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from megatron_rl.agent.problem_digest import name_of
from megatron_rl.agent.trajectories import UNSAMPLED, Branch, Problem, Trajectory, TrajectoryGroup
from megatron_rl.algorithms.credit import Credit
from megatron_rl.algorithms.turn_credit import spans
from megatron_rl.contract.files import append_bytes
from megatron_rl.contract.paths import Attempt
from megatron_rl.contract.records import PATIENCE_S
from megatron_rl.contract.rollout_records import (
    NOT_FINITE,
    PROMPT_LIMIT,
    AnswerLine,
    GroupLine,
    SequenceLine,
    TurnLine,
    group_json,
    member,
    rollouts_file,
)
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.model.token_bytes import texts_of
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.logs import is_due

FLUSH_S = 10.0  # seconds for which groups may wait for others, with which they are compressed
DIGITS = 4

logger = logging.getLogger(__name__)


class RolloutRecord:
    """Writes the groups of a rank. A killed attempt loses those since the last flush, whose steps are repeated unless
    a checkpoint has them; before a checkpoint they are flushed."""

    def __init__(
        self,
        attempt: Attempt,
        rank: int,
        config: RunConfig,
        tokenizer: Tokenizer,
        right: Callable[[Problem], str | None] = lambda problem: None,
    ) -> None:
        """right: returns the right answer to a problem, None where none is known."""
        self._attempt, self._rank, self._config = attempt, rank, config.logging
        self._token_bytes = cache(tokenizer.token_bytes)
        self._stride = max(1, config.grpo.prompts_per_step // config.logging.samples)
        self._last, self._right = config.training.steps, right
        self._every_group = not config.supervised  # others than the sampled ones, without their tokens
        self._waiting: dict[str, list[str]] = {}
        self._flushed = time.monotonic()
        self._unsynced: set[str] = set()
        self._left_out = False

    def is_sampled(self, step: int) -> bool:
        """Whether some groups of the step are recorded with their tokens; the same on all ranks."""
        every = self._config.samples_every
        return is_due(step, every) or (every > 0 and step == self._last)

    def add(self, step: int, batch: RolloutBatch, credit: Credit | None, logprobs: Tensor | None) -> None:
        """Add the groups of a step.

        Args:
            credit: of the groups to train on; None if another rank of the replica records them. Those that this rank
                passed over are recorded in any case.
            logprobs: [trained tokens] log-probs of the trainer before the updates, if the step is sampled.
        """
        lines = [] if credit is None else [*self._trained(step, batch, credit, logprobs)]
        if self._every_group:
            for group in batch.passed_over:
                lines.append(group_line(step, group, [0.0] * len(group.trajectories), batch.dropped[group.ordinal]))
        if lines:
            path = rollouts_file(self._attempt, self._rank, step)
            self._waiting.setdefault(path, []).extend(group_json(line) + "\n" for line in lines)
        if time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def sync(self) -> None:
        """Write the groups that wait, so that they survive a power failure: a checkpoint must not be newer than they
        are."""
        self.flush()
        unsynced, self._unsynced = self._unsynced, set()
        try:
            for path in unsynced:
                with Path(path).open("rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            self._warn(error)

    def flush(self) -> None:
        """Write the groups that wait. Groups that cannot be written are left out with a warning."""
        waiting, self._waiting, self._flushed = self._waiting, {}, time.monotonic()
        for path, lines in waiting.items():
            try:
                self._attempt.rollouts.mkdir(parents=True, exist_ok=True)
                append_bytes(path, member("".join(lines)), patience=0.0 if self._left_out else PATIENCE_S)
                self._unsynced.add(path)
            except OSError as error:
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._left_out:
            logger.warning("a part of the record of rollouts is left out: %s", error)
        self._left_out = True

    def _trained(self, step: int, batch: RolloutBatch, credit: Credit, logprobs: Tensor | None) -> Iterator[GroupLine]:
        of_answers = iter(_in_digits(credit.advantages))
        of_parts = None if credit.of_spans is None else iter(_in_digits(credit.of_spans))
        token = 0
        for position, group in zip(batch.positions, batch.groups, strict=True):
            answers: list[AnswerLine] = []
            spread = position % self._stride == 0 and position // self._stride < self._config.samples
            sampled = spread or position in batch.firsts
            if logprobs is not None:
                begin, token = token, token + sum(one.loss_mask.count(True) for one in group.sequences)
                if sampled:
                    scores = iter(logprobs[begin:token].tolist())
                    answers = [answer_line(answer, scores, self._token_bytes) for answer in group.trajectories]
            its = [next(of_answers) for _ in group.trajectories]
            turns = [_turns(answer, own, of_parts) for answer, own in zip(group.trajectories, its, strict=True)]
            if answers or self._every_group:
                line = group_line(step, group, its, "", answers)
                if any(turns):
                    line = line._replace(turns=turns)
                right = self._right(group.problem) if answers else None
                yield line if right is None else line._replace(right=right[:PROMPT_LIMIT])


def answer_line(answer: Trajectory, scores: Iterator[float], token_bytes: Callable[[int], bytes]) -> AnswerLine:
    """Return the record of an answer. scores: log-probs of the trainer for its trained tokens and further ones."""
    return AnswerLine(
        text=answer.text,
        components=dict(answer.components),
        tool_calls=answer.tool_calls,
        output=answer.output,
        sequences=[_sequence(sequence, scores, token_bytes) for sequence in answer.sequences],
    )


def _turns(answer: Trajectory, advantage: float, of_spans: Iterator[float] | None) -> list[TurnLine]:
    """Return the turns of an answer that has rewards by turn.

    Args:
        advantage: of the answer.
        of_spans: advantages of its spans and those of the next answers; None without credit by turn.
    """
    parts = [advantage if of_spans is None else next(of_spans) for _ in spans(answer)]
    return [
        TurnLine(score.reward, part, score.key or "", score.agent, score.number)
        for part, score in zip(parts, answer.turn_scores, strict=False)
    ]


def _in_digits(values: Tensor) -> list[float]:
    rounded: list[float] = (values.double() * 10**DIGITS).round().div(10**DIGITS).tolist()
    return rounded


def _sequence(sequence: Branch, scores: Iterator[float], token_bytes: Callable[[int], bytes]) -> SequenceLine:
    return SequenceLine(
        tokens=sequence.tokens,
        pieces=texts_of(sequence.tokens, token_bytes),
        turns=[[turn.start, turn.stop] for turn in sequence.turns],
        trained=sequence.loss_mask,
        logprobs=_rounded(sequence.logprobs),
        trained_logprobs=_rounded(next(scores) if trained else 0.0 for trained in sequence.loss_mask),
        versions=sequence.versions,
    )


def group_line(
    step: int,
    group: TrajectoryGroup,
    advantages: Sequence[float],
    passed_over: str = "",
    answers: Sequence[AnswerLine] = (),
) -> GroupLine:
    problem = group.problem
    versions = group.versions
    return GroupLine(
        step=step,
        ordinal=group.ordinal,
        problem=name_of(problem),
        prompt=problem.prompt[:PROMPT_LIMIT],
        rewards=[answer.reward for answer in group.trajectories],
        advantages=list(advantages),
        lengths=[answer.answer_length for answer in group.trajectories],
        finish_reasons=[answer.finish_reason for answer in group.trajectories],
        lowest_version=min(versions, default=UNSAMPLED),
        highest_version=max(versions, default=UNSAMPLED),
        environment=problem.environment,
        failures=dict(group.failures),
        passed_over=passed_over,
        answers=list(answers),
        begun_version=group.begun_version,
        samples=group.samples if group.lost else [],
    )


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, DIGITS) if math.isfinite(value) else NOT_FINITE for value in values]
