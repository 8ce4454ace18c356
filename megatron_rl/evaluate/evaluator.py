"""An evaluation from its request to its result, on all ranks of its world.

Problems are answered a block at a time, whole blocks are kept, and one that was cut short is answered again. So every
answer is made beside the same others however often the evaluation is interrupted, and does not depend on whether the
device adds up alike beside others: on a CPU the result is the same bit for bit. Replicas answer a block each at the
same time; rank 0 keeps what they all have found, and tells it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_rl.agent.api import Environment, EvaluationAgent, EvaluationRequest, EvaluationResponse
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.registry import build_environment
from megatron_rl.agent.scoring import Patience
from megatron_rl.agent.trajectories import Problem, Trajectory
from megatron_rl.contract.evaluation_records import GREEDY, SAMPLED, EvaluationResult, ProblemAnswers, ScoredAnswer
from megatron_rl.contract.records import write
from megatron_rl.errors import ConfigurationError
from megatron_rl.evaluate.answers import Answers, kept_answers, naming
from megatron_rl.evaluate.config import Evaluation
from megatron_rl.evaluate.result import result
from megatron_rl.evaluate.settings import default_out, settings_of
from megatron_rl.inference.config import InferenceConfig, Sampling
from megatron_rl.inference.engine import Engine
from megatron_rl.rank.small_world import Place
from megatron_rl.standalone.policy import ROWS, OpenedPolicy, open_policy
from megatron_rl.standalone.source import Source, find_source

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNEXPLAINED = "the environment does not say why"

Waits = Callable[[], AbstractContextManager[None]]
"""What to enter while this rank waits for others."""

Run = Callable[[Coroutine[Any, Any, list[EvaluationResponse]], Engine], list[EvaluationResponse] | None]
"""Drives a block to its end; None where it was given up because the process was asked to leave."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an evaluation is."""

    set: str
    mode: str
    done: int
    """Problems answered, of all sets and modes together."""
    of: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Problems that are answered together."""

    set: str
    mode: str
    problems: range

    @property
    def places(self) -> list[tuple[str, str, int]]:
        return [(self.set, self.mode, problem) for problem in self.problems]


def evaluate(
    evaluation: Evaluation,
    run: Run,
    report: Callable[[Progress], None],
    place: Place | None = None,
    waits: Waits = nullcontext,
    conclude: Callable[[bool], None] | None = None,
) -> tuple[EvaluationResult, Path] | None:
    """Answer what is not answered yet, and write the result; it and its file. None where it was given up, when what has
    been answered is kept, and on all ranks but the first. Collective.

    Args:
        place: of this rank; default: there is no other.
        conclude: called on rank 0 before any rank leaves, with whether all is answered.

    Raises:
        ConfigurationError: it cannot be asked so, or its file holds something else.
        CheckpointError: the checkpoint is damaged or cannot be read.
        OSError: the files cannot be written.
    """
    asked, place = evaluation.evaluate, place or Place.alone()
    if place.size != asked.ranks:
        raise ConfigurationError(
            f"evaluate: {asked.replicas} replicas of {asked.tp} ranks are {asked.ranks}, and there are {place.size}"
        )
    source = find_source(asked.checkpoint, asked.dtype)
    try:
        environment = build_environment(evaluation.environment, source.tokenizer)
        sets = choose_sets(environment.evaluation_problems(), asked.sets, asked.prompts)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    inference = source.recipe.inference if source.recipe else InferenceConfig(max_batch=ROWS)
    # A block must not depend on what the blocks before it have left in the cache.
    inference = inference.model_copy(update={"share_prefixes": False})
    with open_policy(
        source,
        device=asked.device,
        threads=asked.threads,
        max_length=_longest(sets, source, evaluation.sampling),
        inference=inference,
        tp=asked.tp,
        place=place,
    ) as opened:
        if not opened.ranks.drives:
            opened.engine.follow(waits)
            return None
        answering = _Answering(evaluation, environment, opened, sets, inference.max_batch, run, report, waits)
        if place.rank:
            answering.help()
            answering.part()
            return None
        settings = settings_of(evaluation, opened, environment, sets, inference.max_batch)
        out = Path(asked.out) if asked.out else default_out(source, evaluation, sets, settings)
        found = None
        with kept_answers(out.with_suffix(".answers.jsonl"), settings) as answers:
            if answering.lead(answers):
                sizes = {name: len(problems) for name, problems in sets.items()}
                found = result(settings, sizes, answers.known, str(answers.path))
                with naming(out):
                    write(out, found)
        if conclude:
            conclude(found is not None)
        answering.part()
        return found and (found, out)


def choose_sets(
    there: Mapping[str, Sequence[Problem]], names: Sequence[str] | None, prompts: int | None
) -> dict[str, Sequence[Problem]]:
    """The problems of the sets that were asked for. Raises ValueError where there is no such set, or none at all."""
    if not there:
        raise ValueError("the environment has no evaluation problems")
    if missing := sorted(set(names or ()) - there.keys()):
        raise ValueError(f"--set {missing[0]}: the environment has no such set; there are {', '.join(sorted(there))}")
    chosen = {name: there[name][:prompts] for name in (there if names is None else dict.fromkeys(names))}
    if not any(chosen.values()):
        raise ValueError(f"{', '.join(chosen)}: there are no problems in it")
    return chosen


def _longest(sets: Mapping[str, Sequence[Problem]], source: Source, sampling: Sampling) -> int:
    """Tokens that the cache has room for: the longest prompt and answer, but no more than the model knows. A prompt
    that leaves no room for an answer is lost, and counted so."""
    positions = source.model.max_position_embeddings
    if sampling.max_new_tokens >= positions:
        raise ConfigurationError(
            f"sampling.max_new_tokens {sampling.max_new_tokens}: the model knows {positions} positions, so there is no "
            "room for a prompt"
        )
    prompts = (source.tokenizer.encode(problem.prompt) for problems in sets.values() for problem in problems)
    return min(positions, max(map(len, prompts)) + sampling.max_new_tokens)


# Answering


def blocks(sizes: Mapping[str, int], modes: Mapping[str, int], rows: int) -> Iterator[_Block]:
    """What is answered together, in its order.

    Args:
        sizes: problems of each set.
        modes: answers to each problem.
        rows: answers that the engine decodes at once: a block is twice as large, so that few rows stay empty.
    """
    for name, size in sizes.items():
        for mode, samples in modes.items():
            problems = max(1, -(-2 * rows // samples))
            for first in range(0, size, problems):
                yield _Block(name, mode, range(first, min(size, first + problems)))


@dataclass(frozen=True, slots=True)
class _Answering:
    """All blocks that are left, shared out over the replicas, on the first rank of one of them."""

    evaluation: Evaluation
    environment: Environment
    opened: OpenedPolicy
    sets: Mapping[str, Sequence[Problem]]
    rows: int
    run: Run
    report: Callable[[Progress], None]
    waits: Waits

    def lead(self, answers: Answers) -> bool:
        """Have all replicas answer what is not known, and keep it; whether all is answered now."""
        sizes = {name: len(problems) for name, problems in self.sets.items()}
        left = [
            block
            for block in blocks(sizes, self._modes, self.rows)
            if not all(place in answers.known for place in block.places)
        ]
        return self._answer(self._told(left), answers.add)

    def help(self) -> None:
        """Answer this replica's share of them."""
        self._answer(self._told([]), lambda lines: None)

    @property
    def _modes(self) -> dict[str, int]:
        """Answers to each problem."""
        asked = self.evaluation.evaluate
        return {SAMPLED: asked.k} | ({GREEDY: 1} if asked.greedy else {})

    def _answer(self, left: list[_Block], keep: Callable[[list[ProblemAnswers]], None]) -> bool:
        ranks = self.opened.ranks
        total = len(self._modes) * sum(map(len, self.sets.values()))
        # Of a block that was cut short some answers may be known: they are made again with the others.
        done = total - sum(len(block.problems) for block in left)
        for first in range(0, len(left), ranks.count):
            together = left[first : first + ranks.count]
            self.report(Progress(together[0].set, together[0].mode, done, total))
            own = together[ranks.index] if ranks.index < len(together) else None
            found = self._gathered([] if own is None else self._lines(own))
            for lines in filter(None, found):
                keep(lines)
                done += len(lines)
            if None in found:
                break
        self.report(Progress("", "", done, total))
        return done == total

    def _lines(self, block: _Block) -> list[ProblemAnswers] | None:
        """What a block comes to; None where it was given up."""
        problems = [self.sets[block.set][problem] for problem in block.problems]
        samples, engine = self._modes[block.mode], self.opened.engine
        responses = self.run(_answer(self.evaluation, self.environment, engine, block, problems, samples), engine)
        if responses is None:
            return None
        return [
            _line(place, response, samples, self.environment.agent_of(problem))
            for place, response, problem in zip(block.places, responses, problems, strict=True)
        ]

    def part(self) -> None:
        """Leave when all do, which the first one says by leaving."""
        self._gathered(None)

    def _told(self, left: list[_Block]) -> list[_Block]:
        """What the first replica says."""
        told = [left]
        if self.opened.ranks.count > 1:
            with self.waits():
                dist.broadcast_object_list(told, group=self.opened.leaders, group_src=0)
        return told[0]

    def _gathered(self, own: T) -> list[T]:
        """What all replicas have, in their order."""
        if (count := self.opened.ranks.count) == 1:
            return [own]
        found: list[Any] = [None] * count
        with self.waits():
            dist.all_gather_object(found, own, group=self.opened.leaders)
        return found


