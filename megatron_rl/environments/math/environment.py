"""Competition mathematics: problems of a data set, answers checked by math-verify, one number for how it ended.

prompt      the problem and one sentence that says where the answer goes (format.py)
reward      1                   right, and nothing follows
            partial_end_reward  right, but text follows
            format_reward       in the format, but wrong or cut off by the length limit
            negative_reward     not in the format
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.trajectories import Problem
from megatron_rl.environments.math.format import FORMATS
from megatron_rl.environments.math.problems import DataSet, Question, distinct, normalised, read_questions
from megatron_rl.environments.prompts import Chat, asked, in_chat, template_fields
from megatron_rl.inference.api import FinishReason
from megatron_rl.model.config import is_hub_name
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.section import PositiveFloat, PositiveInt, Section

logger = logging.getLogger(__name__)


class MathConfig(Section):
    """Arguments of the environment `math`."""

    train: DataSet
    evaluate: dict[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], DataSet] = {}
    """Evaluation sets by name. Their problems are left out of the training set."""
    answer_format: Literal["boxed", "tags", "line"] = "boxed"
    r"""Where the answer goes: \boxed{42}, <answer>42</answer>, or a last line Answer: 42. Scores in different formats
    do not compare."""
    prompt: str = "{question}\n{instruction}"
    """The prompt, in Python's format syntax; {instruction} asks for the format."""
    chat: Chat = "auto"
    """always: as a user's message in the tokenizer's chat template. auto: so where it has one. never: as it stands."""
    max_prompt_tokens: PositiveInt | None = None
    """Problems with a longer prompt are left out, and counted in the log; default: none is."""
    partial_end_reward: float = 0.0
    """A right answer, followed by more text."""
    format_reward: float = 0.0
    """A wrong one in the right format, or a right one whose text was cut off."""
    negative_reward: float = 0.0
    """No answer in the format."""
    verifiers: PositiveInt = 2
    """Processes that compare answers, on each rank that generates."""
    verify_timeout_s: PositiveFloat = 10.0
    """Longest comparison of two answers. One that takes longer loses the answer: it is neither right nor wrong."""
    verify_memory_gib: PositiveFloat = 4.0
    """Largest process that compares."""

    @field_validator("prompt")
    @classmethod
    def _asks_the_question(cls, prompt: str) -> str:
        if "question" not in template_fields(prompt, ("question", "instruction")):
            raise ValueError("the prompt must contain {question}: nothing else says what to solve")
        return prompt

    def datasets(self) -> list[str]:
        """Names on the hub of what it reads."""
        paths = [self.train.path, *(data.path for data in self.evaluate.values())]
        return sorted({path for path in paths if is_hub_name(path)})


class MathEnvironment(RewardOnlyAgent):
    """Problems of `train`, but for those of `evaluate`; both without repeats, in the order of the data sets."""

    Config = MathConfig
    compares_answers = True

    def __init__(self, config: MathConfig, tokenizer: Tokenizer) -> None:
        from megatron_rl.environments.math.verifier import Verifier  # the launcher checks a recipe without it

        super().__init__(config, tokenizer)
        self._format = FORMATS[config.answer_format]
        chat = ", chat template" if in_chat(tokenizer, config.chat) else ""
        self.prompt_format = f"{config.answer_format}{chat}"
        held_out = {name: distinct(read_questions(data)) for name, data in config.evaluate.items()}
        kept_apart = {normalised(question.text) for questions in held_out.values() for question in questions}
        questions = distinct(read_questions(config.train))
        trained = [question for question in questions if normalised(question.text) not in kept_apart]
        if len(trained) < len(questions):
            logger.info("%d training problems left out: an evaluation set has them", len(questions) - len(trained))
        self._trained = self._problems(config.train.path, trained)
        self._held_out = {name: self._problems(name, questions) for name, questions in held_out.items()}
        self._verifier = Verifier(config.verifiers, config.verify_timeout_s, config.verify_memory_gib)
        if not self._trained:
            raise ValueError(f"environment.args.train: {config.train.path} leaves no problem to train on")

    def training_problems(self) -> Sequence[Problem]:
        return self._trained

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return self._held_out

    async def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        found = self._format.find(response)
        if found is None:
            return float(self.config.negative_reward)
        if finish_reason == "length" or not await self._verifier.equal(golden["answer"], found.text):
            return float(self.config.format_reward)
        return float(self.config.partial_end_reward) if found.talks_on else 1.0

    def final_answer(self, response: str) -> str | None:
        """The answer in its format, without blanks. As text: 1/2 and 0.5 are two, though both may be right."""
        found = self._format.find(response)
        return None if found is None else "".join(found.text.split())

    def _problems(self, source: str, questions: Sequence[Question]) -> list[Problem]:
        problems = [Problem(self._prompt(question.text), {"answer": question.answer}) for question in questions]
        limit = self.config.max_prompt_tokens
        if limit is None:
            return problems
        fitting = [problem for problem in problems if len(self.tokenizer.encode(problem.prompt)) <= limit]
        if len(fitting) < len(problems):
            left_out = len(problems) - len(fitting)
            logger.info("%s: %d of %d problems left out: over %d tokens", source, left_out, len(problems), limit)
        return fitting

    def _prompt(self, question: str) -> str:
        text = self.config.prompt.format(question=question, instruction=self._format.instruction)
        return asked(self.tokenizer, text, self.config.chat)
