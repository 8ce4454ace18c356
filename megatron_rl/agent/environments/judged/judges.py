"""Scores of answers by models: in words, or by a sequence classifier."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from megatron_rl.agent.environments.judged.judged_arguments import Criterion, JudgeConfig, RewardModelConfig
from megatron_rl.agent.environments.judged.reward_replicas import ScoringReplicas
from megatron_rl.agent.environments.judged.scoring_server import CachedScorer, ScoringServer
from megatron_rl.agent.environments.judged.verdicts import preference_in, score_in
from megatron_rl.agent.reward_value import Reward
from megatron_rl.agent.scoring import NotJudged


class Judge:
    """A model that judges in words, through OpenAI's chat completions."""

    def __init__(self, config: JudgeConfig, **replaced: Any) -> None:
        """replaced: see `ScoringServer`."""
        self.config = config
        self.server = ScoringServer(config, config.url, config.model, **replaced)

    async def score(self, question: str, response: str, answer: str) -> Reward:
        """Return the score of a response, from 0 to 1; with a rubric also that by each criterion. Raises NotJudged."""
        config = self.config
        material = {"question": question, "response": response, "answer": answer}
        if not config.rubric:
            return score_in(await self._reply(config.prompt_text.format(**material)), config.best)
        asked = [[each] for each in config.rubric] if config.calls == "each" else [config.rubric]
        replies = await asyncio.gather(
            *(self._reply(config.prompt_text.format(criteria=_listed(some), **material)) for some in asked)
        )
        found = {
            each.name: score_in(reply, config.best, each.name)
            for some, reply in zip(asked, replies, strict=True)
            for each in some
        }
        weighted = math.fsum(each.weight * found[each.name] for each in config.rubric)
        return {"reward": weighted / math.fsum(each.weight for each in config.rubric), **found}

    async def match(self, question: str, first: str, second: str, answer: str) -> float:
        """Return 1 if the first response is better, 0 if the second is, 0.5 for a tie. Raises NotJudged."""
        if first == second:
            return 0.5
        compare = self.config.compare
        assert compare is not None

        async def prefers_first(first: str, second: str) -> float:
            text = compare.prompt.format(question=question, first=first, second=second, answer=answer)
            return preference_in(await self._reply(text))

        if not compare.both_orders:
            return await prefers_first(first, second)
        one, other = await asyncio.gather(prefers_first(first, second), prefers_first(second, first))
        agreed = (one + 1 - other) / 2
        return agreed if agreed in (0.0, 1.0) else 0.5

    async def close(self) -> None:
        await self.server.close()

    async def _reply(self, content: str) -> str:
        body = {
            "messages": [{"role": "user", "content": content}],
            **self.config.model_dump(include={"temperature", "max_tokens"}, exclude_none=True),
        }
        repeatable = self.config.temperature == 0
        reply: str = await self.server.ask("chat/completions", body, _content, repeatable=repeatable)
        return reply


class RewardModel:
    """A sequence classifier behind vLLM's route /classify, on a server or on replicas of the run."""

    def __init__(self, config: RewardModelConfig, **replaced: Any) -> None:
        """replaced: see `ScoringServer`."""
        self.config = config
        self.replicas: ScoringReplicas | None = None
        """Replicas that the run starts; None: a server scores."""
        self._asked: CachedScorer
        if config.url is None or config.model is None:
            self._asked = self.replicas = ScoringReplicas(config)
        else:
            self._asked = ScoringServer(config, config.url, config.model, **replaced)

    async def score(self, question: str, response: str, answer: str) -> Reward:
        """Return the classifier's value for a response. Raises NotJudged."""
        config = self.config
        if config.text is None:
            said = {"user": question, "assistant": response}
            given: dict[str, Any] = {"messages": [{"role": role, "content": text} for role, text in said.items()]}
        else:
            given = {"input": config.text.format(question=question, response=response, answer=answer)}
        values = await self._asked.ask("classify", {**given, "use_activation": config.activation}, _values)
        if config.label is None and len(values) > 1:
            raise NotJudged(f"the classifier has {len(values)} classes: name one by reward_model.label")
        label = config.label or 0
        if label >= len(values):
            raise NotJudged(f"the classifier has {len(values)} classes, and none with number {label}")
        return float(values[label])

    async def close(self) -> None:
        await self._asked.close()


def _listed(criteria: Sequence[Criterion]) -> str:
    return "\n".join(f"- {each.name}: {each.text}" for each in criteria)


def _content(response: Any) -> str:
    choice = response["choices"][0]
    if choice.get("finish_reason") == "length":  # VERDICT: 1 may be the beginning of VERDICT: 10
        raise NotJudged("the judge's reply is cut off at max_tokens")
    return str(choice["message"]["content"])


def _values(response: Any) -> list[float]:
    [classified] = response["data"]
    values = [float(value) for value in classified["probs"]]
    if not all(map(math.isfinite, values)):
        raise ValueError("a value that is not finite")
    return values
