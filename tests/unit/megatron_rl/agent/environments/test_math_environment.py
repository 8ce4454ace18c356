"""The math environment: prompts, the four rewards, and an evaluation set that is never trained on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from optional import needs
from pydantic import ValidationError
from words import Words

from megatron_rl.agent.api import GroupRolloutRequest
from megatron_rl.agent.environments.math.math_environment import MathConfig, MathEnvironment
from megatron_rl.agent.environments.math.verifier import MathVerdict
from megatron_rl.agent.scoring import UNDECIDED, RolloutLimits
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.generate.engine.interface import Completion, FinishReason, GenerationRequest
from megatron_rl.recipe.inference import Sampling

pytestmark = needs("datasets", "math_verify")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "train.jsonl", [("What is 1/4 + 1/4?", "1/2"), ("What is 2 + 2?", "4"), ("2 +  3?", "5")])
    write(tmp_path / "held-out.jsonl", [("What is 2\n+ 2?", "4"), ("What is 7 - 1?", "6")])
    return tmp_path


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    path.write_text("".join(json.dumps({"problem": text, "answer": answer}) + "\n" for text, answer in rows))


def build(data: Path, tokenizer: Words | None = None, **arguments: Any) -> MathEnvironment:
    config = MathConfig.model_validate(
        {
            "train": {"path": str(data / "train.jsonl")},
            "evaluate": {"sums": {"path": str(data / "held-out.jsonl")}},
            "verifiers": 1,
            **arguments,
        }
    )
    return MathEnvironment(config, tokenizer or Words())


def test_problems_of_an_evaluation_set_are_not_trained_on(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    environment = build(data, prompt="{question}")
    assert [problem.prompt for problem in environment.training_problems()] == ["What is 1/4 + 1/4?", "2 +  3?"]
    assert {name: len(problems) for name, problems in environment.evaluation_problems().items()} == {"sums": 2}
    assert "1 training problems skipped: an evaluation set contains them" in caplog.messages


@pytest.mark.parametrize(
    ("arguments", "tokenizer", "prompt", "said"),
    [
        ({}, Words(), "2 +  3?\nReason step by step and put your final answer within \\boxed{}.", "boxed"),
        ({"prompt": "Q: {question} A:", "answer_format": "tags"}, Words(), "Q: 2 +  3? A:", "tags"),
        (
            {"prompt": "{question}", "answer_format": "line"},
            Words("<user>{}<assistant>"),
            "<user>2 +  3?<assistant>",
            "line, chat template",
        ),
        ({"prompt": "{question}", "chat": "never"}, Words("<user>{}<assistant>"), "2 +  3?", "boxed"),
    ],
)
def test_prompt_and_its_recorded_format_follow_the_recipe(
    data: Path, arguments: dict[str, Any], tokenizer: Words, prompt: str, said: str
) -> None:
    environment = build(data, tokenizer, **arguments)
    assert environment.training_problems()[-1] == Problem(prompt, {"answer": "5"})
    assert environment.prompt_format == said


def test_long_prompts_are_skipped_and_counted(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    environment = build(data, prompt="{question}", max_prompt_tokens=10)
    assert [problem.prompt for problem in environment.training_problems()] == ["2 +  3?"]
    assert environment.evaluation_problems() == {}
    assert any(message.endswith("train.jsonl: 1 of 2 problems skipped: over 10 tokens") for message in caplog.messages)
    with pytest.raises(ValueError, match=r"train.jsonl leaves no problem to train on"):
        build(data, max_prompt_tokens=3)


@pytest.fixture(scope="module")
def rewarding(tmp_path_factory: pytest.TempPathFactory) -> MathEnvironment:
    """Shared environment, because its verifier takes half a second to start."""
    folder = tmp_path_factory.mktemp("math")
    write(folder / "train.jsonl", [("What is 1/4 + 1/4?", "1/2")])
    return build(folder, evaluate={}, partial_end_reward=0.6, format_reward=0.1, negative_reward=-0.5)


@pytest.mark.parametrize(
    ("response", "finish", "reward"),
    [
        (r"Half: \boxed{\frac{1}{2}}", "stop", 1.0),
        (r"Half: $\boxed{0.5}$.", "stop", 1.0),
        (r"\boxed{0.5} is half.", "stop", 0.6),
        (r"\boxed{0.4}", "stop", 0.1),
        (r"\boxed{0.4} is wrong", "stop", 0.1),
        (r"\boxed{0.5}", "length", 0.6),
        (r"\boxed{0.5} and so on and", "length", 0.6),
        (r"\boxed{0.5} and then \boxed{0.", "length", -0.5),
        (r"\boxed{0.4", "length", -0.5),
        ("0.5", "stop", -0.5),
        ("", "stop", -0.5),
    ],
)
def test_reward_depends_on_how_the_answer_ended(
    rewarding: MathEnvironment, response: str, finish: FinishReason, reward: float
) -> None:
    assert asyncio.run(rewarding.get_reward(response, {"answer": "1/2"}, finish)) == reward


class Scripted:
    """Engine that returns the given texts."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        answers = [[*map(ord, text), 0] for text in self.texts]
        return [Completion(tokens, [-1.0] * len(tokens), "stop", [3] * len(tokens)) for tokens in answers]


def answered(environment: MathEnvironment, texts: list[str]) -> TrajectoryGroup:
    problem = environment.training_problems()[-1]
    request = GroupRolloutRequest(
        0, problem, len(texts), Sampling(max_new_tokens=99), 0, Scripted(texts), RolloutLimits(60.0)
    )
    return asyncio.run(environment.group_rollout(request))


