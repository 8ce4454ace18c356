"""All teachers of a run: which answers each of them judges, and the texts that it reads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from megatron_rl.agent.trajectories import UNSAMPLED, Branch
from megatron_rl.algorithms.divergences import JudgedTokens
from megatron_rl.learn.training.objective import FirstPass, JudgedBatch, Judgement, Judges, Teacher
from megatron_rl.learn.training.training_batch import TrainingBatch
from megatron_rl.model.platform.host_tensors import int64
from megatron_rl.rank.control import Control
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import DistillConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _AssignedTeacher:
    teacher: Teacher
    teaching: DistillConfig  # one of those whose answers it judges: they agree in `judged_by`
    indices: frozenset[int]  # of all of them in `Teachings.each`


def judges_of(
    config: RunConfig,
    control: Control,
    encode: Callable[[str], list[int]],
    teacher_of: Callable[[DistillConfig], Teacher | None],
) -> Judges | None:
    """Return the judges of a run; None without a teacher.

    Args:
        control: all ranks.
        encode: of the policy's tokenizer.
        teacher_of: returns the teacher of a teaching; None leaves it out, and its answers are not judged.
    """
    teachers: list[_AssignedTeacher] = []
    each = config.teachings.each
    for teaching in {one.judged_by: one for one in each}.values():
        if (teacher := teacher_of(teaching)) is not None:
            indices = frozenset(at for at, one in enumerate(each) if one.judged_by == teaching.judged_by)
            teachers.append(_AssignedTeacher(teacher, teaching, indices))
    return _AssignedTeachers(config, control, encode, teachers) if teachers else None


class _AssignedTeachers:
    def __init__(
        self,
        config: RunConfig,
        control: Control,
        encode: Callable[[str], list[int]],
        teachers: Sequence[_AssignedTeacher],
    ) -> None:
        self._teachers, self._control, self._encode = teachers, control, encode
        self._longest, self._temperature = config.sequence_length, config.sampling.temperature
        self._key_of, self._teaching_of = config.teachings.key, config.teachings.indices
        self._warned = False

    def __call__(self, first_pass: FirstPass) -> JudgedBatch:
        """Let each teacher judge its answers. Collective over all ranks."""
        batch, [first, *others] = first_pass.batch, self._teachers
        differ = any(problem.teacher_prompt is not None for problem in batch.problems)
        one_for_all = not others and set(self._teaching_of.values()) <= first.indices
        # All ranks must decide alike, and a rank knows its own answers alone.
        if one_for_all and len(first.indices) == 1 and not self._control.any(differ)[0]:
            judged = first.teacher(first_pass)
            return JudgedBatch(judged.logprobs, None, self._judged(first, judged, None))
        texts = self._texts(batch)
        teaching = self._teaching(batch, texts)
        logprobs, distributions = torch.zeros_like(batch.inference_logprobs), []
        for assigned in self._teachers:
            own = [at for at, its in enumerate(teaching.tolist()) if its in assigned.indices]
            of_own = first_pass.of(texts, own)
            judged = assigned.teacher(of_own)
            logprobs += judged.logprobs
            assert of_own.row is not None
            distributions += self._judged(assigned, judged, of_own.row.to(logprobs.device))
        of_tokens = teaching.repeat_interleave(batch.lengths).to(logprobs.device)
        return JudgedBatch(logprobs, of_tokens, distributions)

    def _texts(self, batch: TrainingBatch) -> Sequence[Branch]:
        """Return each sequence of a batch as a teacher reads it."""
        encode, texts = cache(self._encode), []
        for sequence, of in zip(batch.sequences, batch.trajectory.tolist(), strict=True):
            problem = batch.problems[of]
            if problem.teacher_prompt is not None:
                sequence = _behind(sequence, encode(problem.prompt), encode(problem.teacher_prompt))
            texts.append(sequence)
        return texts

    def _teaching(self, batch: TrainingBatch, texts: Sequence[Branch]) -> torch.Tensor:
        """Return the index of each sequence's teaching in `Teachings.each`, -1 if nobody judges it, [sequences]."""
        known = frozenset().union(*(assigned.indices for assigned in self._teachers))
        teaching = [self._teaching_of[self._key_of(batch.problems[of].environment)] for of in batch.trajectory.tolist()]
        too_long = [len(text.tokens) > self._longest for text in texts]
        if any(too_long) and not self._warned:
            self._warned = True
            logger.warning(
                "%d of %d answers are not judged, because they and the teacher's prompt are longer than "
                "training.sequence_length %d; this is said once",
                *(sum(too_long), len(texts), self._longest),
            )
        return int64([its if its in known and not long else -1 for its, long in zip(teaching, too_long, strict=True)])

    def _judged(self, assigned: _AssignedTeacher, judged: Judgement, row: torch.Tensor | None) -> list[JudgedTokens]:
        if judged.distributions is None:
            return []
        assert assigned.teaching.divergence is not None
        temperature = assigned.teaching.divergence.temperature or self._temperature
        return [JudgedTokens(judged.distributions, assigned.teaching.divergence, temperature, row)]


def _behind(sequence: Branch, prompt: Sequence[int], teachers: Sequence[int]) -> Branch:
    """Return a sequence with the teacher's prompt in place of the policy's.

    prompt, teachers: tokens of both.

    Raises ValueError if the sequence does not begin with the policy's prompt.
    """
    own, further = len(prompt), len(teachers) - len(prompt)
    if sequence.tokens[:own] != [*prompt]:
        raise ValueError("an answer does not begin with its problem's prompt, so the teacher cannot read another one")
    none = [False] * len(teachers)
    return Branch(
        tokens=[*teachers, *sequence.tokens[own:]],
        loss_mask=[*none, *sequence.loss_mask[own:]],
        logprobs=[*[0.0] * len(teachers), *sequence.logprobs[own:]],
        versions=[*[UNSAMPLED] * len(teachers), *sequence.versions[own:]],
        turns=[range(turn.start + further, turn.stop + further) for turn in sequence.turns],
    )
