"""The math environment: prompts, the four rewards, and an evaluation set that is never trained on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_helpers import rolled_out
from optional import needs
from pydantic import ValidationError
from words import Words

from megatron_rl.agent.environments.math.math_environment import MathConfig, MathEnvironment
from megatron_rl.agent.environments.math.verifier import MathVerdict
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.generate.engine.scripted import ScriptedInference

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


RESPONSES: list[list[str]] = yaml.safe_load(
    (Path(__file__).parent / "tables" / "math_responses.yaml").read_text("utf-8")
)


def test_whole_responses_are_scored_as_the_table_says(data: Path) -> None:
    environment = build(data)

    async def rewards() -> list[Any]:
        return [await environment.get_reward(row[1], {"answer": row[0]}, "stop") for row in RESPONSES]

    expected = [(row[1], 1.0 if row[2] == "right" else 0.0) for row in RESPONSES]
    assert [(row[1], reward) for row, reward in zip(RESPONSES, asyncio.run(rewards()), strict=True)] == expected


def test_answer_that_costs_too_much_is_wrong_and_marked(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ones are in tests/runs/test_verifier.py."""
    environment = build(data, format_reward=0.1)
    verdicts = {"5": MathVerdict.RIGHT, "slow": MathVerdict.UNDECIDED, "6": MathVerdict.WRONG}

    async def judge(_: str, answer: str) -> MathVerdict:
        return verdicts[answer]

    monkeypatch.setattr(environment._verifier, "judge", judge)
    scored = rolled_out(environment, ScriptedInference(Words(), [r"\boxed{5}", r"\boxed{slow}", r"\boxed{6}"]), 3)
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


def test_arguments_are_checked_without_heavy_imports() -> None:
    program = """
import sys
from megatron_rl.recipe.registry import environment_class
for name, args in (("math", {"train": {"path": "a/b"}}), ("reasoning-gym", {"dataset": "chain_sum"})):
    environment_class(name).Config.model_validate(args)
heavy = {"datasets", "math_verify", "pyarrow", "reasoning_gym", "sympy", "torch"}
print(*sorted({name.split(".")[0] for name in sys.modules} & heavy))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == ""