def test_group_is_scored_in_the_order_of_its_answers(data: Path) -> None:
    environment = build(data, verifiers=2)
    scored = answered(environment, [r"\boxed{5}", r"\boxed{6}", r"\boxed{10/2}", "5", r"\boxed{5.0}"])
    assert [trajectory.reward for trajectory in scored.trajectories] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert [trajectory.text for trajectory in scored.trajectories][2] == r"\boxed{10/2}"
    assert scored.failures == {}


RESPONSES: list[list[str]] = yaml.safe_load(
    (Path(__file__).parent / "tables" / "math_responses.yaml").read_text("utf-8")
)


def test_whole_responses_are_scored_as_the_table_says(data: Path) -> None:
    environment = build(data)

    async def rewards() -> list[Any]:
        return [await environment.get_reward(row[1], {"answer": row[0]}, "stop") for row in RESPONSES]

    expected = [(row[1], 1.0 if row[2] == "right" else 0.0) for row in RESPONSES]
    assert [(row[1], reward) for row, reward in zip(RESPONSES, asyncio.run(rewards()), strict=True)] == expected


def test_what_follows_a_right_answer_does_not_matter_by_default(data: Path) -> None:
    environment = build(data)
    scored = answered(
        environment,
        [
            r"The final answer is $\boxed{5}$. I hope it is correct.",
            r"\boxed{5}\text{ is wrong, it is } 6",
            r"\boxed{6}. No, it is 5.",
        ],
    )
    assert [trajectory.reward for trajectory in scored.trajectories] == [1.0, 1.0, 0.0]


def test_answer_that_costs_too_much_is_wrong_and_marked(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ones are in tests/runs/test_verifier.py."""
    environment = build(data, format_reward=0.1)
    verdicts = {"5": MathVerdict.RIGHT, "slow": MathVerdict.UNDECIDED, "6": MathVerdict.WRONG}

    async def judge(_: str, answer: str) -> MathVerdict:
        return verdicts[answer]

    monkeypatch.setattr(environment._verifier, "judge", judge)
    scored = answered(environment, [r"\boxed{5}", r"\boxed{slow}", r"\boxed{6}"])
    assert [trajectory.reward for trajectory in scored.trajectories] == [1.0, 0.1, 0.1]
    assert [dict(trajectory.components) for trajectory in scored.trajectories] == [{}, {"undecided": 1.0}, {}]
    assert scored.failures == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompt": "Solve!"}, r"must contain \{question\}"),
        ({"prompt": "{question} {hint}"}, r"unknown field \{hint\}; available are question, instruction"),
        ({"answer_format": "plain"}, "answer_format"),
        ({"evaluate": {"AIME 2024": {"path": "a/b"}}}, "evaluate"),
        ({"trian": {"path": "a/b"}}, "trian"),
    ],
)
def test_bad_arguments_are_rejected_before_anything_is_read(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        MathConfig.model_validate({"train": {"path": "a/b"}, **arguments})


def test_only_data_sets_on_the_hub_are_fetched() -> None:
    sets = {"a": {"path": "owner/aime"}, "b": {"path": "~/data/own.jsonl"}, "c": {"path": "owner/dapo"}}
    config = MathConfig.model_validate({"train": {"path": "owner/dapo"}, "evaluate": sets})
    assert config.datasets() == ["owner/aime", "owner/dapo"]


def test_arguments_are_checked_without_heavy_imports() -> None:
    program = """
import sys
import megatron_rl.agent.environments.math.math_environment
print(*sorted({name.split(".")[0] for name in sys.modules} & {"datasets", "math_verify", "pyarrow", "sympy", "torch"}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == ""


def test_run_trains_on_a_local_data_set(data: Path, platform: Any, groups: Any) -> None:
    """End to end: prompts of the file, answers of a tiny policy, rewards, one update."""
    from bank_helpers import bank_in, drive
    from core_helpers import build_run, tiny_run

    characters = "".join(sorted(set("What is 1/4 + 1/4? 2 + 3 + 2? 7 - 1?\\boxed{}0123456789")))
    config = tiny_run(
        model={"max_position_embeddings": 64},
        tokenizer={"type": "characters", "alphabet": characters},
        environment={
            "name": "math",
            "args": {
                "train": {"path": str(data / "train.jsonl")},
                "evaluate": {"sums": {"path": str(data / "held-out.jsonl")}},
                "prompt": "{question}",
                "negative_reward": -1.0,
            },
        },
        sampling={"max_new_tokens": 8},
        evaluation={"prompts": 1},
    )
    write(data / "held-out.jsonl", [("7 - 1?", "6")])
    write(data / "train.jsonl", [("1/4 + 1/4?", "1/2"), ("2 + 2?", "4")])
    run = build_run(config, platform, groups)
    drive(run, bank_in(data / "bank"))
    assert run.evaluate() == {"eval/sums/greedy_accuracy": 0.0, "eval/prompt_format": "boxed"}
    batch = run.driver.collect(0)
    rewards = {trajectory.reward for made in batch.groups for trajectory in made.trajectories}
    assert rewards == {-1.0}  # such a policy boxes nothing
    answers = batch.groups[0].trajectories
    answers[0] = replace(answers[0], components={UNDECIDED: 1.0})
    stats = run.trainer.train(batch, 1)
    assert (stats.update.updates, stats.batch.undecided) == (1, 1)
