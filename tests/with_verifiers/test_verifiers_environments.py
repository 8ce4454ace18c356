"""Environments of the real verifiers against the policy endpoint. The model's answers are scripted."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from chat_templates import CHATML, qwen3, tokenizer_of

from megatron_rl.agent.api import EvaluationRequest, GroupRolloutRequest
from megatron_rl.agent.environments.vf.verifiers_environment import VerifiersConfig, VerifiersEnvironment
from megatron_rl.agent.environments.vf.worker_process import WORKER
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.model.tokenizer import HuggingFaceTokenizer, load_pretrained_tokenizer
from megatron_rl.recipe.inference import Sampling

SAMPLING = Sampling(temperature=1.0, max_new_tokens=200)
LIMITS = RolloutLimits(60.0)

Answer = Callable[[str, int], str]


@pytest.fixture
def with_renderer(tmp_path: Path) -> HuggingFaceTokenizer:
    """The tokenizer of a model with a renderer, in a folder: verifiers renders its conversations itself."""
    return saved(qwen3(), tmp_path / "tokenizer")


@pytest.fixture
def without_renderer() -> HuggingFaceTokenizer:
    """A tokenizer whose chat template no renderer of the library knows: the endpoint renders."""
    return tokenizer_of(CHATML)


def saved(tokenizer: HuggingFaceTokenizer, folder: Path) -> HuggingFaceTokenizer:
    tokenizer._tokenizer.save_pretrained(folder)
    return HuggingFaceTokenizer(load_pretrained_tokenizer(folder))


def right_sums(prompt: str, sample: int) -> str:
    """Sum of all digits that the conversation has asked for."""
    asked = re.findall(r"(\d) \+ (\d) =|Now add (\d)", prompt)
    return str(sum(int(digit) for found in asked for digit in found if digit))


def environment(python: str, tokenizer: HuggingFaceTokenizer, id: str, **arguments: Any) -> VerifiersEnvironment:
    return VerifiersEnvironment(VerifiersConfig(id=id, python=python, **arguments), tokenizer)


def groups(
    environment: VerifiersEnvironment,
    tokenizer: HuggingFaceTokenizer,
    answer: Answer,
    problems: slice = slice(0, 1),
    size: int = 2,
    limits: RolloutLimits = LIMITS,
) -> list[TrajectoryGroup]:
    inference = ScriptedInference(tokenizer, answer)

    async def roll() -> list[TrajectoryGroup]:
        try:
            return await asyncio.gather(
                *(
                    environment.group_rollout(GroupRolloutRequest(place, one, size, SAMPLING, place, inference, limits))
                    for place, one in enumerate(environment.training_problems()[problems])
                )
            )
        finally:
            await environment.close()

    return asyncio.run(roll())


def text_of(tokenizer: HuggingFaceTokenizer, group: TrajectoryGroup, sample: int = 0) -> str:
    return tokenizer.decode(group.trajectories[sample].tokens, special=True)


def trained(tokenizer: HuggingFaceTokenizer, group: TrajectoryGroup, sample: int = 0) -> list[str]:
    """Text of each turn that is trained on."""
    one = group.trajectories[sample]
    assert sum(one.loss_mask) == sum(map(len, one.turns))
    return [tokenizer.decode(one.tokens[turn.start : turn.stop], special=True) for turn in one.turns]


@pytest.mark.parametrize("which", ["with_renderer", "without_renderer"])
def test_a_conversation_of_several_turns_is_one_sequence(request, verifiers_python, which):
    tokenizer = request.getfixturevalue(which)
    env = {"taskset": {"num_tasks": 4, "turns": 3}}
    running = environment(verifiers_python, tokenizer, "running-sum", env=env)
    found = groups(running, tokenizer, right_sums, slice(None))
    assert [len(group.trajectories) for group in found] == [2, 2, 2, 2]
    for group in found:
        assert not group.failures
        assert [one.reward for one in group.trajectories] == [1.0, 1.0]
        assert [one.branches for one in group.trajectories] == [(), ()]
        assert len(trained(tokenizer, group)) == 3
        assert "Now add" in text_of(tokenizer, group)
        assert group.trajectories[0].components == {"right": 1.0}
        assert group.trajectories[0].output == "agent: 3 turns, ended by user_closed"


def test_a_reward_is_that_of_the_environment(verifiers_python, without_renderer):
    running = environment(verifiers_python, without_renderer, "running-sum", env={"taskset": {"num_tasks": 1}})
    (group,) = groups(
        running, without_renderer, lambda prompt, sample: right_sums(prompt, 0) if "Now" in prompt else "?"
    )
    assert [one.reward for one in group.trajectories] == [0.5, 0.5]


@pytest.mark.parametrize("which", ["with_renderer"])
def test_a_tool_is_called_and_its_result_is_read(request, verifiers_python, which):
    tokenizer = request.getfixturevalue(which)
    call = '<tool_call>\n{"name": "store_read", "arguments": {"word": "pear"}}\n</tool_call>'
    store = environment(verifiers_python, tokenizer, "stored-number")

    def answer(prompt: str, sample: int) -> str:
        return "It is 42." if "<tool_response>" in prompt[-80:] else call

    (group,) = groups(store, tokenizer, answer, slice(1, 2), 1)
    assert not group.failures
    (one,) = group.trajectories
    assert (one.reward, one.components) == (1.0, {"right": 1.0, "tool_results": 1.0})
    assert trained(tokenizer, group) == [f"{call}<|im_end|>", "It is 42.<|im_end|>"]
    assert "<tool_response>\n42\n</tool_response>" in text_of(tokenizer, group)
    assert one.branches == ()


def test_what_an_environment_does_wrong_loses_the_rollout_and_never_earns_a_reward(verifiers_python, without_renderer):
    faulty = environment(verifiers_python, without_renderer, "faulty")
    found = groups(faulty, without_renderer, lambda prompt, sample: "An answer.", slice(0, 3), 1)
    assert [group.trajectories for group in found] == [[], [], []]
    reasons = [next(iter(group.failures)) for group in found]
    assert reasons[0].startswith("verifiers: TaskError: ") and "the answer cannot be judged" in reasons[0]
    assert reasons[1] == "verifiers: the task has no reward (agent_completed)"
    assert reasons[2].startswith("rollout: the reward is ") and "'right' is nan" in reasons[2]


def test_the_death_of_verifiers_loses_its_rollouts_alone(verifiers_python, without_renderer):
    faulty = environment(verifiers_python, without_renderer, "faulty")
    inference = ScriptedInference(without_renderer, ["An answer."])

    async def roll() -> list[TrajectoryGroup]:
        problems = {one.prompt: one for one in faulty.training_problems()}
        try:
            return [
                await faulty.group_rollout(GroupRolloutRequest(0, problems[name], 1, SAMPLING, 0, inference, LIMITS))
                for name in ("none", "dies", "none")
            ]
        finally:
            await faulty.close()

    before, dead, after = asyncio.run(roll())
    assert [one.reward for one in (*before.trajectories, *after.trajectories)] == [1.0, 1.0]
    assert dead.failures == {"the process of verifiers ended (exit code 3)": 1}


def test_nothing_is_left_of_a_worker_after_the_end(verifiers_python, without_renderer):
    store = environment(verifiers_python, without_renderer, "running-sum", env={"taskset": {"num_tasks": 1}})
    groups(store, without_renderer, right_sums, size=1)
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(WORKER) in (one.info["cmdline"] or ())]


def test_a_rollout_over_its_time_is_lost(verifiers_python, without_renderer):
    running = environment(verifiers_python, without_renderer, "running-sum", env={"taskset": {"num_tasks": 1}})

    def slow(prompt: str, sample: int) -> str:
        time.sleep(3.0)
        return "1"

    (group,) = groups(running, without_renderer, slow, size=1, limits=RolloutLimits(60.0, 0, 2.0))
    assert group.failures == {"rollout: not done within 2 s (environment.rollout_limit_s)": 1}


def test_held_out_tasks_and_other_splits_are_evaluated(verifiers_python, without_renderer):
    running = environment(
        verifiers_python,
        without_renderer,
        "running-sum",
        env={"taskset": {"num_tasks": 5}},
        held_out=2,
        evaluate={"test": {"taskset": {"split": "test"}}},
    )
    sets = running.evaluation_problems()
    assert (len(running.training_problems()), len(sets["held_out"]), len(sets["test"])) == (3, 2, 5)
    assert sets["test"][0].prompt != running.training_problems()[0].prompt
    inference = ScriptedInference(without_renderer, right_sums)

    async def evaluate() -> list[float]:
        try:
            return (await running.evaluate(EvaluationRequest(sets["test"], SAMPLING, 1, 0, inference, LIMITS))).rewards
        finally:
            await running.close()

    assert asyncio.run(evaluate()) == [1.0] * 5


@pytest.mark.parametrize(
    ("id", "arguments", "message"),
    [
        ("nowhere", {}, "cannot load the environment: .*taskset 'nowhere' not found"),
        ("running-sum", {"env": {"agent": {"max_turnz": 3}}}, r"agent\.max_turnz"),
        ("running-sum", {"env": {"taskset": {"num_tasks": 2}}, "held_out": 2}, "leave none to train on"),
    ],
)
def test_what_verifiers_refuses_is_an_error_at_the_start(verifiers_python, without_renderer, id, arguments, message):
    with pytest.raises(ValueError, match=message):
        environment(verifiers_python, without_renderer, id, **arguments)
