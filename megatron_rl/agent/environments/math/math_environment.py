"""Mathematics: problems of a data set, with a reward for each way in which an answer may end.

prompt      the problem and a sentence that requests the answer format (agent/answer_format.py)
reward      1                   right
            partial_end_reward  right, but text follows the answer, or the length limit cut it off
            format_reward       in the format, but wrong
            negative_reward     not in the format
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megatron_rl.agent.answer_format import FORMATS
from megatron_rl.agent.datasets import Question
from megatron_rl.agent.hf_dataset import HFDatasetAgent, HFDatasetConfig
from megatron_rl.agent.scoring import UNDECIDED, Reward
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.section import PositiveFloat, PositiveInt


class MathConfig(HFDatasetConfig):
    """Arguments of the mathematics environments."""

    prompt_fields = ("question", "instruction")

    answer_format: Literal["boxed", "tags", "line"] = "boxed"
    r"""Answer format: \boxed{42}, <answer>42</answer>, or a last line Answer: 42. Scores in different formats are not
    comparable."""
    prompt: str = "{question}\n{instruction}"
    """Prompt in Python's format syntax; {instruction} requests the format."""
    partial_end_reward: float = 1.0
    """Reward of a right answer that more text follows than punctuation and a unit, or whose response was cut off after
    it. 1, as in verl, NeMo-RL, TRL and math-verify: what follows an answer cannot make a wrong one right. Less than 1
    teaches a model to stop; evaluations then count such answers as wrong too."""
    format_reward: float = 0.0
    """Reward of a wrong answer in the right format."""
    negative_reward: float = 0.0
    """Reward of a response without an answer in the format."""
    verifiers: PositiveInt = 2
    """Number of processes that compare answers, on each rank that generates."""
    verify_timeout_s: PositiveFloat = 5.0
    """Seconds of processor time that comparing two answers may take, rounded up. An answer that exceeds them is wrong
    and counted in undecided_answers; it is lost if the right answer alone exceeds them."""
    verify_memory_gib: PositiveFloat = 4.0
    """Memory limit of a comparing process, in GiB. An answer that exceeds it counts likewise."""

    def extras(self) -> list[str]:
        return ["math"]


class MathEnvironment(HFDatasetAgent):
    """Mathematics with one right answer per problem, from any data set."""

    Config = MathConfig
    config: MathConfig
    compares_answers = True

    @classmethod
    def reward_of_wrong(cls, arguments: MathConfig) -> float:
        return max(arguments.format_reward, arguments.negative_reward)

    def __init__(self, config: MathConfig, tokenizer: Tokenizer) -> None:
        # not needed by the launcher, which only checks arguments
        from megatron_rl.agent.environments.math.verifier import Verifier

        self._format = FORMATS[config.answer_format]
        super().__init__(config, tokenizer)
        self.prompt_format = ", ".join(filter(None, [config.answer_format, self.prompt_format]))
        self._verifier = Verifier(config.verifiers, config.verify_timeout_s, config.verify_memory_gib)

    async def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> Reward:
        from megatron_rl.agent.environments.math.verifier import MathVerdict  # as above

        found = self._format.find(response)
        if found is None:
            return float(self.config.negative_reward)
        verdict = await self._verifier.judge(golden["answer"], found.text)
        if verdict is MathVerdict.RIGHT:
            goes_on = found.has_trailing_text or finish_reason == "length"
            return float(self.config.partial_end_reward) if goes_on else 1.0
        if verdict is MathVerdict.UNDECIDED:
            return {"reward": float(self.config.format_reward), UNDECIDED: 1.0}
        return float(self.config.format_reward)

    def final_answer(self, response: str) -> str | None:
        """Return the answer without blanks. Compared as text: 1/2 and 0.5 differ, though both may be right."""
        found = self._format.find(response)
        return None if found is None else "".join(found.text.split())

    def fields(self, question: Question) -> dict[str, Any]:
        return {**super().fields(question), "instruction": self._format.instruction}

    def gold_response(self, problem: Problem) -> str:
        return self._format.written(problem.golden["answer"])

    def wrong_response(self, problem: Problem) -> str:
        return self._format.written("-987654321")