async def _answer(
    evaluation: Evaluation,
    environment: Environment,
    engine: Engine,
    block: _Block,
    problems: Sequence[Problem],
    samples: int,
) -> list[EvaluationResponse]:
    """A request for each problem, so that its random numbers depend on its place in the set alone."""
    sampling = evaluation.sampling
    if block.mode == GREEDY:
        sampling = sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0})
    requests = [
        EvaluationRequest(
            problems=[problem],
            sampling=sampling,
            samples_per_problem=samples,
            key=stable_key(f"evaluate:{block.set}:{block.mode}", evaluation.evaluate.seed, place),
            inference=engine,
            patience=Patience.of(evaluation.environment),
        )
        for place, problem in zip(block.problems, problems, strict=True)
    ]
    return await asyncio.gather(*map(environment.evaluate, requests))


def _line(
    place: tuple[str, str, int], response: EvaluationResponse, samples: int, agent: EvaluationAgent
) -> ProblemAnswers:
    (trajectories,) = response.trajectories
    failures = dict(response.failures)
    if unexplained := samples - len(trajectories) - sum(failures.values()):
        failures[UNEXPLAINED] = unexplained
    finals: Sequence[str | None] = response.final_answers.get(0) or [
        agent.final_answer(answer.text) if agent.compares_answers else None for answer in trajectories
    ]
    return ProblemAnswers(*place, [*map(_scored, trajectories, finals)], failures)


def _scored(answer: Trajectory, final_answer: str | None) -> ScoredAnswer:
    return ScoredAnswer(
        reward=answer.reward,
        tokens=answer.answer_length,
        finish_reason=answer.finish_reason,
        text=answer.text,
        vote=final_answer,
    )
