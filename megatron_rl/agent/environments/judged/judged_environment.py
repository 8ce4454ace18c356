"""Questions with free-form answers, scored by another model: in words, by a rubric, by comparison, or by a classifier.

environment:
  name: judge
  args:
    train: {path: my/questions, question: prompt, answer: reference}
    judge: {url: "http://node7:8000/v1", model: Qwen/Qwen2.5-72B-Instruct, token_file: ~/.config/mrl/judge-token}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_rl.agent.datasets import Question
from megatron_rl.agent.environments.judged.judged_arguments import JudgedConfig
from megatron_rl.agent.hf_dataset import HFDatasetAgent
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.recorded_answers import RecordedAnswer
from megatron_rl.agent.reward_only import or_why_not
from megatron_rl.agent.reward_value import Reward
from megatron_rl.agent.scoring import CheckedReward, NotJudged, RolloutLimits
from megatron_rl.agent.trajectories import Problem, Trajectory
from megatron_rl.generate.engine.interface import Completion, FinishReason, GenerationRequest, InferenceInterface
from megatron_rl.model.tokenizer import Tokenizer

if TYPE_CHECKING:  # slow imports, as those within functions; the launcher imports this module to check a recipe
    from megatron_rl.agent.environments.judged.contests import Outcome
    from megatron_rl.agent.environments.judged.judges import Judge, RewardModel
    from megatron_rl.agent.environments.judged.reward_replicas import ScoringReplicas
    from megatron_rl.generate.replicas.fixed_replicas import Running


class JudgedEnvironment(HFDatasetAgent):
    """Questions of any data set, with answers scored by another model."""

    Config = JudgedConfig
    config: JudgedConfig

    def __init__(self, config: JudgedConfig, tokenizer: Tokenizer) -> None:
        from megatron_rl.agent.environments.judged.judges import Judge, RewardModel

        super().__init__(config, tokenizer)
        self._scorer: Judge | RewardModel
        self._compares: Judge | None = None
        self._replicas: ScoringReplicas | None = None
        if config.judge is not None:
            self._scorer = judge = Judge(config.judge)
            self._compares = judge if config.judge.compare else None
        elif config.reward_model is not None:
            self._scorer = model = RewardModel(config.reward_model)
            self._replicas = model.replicas

    def golden(self, question: Question) -> dict[str, Any]:
        return {"question": question.text, "answer": question.answer}

    async def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> Reward:
        if (cut := self._reward_of_cut(finish_reason)) is not None:
            return cut
        if self._compares is not None:
            return await self._compares.match(golden["question"], response, golden["answer"], golden["answer"])
        return await self._scorer.score(golden["question"], response, golden["answer"])

    def _reward_of_cut(self, finish_reason: FinishReason) -> float | None:
        """Reward of a cut answer that nobody is asked about, or None."""
        return self.config.reward_of_cut if finish_reason == "length" else None

    async def rescore(self, problem: Problem, answer: RecordedAnswer, limits: RolloutLimits) -> CheckedReward | str:
        """Raises NotImplementedError where a reward is relative to the other answers of a group."""
        if self._compares is not None:
            raise NotImplementedError("judge.compare scores an answer beside the others of its group, and none alone")
        return await super().rescore(problem, answer, limits)

    async def _results(
        self,
        problem: Problem,
        request: GenerationRequest,
        completions: Sequence[Completion],
        inference: InferenceInterface,
        limits: RolloutLimits,
        spent_s: float,
    ) -> list[Trajectory | str]:
        if self._compares is None or request.ordinal is None:
            return await super()._results(problem, request, completions, inference, limits, spent_s)
        import asyncio

        texts = [self.tokenizer.decode(completion.tokens) for completion in completions]
        cut = [self._reward_of_cut(completion.finish_reason) for completion in completions]
        whole = [place for place, reward in enumerate(cut) if reward is None]
        contesting = self._contest(self._compares, problem, [texts[place] for place in whole], request.key)
        contest = asyncio.ensure_future(contesting)

        async def outcome(place: int) -> Reward:
            if (reward := cut[place]) is not None:
                return reward
            found = (await asyncio.shield(contest))[whole.index(place)]
            if isinstance(found, NotJudged):
                raise found
            return found

        async def scored(place: int) -> Trajectory | str:
            found = await self._scored(partial(outcome, place), problem, texts[place], limits)
            if isinstance(found, str):
                return found
            return Trajectory.single(request.prompt_tokens, completions[place], texts[place], found.reward)

        try:
            return await asyncio.gather(
                *(or_why_not(partial(scored, place), limits, spent_s) for place in range(len(completions)))
            )
        finally:
            contest.cancel()

    async def _contest(self, judge: Judge, problem: Problem, texts: Sequence[str], key: int) -> list[Outcome]:
        from megatron_rl.agent.environments.judged.contests import all_against_all, knockout

        async def match(one: int, other: int) -> float:
            golden = problem.golden
            return await judge.match(golden["question"], texts[one], texts[other], golden["answer"])

        if judge.config.compare is not None and judge.config.compare.matches == "knockout":
            return await knockout(len(texts), match, stable_key("draw", key))
        return await all_against_all(len(texts), match)

    def use_reward_model(self, running: Running, limit_s: float) -> None:
        if self._replicas is not None:
            self._replicas.use(running, limit_s)

    async def close(self) -> None:
        await self._scorer.close()
