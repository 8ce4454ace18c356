"""Faults of rows, prompts and rewards that are found before a run starts, by the run's own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from optional import needs

from launcher.recipe.load import load_recipe
from megatron_rl.agent.prompts import PromptConfig, render_prompt
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.supervised.example_rows import RowEncoder, UnusableRow
from megatron_rl.recipe.data import DataConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.requests import RowsRequest
from megatron_rl.run.standalone.rows import answers

REWARD = "def reward(response, answer, **columns):\n    return float(response == answer)\n"
ROWS = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n'
RECIPE = """
extends: demo
name: mine
environment: {name: python, args: {file: reward.py, train: ./rows.jsonl}}
model: {init: from-scratch}
evaluation: {every: 0}
"""


def asked(purpose: str, folder: Path, *overrides: str, rows: str = ROWS, reward: str = REWARD) -> list[dict[str, Any]]:
    (folder / "rows.jsonl").write_text(rows)
    (folder / "reward.py").write_text(reward)
    (folder / "mine.yaml").write_text(RECIPE)
    config = load_recipe(str(folder / "mine.yaml"), overrides).config
    request = RowsRequest.model_validate({"recipe": {}, "purpose": purpose})
    return [*answers(request, config, None)]


def test_good_rows_and_a_good_reward_have_no_faults(tmp_path: Path) -> None:
    assert not asked("check", tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rows": ""}, "rows.jsonl"),
        ({"rows": '{"prompt": \n'}, "rows.jsonl:1: not valid JSON"),
        ({"rows": '{"question": "1+1=", "answer": "2"}\n'}, "no column 'prompt', only question, answer"),
        (
            {"rows": ROWS.replace("2+2", "6*8")},
            "rows.jsonl:2: no token for the character '*'",
        ),
        ({"reward": "import no_such_package\n" + REWARD}, "reward.py:1: import no_such_package"),
        ({"reward": "def reward(response, level):\n    return 1\n"}, "needs the column level"),
        ({"reward": REWARD + "    raise\n" + "def reward(response):\n    return {}['b']\n"}, "reward.py:5"),
    ],
    ids=["empty", "JSON", "column", "character", "package", "column of the reward", "reward"],
)
def test_fault_names_what_is_wrong_and_where(tmp_path: Path, changed: dict[str, str], said: str) -> None:
    (found,) = asked("check", tmp_path, **changed)
    assert said in found["fault"] and found["certain"]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("def reward(response, level):\n    return 1\n", "reward.py: reward needs the column level"),
        ("def reward(response):\n    return None\n", "the reward of an answer to the first problem: reward.py:1"),
    ],
)
def test_fault_of_one_of_several_environments_begins_with_its_key(tmp_path: Path, reward: str, said: str) -> None:
    mine = f"{{name: python, args: {{file: {tmp_path}/reward.py, train: {tmp_path}/rows.jsonl}}}}"
    several = (f"environments=[{{name: arithmetic}}, {mine}]", "environment=null")
    (found,) = asked("check", tmp_path, *several, reward=reward)
    assert found["fault"].startswith(f"environments.1.args.file: {said}")


def test_misspelt_column_of_the_system_message_is_a_fault(tmp_path: Path) -> None:
    train = f"environment.args.train={{path: {tmp_path}/rows.jsonl, system: rulse}}"
    (found,) = asked("check", tmp_path, train)
    assert "rows.jsonl: there is no column 'rulse', only prompt, answer" in found["fault"] and found["certain"]


def test_missing_package_of_a_reward_is_told_from_other_faults(tmp_path: Path) -> None:
    (found,) = asked("check", tmp_path, reward="import no_such_package\n" + REWARD)
    assert found["lacks"] == "no_such_package"


def test_misspelt_argument_of_reasoning_gym_is_a_fault(tmp_path: Path) -> None:
    environment = "{name: reasoning-gym/chain_sum, args: {dataset_args: {min_term: 2}}}"
    (found,) = asked("check", tmp_path, f"environment={environment}")
    assert "min_term: chain_sum has no such argument" in found["fault"]


def test_missing_worked_examples_are_a_fault(tmp_path: Path) -> None:
    (found,) = asked("check", tmp_path, "model.init=supervised", rows='{"prompt": "1+1="}\n', reward="reward = len")
    assert "model.init is supervised, but environment 'python' has no worked examples" in found["fault"]


def test_row_of_data_that_the_tokenizer_refuses_is_a_fault(tmp_path: Path) -> None:
    data = f"data={{path: {tmp_path}/rows.jsonl, prompt: prompt, answer: answer}}"
    rows = ROWS.replace("2+2", "x")
    (found,) = asked("check", tmp_path, "training.objective=supervised", data, "grpo=null", rows=rows)
    assert "rows.jsonl:2: no token for the character 'x'" in found["fault"]


def test_rows_beyond_the_first_ones_are_not_read(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"prompt": f"{number}=", "answer": "1"}) + "\n" for number in range(100))
    assert not asked("check", tmp_path, rows=rows + "not JSON\n")
    assert (
        "rows.jsonl:101"
        in asked("check", tmp_path, "environment.args.held_out=0.99", rows=rows + "not JSON\n")[0]["fault"]
    )
    assert len(asked("show", tmp_path, rows=rows + "not JSON\n")) == 3


def test_problem_is_shown_with_the_rewards_of_two_answers(tmp_path: Path) -> None:
    first, _ = asked("show", tmp_path)
    assert first["prompt"] == "1+1=" and (first["gold"], first["gold_reward"], first["wrong_reward"]) == ("2", 1.0, 0.0)


def test_counts_tell_dropped_and_equal_rows(tmp_path: Path) -> None:
    rows = [*[(f"{number}+1=", "2") for number in range(10, 26)], ("10+1=", "2"), ("10+1=", "3")]
    rows += [("1*1=", "1"), ("1" * 40, "1")]
    text = "".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows)
    override = [
        "training.objective=supervised",
        f"data={{path: {tmp_path}/rows.jsonl, prompt: prompt, answer: answer}}",
        "grpo=null",
        "environment=null",
    ]
    (found,) = asked("count", tmp_path, *override, rows=text)
    assert found["rows"] == 20 and sum(found["dropped"].values()) == 2
    assert (found["equal"], found["equal_prompts"]) == (1, 2)
    assert found["lengths"]["100"] == 7 and found["learned"] == pytest.approx(2 / 7)


def test_columns_of_data_that_nothing_reads_are_shown(tmp_path: Path) -> None:
    rows = '{"prompt": "1+1=", "answer": "2", "note": "x"}\n'
    overrides = ("training.objective=supervised", f"data={{path: {tmp_path}/rows.jsonl}}", "grpo=null")
    named, row = asked("show", tmp_path, *overrides, rows=rows)
    assert named == {"set": "", "ignored": ["note"]} and row["row"] == 1
    (counted,) = asked("count", tmp_path, *overrides, rows=rows)
    assert counted["ignored"] == ["note"]


@needs("transformers", "tokenizers")
def test_template_without_system_messages_is_named_with_the_key_of_the_message() -> None:
    from chat_templates import tokenizer_of

    tokenizer = tokenizer_of(
        "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: "
        "{% endif %}"
    )
    assert render_prompt(tokenizer, "hi", PromptConfig()) == "user: hi<|im_end|>assistant: "
    with pytest.raises(ValueError, match=r"^environment\.args\.system: .* does not take a system message .*no system"):
        render_prompt(tokenizer, "hi", PromptConfig(system="Be brief."))
    row = Problem("", {"prompt": "hi", "answer": "ho"})
    assert RowEncoder(DataConfig(prompt="prompt", answer="answer"), tokenizer, 99).example(row)
    data = DataConfig(prompt="prompt", answer="answer", system="Be brief.")
    with pytest.raises(UnusableRow, match=r"^data\.system: .* does not take a system message"):
        RowEncoder(data, tokenizer, 99).example(row)
    with pytest.raises(ConfigurationError, match=r"^data\.system: .* system message \(no system\); leave it out$"):
        RowEncoder(data, tokenizer, 99).check([row])
