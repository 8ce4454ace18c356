"""Any dataset of reasoning-gym, by its name: https://github.com/open-thought/reasoning-gym

environment:
  name: reasoning-gym/chain_sum
  args:
    dataset_args: {min_terms: 2, max_terms: 3}
    prompt: "{expression} = ? Reply with the number only."
    scoring: last_number
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import re
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from dataclasses import fields
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import field_validator

from megatron_rl.agent.datasets import words_key
from megatron_rl.agent.environments.problem_sets import DrawnProblems, DrawnProblemsConfig
from megatron_rl.agent.prompts import PromptConfig, prompt_format, render_prompt, template_fields
from megatron_rl.agent.sandbox.limits import Ending, ProcessLimits
from megatron_rl.agent.scoring import NotJudged
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.section import PositiveFloat, PositiveInt

logger = logging.getLogger(__name__)

EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")
"""Metadata keys of an example answer, for tasks with many right answers."""


class ReasoningGymConfig(DrawnProblemsConfig, PromptConfig):
    """Arguments of the environment `reasoning-gym`."""

    dataset: str
    """Name of the dataset, such as chain_sum."""
    dataset_args: dict[str, Any] = {}
    """Fields of the dataset's own configuration, except `seed` and `size`, which are `seed` and `draws`."""
    prompt: str = "{question}"
    """Prompt in Python's format syntax: {question}, and any field of the dataset's metadata, such as chain_sum's
    {expression}."""
    scoring: Literal["dataset", "last_number", "distance"] = "dataset"
    """dataset: the dataset's own score of the whole answer, which may be partial. last_number: 1 if the last number of
    the answer is right, else 0. distance: 1 / (1 + distance from the right number), 0 without a number: wrong answers
    to a problem still differ in reward. The last two are for tasks whose right answers are numbers."""
    scorers: PositiveInt = 2
    """Number of processes that run the dataset's own scorer, on each rank that generates."""
    score_timeout_s: PositiveFloat = 10.0
    """Seconds that the dataset's scorer may take. An answer that exceeds it is lost: it is neither right nor wrong."""
    score_memory_gib: PositiveFloat = 4.0
    """Memory limit of a scoring process, in GiB."""

    @field_validator("dataset_args")
    @classmethod
    def _leaves_the_draws_alone(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name, instead in (("seed", "seed"), ("size", "draws")):
            if name in arguments:
                raise ValueError(f"{name}: give environment.args.{instead} instead")
        return arguments

    @field_validator("prompt")
    @classmethod
    def _asks_something(cls, prompt: str) -> str:
        fields = template_fields(prompt)
        if not fields:
            raise ValueError(
                "the prompt must contain {question} or a field of the metadata: otherwise all prompts are equal"
            )
        if "answer" in fields:
            raise ValueError("the prompt must not contain {answer}: it would give the answer away")
        return prompt


class ReasoningGymEnvironment(DrawnProblems):
    """A task of reasoning-gym, named by `dataset` or as reasoning-gym/TASK, with distinct prompts."""

    Config = ReasoningGymConfig
    config: ReasoningGymConfig
    variant_argument = "dataset"

    @classmethod
    def variants(cls) -> Mapping[str, str]:
        try:
            datasets = _datasets()
        except ValueError:
            return {}
        first_lines = {name: (its.__doc__ or "").strip().partition("\n")[0] for name, (its, _) in datasets.items()}
        return {name: line.rstrip(".: ") or f"The task {name}" for name, line in first_lines.items()}

    @classmethod
    def sample_arguments(cls) -> Mapping[str, Any]:
        return {"draws": 8, "held_out": 0.0}

    def __init__(self, config: ReasoningGymConfig, tokenizer: Tokenizer) -> None:
        from megatron_rl.agent.sandbox.process_pools import (
            WorkerPool,  # not needed by the launcher, which only checks arguments
        )

        self.compares_answers = config.scoring != "dataset"
        self._warned = False  # about an answer that the scorer cannot parse
        super().__init__(config, tokenizer, _problems(_dataset(config), config, tokenizer))
        limits = ProcessLimits.of(config.score_timeout_s, config.score_memory_gib)
        self._scorers = WorkerPool("megatron_rl.agent.environments.reasoning_scores:score", config.scorers, limits)
        self.prompt_format = prompt_format(tokenizer, config)

    def get_reward(
        self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> float | Awaitable[float]:
        if self._waits():
            return self._score(response.strip(), golden)
        answer, right = last_number(response), last_number(golden["answer"])
        if answer is None or right is None or (self.config.scoring == "last_number" and answer != right):
            return 0.0
        return float(1 / (1 + abs(answer - right)))

    def _waits(self) -> bool:
        return self.config.scoring == "dataset"

    def _scorer_request(self, answer: str, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request to a scorer. Tasks may hold values beyond JSON, so they are pickled; the reply is JSON."""
        of_dataset = self.config.model_dump(include={"dataset", "dataset_args", "seed", "draws"})
        return {**of_dataset, "task": base64.b64encode(pickle.dumps(task)).decode(), "answer": answer}

    async def _score(self, answer: str, task: Mapping[str, Any]) -> float:
        outcome = await self._scorers.ask(self._scorer_request(answer, task))
        if outcome.ending is not Ending.OK:
            in_time = outcome.ending not in (Ending.TIME_OUT, Ending.CPU_LIMIT)
            key = "score_memory_gib" if in_time else "score_timeout_s"
            raise NotJudged(f"{outcome} (environment.args.{key})")
        score, unread = outcome.value
        if unread and not self._warned:
            self._warned = True
            logger.warning("%s scores an answer that it cannot parse as wrong: %s", self.config.dataset, unread)
        return float(score)

    def gold_response(self, problem: Problem) -> str:
        """Return the task's answer; for a task with many right answers, an example if it has one."""
        task = problem.golden
        given = [task["answer"], *(task["metadata"].get(name) for name in EXAMPLES)]
        found = next((one for one in given if one is not None), None)
        if found is None:
            raise NotImplementedError(f"reasoning-gym gives no right answers for {self.config.dataset}")
        return found if isinstance(found, str) else json.dumps(found)

    def final_answer(self, response: str) -> str | None:
        """Return the last number in a normal form: 3, 3.0 and 03 are equal."""
        if not self.compares_answers:
            return super().final_answer(response)
        number = last_number(response)
        return None if number is None else str(number.normalize() + 0)


def last_number(text: str) -> Decimal | None:
    """Return the last decimal number of a text; None if it has none.

    A minus sign is part of the number unless a digit precedes it, as in 7-3. After an equals sign, a colon or a bracket
    a blank may follow the sign, as in 5 - 7 = - 2. Commas between thousands are ignored.
    """
    numbers = _NUMBER.findall(_DETACHED_SIGN.sub(r"\1-", text.replace("\N{MINUS SIGN}", "-")))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _is_number(answer: object) -> bool:
    return isinstance(answer, str) and _NUMBER.fullmatch(answer.strip()) is not None


_DETACHED_SIGN = re.compile(r"((?:^|[=:({\[$])\s*)-\s+(?=[0-9])")
_NUMBER = re.compile(r"(?:(?<![0-9.])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def _problems(
    tasks: Iterable[Mapping[str, Any]], config: ReasoningGymConfig, tokenizer: Tokenizer
) -> Iterator[Problem]:
    for task in tasks:
        fields = {**task["metadata"], "question": task["question"]}
        try:
            message = config.prompt.format_map(fields)
        except (KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"environment.args.prompt: {config.dataset} has no field {error}, only {', '.join(fields)}"
            ) from error
        if config.scoring != "dataset" and not _is_number(task["answer"]):
            raise ValueError(
                f"environment.args.scoring: {config.scoring} compares numbers, and a right answer of {config.dataset} "
                f"is {task['answer']!r}: use dataset"
            )
        prompt = render_prompt(tokenizer, message, config)
        yield Problem(prompt, task, questions=frozenset({words_key(task["question"])}))


def _datasets() -> Mapping[str, tuple[Any, Any]]:
    try:
        # Imported here because it takes a second; the launcher, which only checks the arguments, does not have it.
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"environment reasoning-gym needs `pip install reasoning-gym`: {error}") from error
    found: Mapping[str, tuple[Any, Any]] = DATASETS
    return found


def _meant(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, [*known], n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _dataset(config: ReasoningGymConfig) -> Any:
    datasets = _datasets()
    if config.dataset not in datasets:
        hint = _meant(config.dataset, datasets)
        raise ValueError(f"environment.args.dataset: reasoning-gym has no {config.dataset!r}{hint}")
    dataset, its_config = datasets[config.dataset]
    known = [field.name for field in fields(its_config)]
    for name in config.dataset_args:
        if name not in known:
            hint = _meant(name, known) or f"; it has {', '.join(known)}"
            raise ValueError(f"environment.args.dataset_args.{name}: {config.dataset} has no such argument{hint}")
    try:
        return dataset(its_config(**config.dataset_args, seed=config.seed, size=config.draws))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"environment.args.dataset_args: {config.dataset}: {error}") from error
