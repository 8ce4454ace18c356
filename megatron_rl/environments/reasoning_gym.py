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
import math
import pickle
import re
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import field_validator

from megatron_rl.agent.prompts import PromptConfig, prompt_format, render_prompt, template_fields
from megatron_rl.agent.sandbox.api import Ending, ProcessLimits
from megatron_rl.agent.trajectories import Problem
from megatron_rl.environments.problem_sets import DrawnProblems, DrawnProblemsConfig
from megatron_rl.inference.api import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.section import PositiveFloat, PositiveInt

logger = logging.getLogger(__name__)

EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")
"""What metadata call a right answer of a task that has many."""


class ReasoningGymConfig(DrawnProblemsConfig, PromptConfig):
    """Arguments of the environment `reasoning-gym`."""

    dataset: str
    """Name of the dataset, such as chain_sum."""
    dataset_args: dict[str, Any] = {}
    """Fields of the dataset's own configuration, but for `seed` and `size`: those are `seed` and `draws`."""
    prompt: str = "{question}"
    """The prompt, in Python's format syntax: {question}, and whatever the dataset's metadata have, such as chain_sum's
    {expression}."""
    scoring: Literal["dataset", "last_number", "distance"] = "dataset"
    """dataset: its own score of the whole answer, in parts for some. last_number: 1 where the last number in the answer
    is the right one, else 0. distance: 1 / (1 + its distance from the right one), 0 where there is no number: where no
    answer to a problem is right, some are better than others still."""
    scorers: PositiveInt = 2
    """Processes that score answers by the dataset's own score, on each rank that generates."""
    score_timeout_s: PositiveFloat = 10.0
    """Longest scoring of an answer so. One that takes longer loses the answer: it is neither right nor wrong."""
    score_memory_gib: PositiveFloat = 4.0
    """Largest process that scores."""

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
            raise ValueError("the prompt must contain {question} or a field of the metadata: else all are the same")
        if "answer" in fields:
            raise ValueError("the prompt must not contain {answer}: there would be nothing left to find out")
        return prompt


class NoScore(Exception):
    """An answer could not be scored."""


class ReasoningGymEnvironment(DrawnProblems):
    """A task of reasoning-gym, named by `dataset` or as reasoning-gym/TASK. Each prompt is there once."""

    Config = ReasoningGymConfig
    config: ReasoningGymConfig
    variant_argument = "dataset"

    @classmethod
    def variants(cls) -> Mapping[str, str]:
        """Every data set that is installed, by name."""
        try:
            datasets = _datasets()
        except ValueError:
            return {}
        return {name: _first_line(dataset.__doc__) or f"The task {name}" for name, (dataset, _) in datasets.items()}

    @classmethod
    def sample_arguments(cls) -> Mapping[str, Any]:
        return {"draws": 8, "held_out": 0.0}

    def __init__(self, config: ReasoningGymConfig, tokenizer: Tokenizer) -> None:
        """Raises ValueError for a dataset or arguments that reasoning-gym does not have."""
        from megatron_rl.agent.sandbox.pool import WorkerPool  # the launcher checks a recipe without it

        self.compares_answers = config.scoring != "dataset"
        self._told = False  # that there is an answer that cannot be read
        super().__init__(config, tokenizer, _problems(_dataset(config), config, tokenizer))
        limits = ProcessLimits(
            wall_s=config.score_timeout_s,
            cpu_s=math.ceil(config.score_timeout_s),
            memory_bytes=int(config.score_memory_gib * 2**30),
        )
        self._scorers = WorkerPool("megatron_rl.environments.reasoning_scores:score", config.scorers, limits)
        self.prompt_format = prompt_format(tokenizer, config)

    def get_reward(
        self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> float | Awaitable[float]:
        if self._waits():
            return self._score(response.strip(), golden)
        said, right = last_number(response), last_number(golden["answer"])
        if said is None or right is None or (self.config.scoring == "last_number" and said != right):
            return 0.0
        return float(1 / (1 + abs(said - right)))

    def _waits(self) -> bool:
        return self.config.scoring == "dataset"

    def _asked(self, answer: str, task: Mapping[str, Any]) -> dict[str, Any]:
        """What a scorer is asked. Tasks have more than JSON knows; what comes back is JSON."""
        of_dataset = self.config.model_dump(include={"dataset", "dataset_args", "seed", "draws"})
        return {**of_dataset, "task": base64.b64encode(pickle.dumps(task)).decode(), "answer": answer}

    async def _score(self, answer: str, task: Mapping[str, Any]) -> float:
        """By the dataset. Raises NoScore."""
        outcome = await self._scorers.ask(self._asked(answer, task))
        if outcome.ending is not Ending.OK:
            key = "score_timeout_s" if outcome.ending is Ending.TIME_OUT else "score_memory_gib"
            raise NoScore(f"{outcome} (environment.args.{key})")
        score, unread = outcome.value
        if unread and not self._told:
            self._told = True
            logger.warning("%s counts an answer as wrong that it cannot read: %s", self.config.dataset, unread)
        return float(score)

    def gold_response(self, problem: Problem) -> str:
        """Its answer, or of a task with many an example, where it gives one."""
        task = problem.golden
        given = [task["answer"], *(task["metadata"].get(name) for name in EXAMPLES)]
        found = next((one for one in given if one is not None), None)
        if found is None:
            raise NotImplementedError(f"reasoning-gym gives no right answers for {self.config.dataset}")
        return found if isinstance(found, str) else json.dumps(found)

    def final_answer(self, response: str) -> str | None:
        """The last number, however it is written: 3, 3.0 and 03 are one."""
        if not self.compares_answers:
            return super().final_answer(response)
        said = last_number(response)
        return None if said is None else str(said.normalize() + 0)


def last_number(text: str) -> Decimal | None:
    """The last decimal number of a text, None where it has none.

    A minus sign belongs to it unless a digit stands right before that, as in 7-3; behind an equals sign, a colon or a
    bracket a blank may follow the sign, as in 5 - 7 = - 2. Commas between thousands count for nothing.
    """
    numbers = _NUMBER.findall(_APART.sub(r"\1-", text.replace("\N{MINUS SIGN}", "-")))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


_APART = re.compile(r"((?:^|[=:({\[$])\s*)-\s+(?=[0-9])")
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
                f"environment.args.prompt: {config.dataset} has no {error}; there are {', '.join(fields)}"
            ) from error
        yield Problem(render_prompt(tokenizer, message, config), task)


def _datasets() -> Mapping[str, tuple[Any, Any]]:
    """Class and configuration of every data set. Raises ValueError where reasoning-gym is not installed."""
    try:
        # Imported here because it takes a second, and the launcher, which only checks the arguments, lacks it.
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"environment reasoning-gym needs `pip install reasoning-gym`: {error}") from error
    found: Mapping[str, tuple[Any, Any]] = DATASETS
    return found


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0].rstrip(".: ")


def _dataset(config: ReasoningGymConfig) -> Any:
    datasets = _datasets()
    if config.dataset not in datasets:
        near = get_close_matches(config.dataset, datasets, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"environment.args.dataset: reasoning-gym has no {config.dataset!r}{hint}")
    dataset, its_config = datasets[config.dataset]
    try:
        return dataset(its_config(**config.dataset_args, seed=config.seed, size=config.draws))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"environment.args.dataset_args: {config.dataset}: {error}") from error
