"""Questions with free-form answers, graded by another model.

environment:
  name: judge
  args:
    train: {path: my/questions, question: prompt, answer: reference}
    judge: {url: "http://node7:8000/v1", model: Qwen/Qwen2.5-72B-Instruct, token_file: ~/.config/mrl/judge-token}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.agent.datasets import Question
from megatron_rl.agent.hf_dataset import HFDatasetAgent, HFDatasetConfig
from megatron_rl.agent.judge import Judge, JudgeConfig
from megatron_rl.inference.api import FinishReason
from megatron_rl.model.tokenizer import Tokenizer


class JudgedConfig(HFDatasetConfig):
    """Arguments of the environment `judge`."""

    judge: JudgeConfig
    """The judging model."""
    cut_reward: float = 0.0
    """Reward of an answer that was cut off by the length limit; the judge is not asked."""


class JudgedEnvironment(HFDatasetAgent):
    """Questions of any data set, with answers graded by another model."""

    Config = JudgedConfig  # type: ignore[assignment]  # the judge has no default
    config: JudgedConfig

    def __init__(self, config: JudgedConfig, tokenizer: Tokenizer) -> None:
        """Raises ValueError for data that is missing, empty, or does not match the configuration."""
        super().__init__(config, tokenizer)
        self._judge = Judge(config.judge)

    def golden(self, question: Question) -> dict[str, Any]:
        return {"question": question.text, "answer": question.answer}

    async def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        if finish_reason == "length":
            return self.config.cut_reward
        return await self._judge.score(golden["question"], response, golden["answer"])

    async def close(self) -> None:
        await self._judge.close()
