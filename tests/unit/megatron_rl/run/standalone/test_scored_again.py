"""Recorded answers are scored again by the environment's code of today."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import rolled_out
from optional import needs

from launcher.recipe.load import load_recipe
from megatron_rl.agent.api import Environment
from megatron_rl.agent.environments.python import PythonConfig, PythonEnvironment
from megatron_rl.agent.multi_turn import MultiTurnAgent
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.rollout_records import GroupLine
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.learn.rollout.record import answer_line, group_line
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.recipe.section import Section
from megatron_rl.run.standalone.replay import problem_of, scores_now

CONFIG = load_recipe("demo").config
TOKENIZER = CharacterTokenizer("0123456789+-=. ?")


class Counting(MultiTurnAgent):
    """Replies twice, and rewards the number of responses and that of different ones."""

    Config = Section

    def training_problems(self) -> Sequence[Problem]:
        return [Problem("1", {}), Problem("2", {})]

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {}

    def get_observation(self, responses: Sequence[str], golden: Mapping[str, Any]) -> str | None:
        return "?" if len(responses) < 3 else None

    def get_trajectory_reward(
        self, responses: Sequence[str], golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> dict[str, float]:
        return {"said": float(len(responses)), "different": float(len(set(responses)))}


def recorded(environment: Environment, *texts: str, problem: int = 0) -> GroupLine:
    chosen = environment.training_problems()[problem]
    group = rolled_out(environment, ScriptedInference(TOKENIZER, [*texts]), len(texts), problem=chosen)
    answers = [answer_line(each, repeat(0.0), TOKENIZER.token_bytes) for each in group.trajectories]
    return group_line(1, group, [0.0] * len(answers), answers=answers)


def scored(environment: Environment, group: GroupLine) -> list[dict[str, Any]]:
    return asyncio.run(scores_now(environment, CONFIG, problem_of(environment, group), group, TOKENIZER))


def test_an_unchanged_conversation_has_its_recorded_score() -> None:
    environment = Counting(Section(), TOKENIZER)
    group = recorded(environment, "11", "22", problem=1)
    assert [len(answer.sequences[0].turns) for answer in group.answers] == [3, 3]
    wanted = zip(group.rewards, (answer.components for answer in group.answers), strict=True)
    assert scored(environment, group) == [{"reward": reward, "components": parts} for reward, parts in wanted]


REWARD = "def reward(response, answer, **columns):\n    return {'right': float(response == answer)}\n"
CORRECTED = "def reward(response, answer, **columns):\n    return {'right': float(response.strip('.') == answer)}\n"


def python_environment(folder: Path, source: str) -> PythonEnvironment:
    (folder / "reward.py").write_text(source)
    rows = [{"prompt": "1+1=", "answer": answer} for answer in ("2",)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"file": str(folder / "reward.py"), "train": str(folder / "mine.jsonl")}
    return PythonEnvironment(PythonConfig.model_validate(arguments), TOKENIZER)


@needs("datasets")
def test_a_corrected_function_scores_the_recorded_answers(tmp_path: Path) -> None:
    before = python_environment(tmp_path, REWARD)
    group = recorded(before, "2", "2.", "3")
    assert group.rewards == [1.0, 0.0, 0.0]
    now = scored(python_environment(tmp_path, CORRECTED), group)
    assert [score["reward"] for score in now] == [1.0, 1.0, 0.0]
    assert now[1]["components"] == {"right": 1.0}


def test_an_environment_that_scores_elsewhere_says_so() -> None:
    class Elsewhere(Counting):
        async def rescore(self, *arguments: Any) -> Any:
            return await Environment.rescore(self, *arguments)

    environment = Elsewhere(Section(), TOKENIZER)
    with pytest.raises(NotImplementedError, match="Elsewhere does not score answers itself"):
        scored(environment, recorded(environment, "11"))


def test_a_problem_that_is_gone_is_named() -> None:
    environment = Counting(Section(), TOKENIZER)
    group = recorded(environment, "11")._replace(problem="0123456789ab")
    with pytest.raises(ValueError, match="problem 0123456789ab is no longer among the training problems"):
        problem_of(environment, group)
