"""Competition mathematics: problems of a data set, answers checked by math-verify, one number for how it ended.

prompt      the problem and one sentence that says where the answer goes (agent/answer_format.py)
reward      1                   right, and nothing follows
            partial_end_reward  right, but text follows
            format_reward       in the format, but wrong or cut off by the length limit
            negative_reward     not in the format
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megatron_rl.agent.answer_format import FORMATS
from megatron_rl.agent.datasets import Question
from megatron_rl.agent.hf_dataset import HFDatasetAgent, HFDatasetConfig
from megatron_rl.agent.trajectories import Problem
from megatron_rl.inference.api import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.section import PositiveFloat, PositiveInt


class MathConfig(HFDatasetConfig):
    """Arguments of the environments of mathematics."""

    prompt_fields = ("question", "instruction")

    answer_format: Literal["boxed", "tags", "line"] = "boxed"
    r"""Where the answer goes: \boxed{42}, <answer>42</answer>, or a last line Answer: 42. Scores in different formats
    do not compare."""
    prompt: str = "{question}\n{instruction}"
    """The prompt, in Python's format syntax; {instruction} asks for the format."""
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


class MathEnvironment(HFDatasetAgent):
    """Mathematics with one right answer, of any data set."""

    Config = MathConfig
    config: MathConfig
    compares_answers = True

    def __init__(self, config: MathConfig, tokenizer: Tokenizer) -> None:
        from megatron_rl.environments.math.verifier import Verifier  # the launcher checks a recipe without it

        self._format = FORMATS[config.answer_format]
        super().__init__(config, tokenizer)
        self.prompt_format = ", ".join(filter(None, [config.answer_format, self.prompt_format]))
        self._verifier = Verifier(config.verifiers, config.verify_timeout_s, config.verify_memory_gib)

    async def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        found = self._format.find(response)
        if found is None:
            return float(self.config.negative_reward)
        if finish_reason == "length" or not await self._verifier.equal(golden["answer"], found.text):
            return float(self.config.format_reward)
        return float(self.config.partial_end_reward) if found.has_trailing_text else 1.0

    def final_answer(self, response: str) -> str | None:
        """The answer in its format, without blanks. As text: 1/2 and 0.5 are two, though both may be right."""
        found = self._format.find(response)
        return None if found is None else "".join(found.text.split())

    def fields(self, question: Question) -> dict[str, Any]:
        return {**super().fields(question), "instruction": self._format.instruction}

    def gold_response(self, problem: Problem) -> str:
        return self._format.written(problem.golden["answer"])

    def wrong_response(self, problem: Problem) -> str:
        return self._format.written("-987654321")
