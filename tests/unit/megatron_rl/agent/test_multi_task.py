"""Several environments trained at once: routing of problems, rejected lists, and the record of each environment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bank_helpers import bank_in, drive
from core_helpers import ALPHABET, build_run, tiny_run
from pydantic import ValidationError
from words import Words

from megatron_rl.agent.api import build_environment
from megatron_rl.agent.multi_task import WeightedMultiTask
from megatron_rl.agent.own_process import function
from megatron_rl.agent.scoring import UNDECIDED
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.rank.metrics.metric import StepReport
from megatron_rl.rank.metrics.names import TIMED, check_name, metrics_of
from megatron_rl.rank.metrics.stats import Tally
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.environment_section import MULTI_TASK, EnvironmentConfig
from megatron_rl.recipe.registry import entry_points_of, required_datasets
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

SMALL = {"evaluation_problems": 3}
PLUS = {"name": "arithmetic", "id": "plus", "args": {**SMALL, "seed": 1}, "weight": 3.0}
MINUS = {"name": "arithmetic", "id": "minus", "args": {**SMALL, "seed": 2}}
APART = {"name": "arithmetic", "id": "apart", "args": SMALL, "weight": 0.0, "evaluation_only": True}


def run_config(*environments: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    one = tiny_run(**sections).model_dump()
    return RunConfig.model_validate({**one, "environment": None, "environments": [*environments]})


class Chatty(Words):
    def conversation(self, messages: Any, tools: Any = None, variables: Any = None) -> str | None:
        return "".join(f"<{one['role']}>{one['content']}" for one in messages)


def build(*environments: dict[str, Any], tokenizer: Any = None) -> WeightedMultiTask:
    characters = build_tokenizer(TokenizerConfig(type="characters", alphabet=ALPHABET))
    built = build_environment(run_config(*environments).task, tokenizer or characters)
    assert isinstance(built, WeightedMultiTask)
    return built


def test_problems_and_sets_carry_the_id_of_their_environment() -> None:
    agent = build(PLUS, MINUS, APART)
    assert [(each.environment, each.weight) for each in agent.training_sets()] == [("plus", 3.0), ("minus", 1.0)]
    assert all(problem.environment == one.environment for one in agent.training_sets() for problem in one.problems)
    sets = agent.evaluation_problems()
    assert {*sets} == {f"{id}/{name}" for id in ("plus", "minus", "apart") for name in ("trained", "held_out")}
    assert {problem.environment for problem in sets["apart/held_out"]} == {"apart"}
    assert agent.compares_answers
    assert agent.agent_of(sets["minus/held_out"][0]).final_answer("12") == "12"
    trained = {problem.prompt for problem in agent.training_problems()}
    assert trained == {prompt for prompt, _ in agent.demonstrations()}
    assert not trained & {problem.prompt for problem in sets["apart/held_out"]}


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment `python` starts no process, since these tests score nothing."""
    score = SimpleNamespace(parameters=[("response", "POSITIONAL_OR_KEYWORD", False), ("rest", "VAR_KEYWORD", False)])
    monkeypatch.setattr(function, "OwnFunction", lambda *_: score)


def python(folder: Path, name: str, rows: list[Any], *, trained: bool, **arguments: Any) -> dict[str, Any]:
    """An environment `python` with these prompts and the answer 1."""
    (folder / "reward.py").write_text("def reward(response, **columns):\n    return 0")
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"prompt": row, "answer": "1"}) + "\n" for row in rows))
    data = {"path": str(file), "remove": arguments.pop("remove", [])}
    sets = {"train": data} if trained else {"evaluate": {"test": data}}
    args = {"file": str(folder / "reward.py"), **sets, **arguments}
    return {"name": "python", "id": name, "evaluation_only": not trained, "args": args}


def said(*texts: str) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False) if text]


@pytest.mark.usefixtures("unstarted")
@pytest.mark.parametrize(
    ("row", "arguments"),
    [
        ("1+1=", {"prompt": "Think. {question}"}),
        ("1+1= Now.", {"remove": ["Now."], "prompt": "{question}!"}),
        (said("Be brief.", "1+1="), {}),
        (said("", "1+1="), {"prompt": "{question}!"}),
    ],
    ids=["another template", "a removed text", "a system message", "a list of messages"],
)
def test_problem_that_is_held_out_is_not_trained_on_in_whatever_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: Any, arguments: dict[str, Any]
) -> None:
    other = said("", "2+2=") if isinstance(row, list) else "2+2="
    trained = python(tmp_path, "trained", [row, other], trained=True, **arguments)
    held_out = python(tmp_path, "held", ["1+1=", "3+3="], trained=False)
    with caplog.at_level("INFO"):
        agent = build(trained, held_out, tokenizer=Words())
    (problem,) = agent.training_problems()
    assert "2+2=" in problem.prompt
    assert [prompt for prompt, _ in agent.demonstrations()] == [problem.prompt]
    assert "environment 'trained': 1 training problems skipped: an environment with evaluation_only" in caplog.text


@pytest.mark.usefixtures("unstarted")
def test_text_that_one_side_removes_does_not_hide_a_held_out_problem(tmp_path: Path) -> None:
    rows = ["1+1= Now.", "2+2= Now."]
    trained = python(tmp_path, "trained", rows, trained=True, remove=["Now."])
    held_out = python(tmp_path, "held", rows[:1], trained=False)
    (problem,) = build(trained, held_out, tokenizer=Words()).training_problems()
    assert problem.prompt == "2+2="


@pytest.mark.usefixtures("unstarted")
def test_conversations_with_the_same_last_question_are_different_problems(tmp_path: Path) -> None:
    trained = python(tmp_path, "trained", [said("", "2+2=", "4", "Why?")], trained=True)
    held_out = python(tmp_path, "held", [said("", "1+1=", "2", "Why?")], trained=False)
    tokenizer = Chatty("<user>{}<assistant>")
    assert len(build(trained, held_out, tokenizer=tokenizer).training_problems()) == 1
    again = python(tmp_path, "again", [said("Be brief.", "2+2=", "4", "Why?")], trained=False)
    with pytest.raises(ValueError, match="environment 'trained' has no training problems that no other one holds out"):
        build(trained, again, tokenizer=tokenizer)


@pytest.mark.usefixtures("unstarted")
def test_problems_of_a_program_are_known_by_the_text_that_names_them(tmp_path: Path) -> None:
    trained = python(tmp_path, "trained", ["1+1=", "2+2="], trained=True, prompt="Think. {question}")
    own, evaluated = tmp_path / "own.jsonl", tmp_path / "evaluated.jsonl"
    own.write_text('{"prompt": "5+5="}\n')
    evaluated.write_text('{"prompt": "1+1="}\n')
    args = {"command": ["true"], "problems": str(own), "evaluate": {"test": str(evaluated)}}
    agent = build(trained, {"name": "program", "evaluation_only": True, "args": args}, tokenizer=Words())
    assert [problem.prompt for problem in agent.training_problems()] == ["Think. 2+2="]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("arithmetic", [{"template": "{expression}="}, {"template": "={expression}="}]),
        ("countdown", [{"chat": "auto"}, {"chat": "always", "system": "x"}]),
    ],
)
def test_generated_problems_are_held_out_in_whatever_prompt(name: str, arguments: list[dict[str, Any]]) -> None:
    tokenizer = Chatty("<user>{}<assistant>")
    drawn = {"draws": 20, "held_out": 0.5}
    first, second = ({"name": name, "id": str(at), "args": {**drawn, **its}} for at, its in enumerate(arguments))
    with pytest.raises(ValueError, match="environment '0' has no training problems"):
        build(
            {**first, "args": {**first["args"], "held_out": 0.0}},
            {**second, "evaluation_only": True, "args": {**second["args"], "held_out": 0.99}},
            tokenizer=tokenizer,
        )


@pytest.mark.parametrize(
    ("environments", "said"),
    [
        ([], "the list is empty"),
        ([PLUS, PLUS], "environment 'plus' is listed more than once"),
        ([{**PLUS, "weight": -1.0}], "weight -1 of environment 'plus' is negative"),
        ([APART, {**MINUS, "weight": 0.0}], "nothing to train on: .* every one of 'apart', 'minus'"),
        ([{"agent_type": "a.b.WebAgent", "agent_args": {}}], "agent_type 'a.b.WebAgent' has no counterpart"),
        ([{"args": {}}], "name is missing"),
    ],
)
def test_invalid_list_is_rejected_with_the_environments_name(environments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_config(*environments)


def test_either_environment_or_environments_is_required() -> None:
    with pytest.raises(ValueError, match="environment is missing: give one, or a list of several"):
        RunConfig.model_validate({**tiny_run().model_dump(), "environment": None})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"held_out": 0.999, "draws": 1}, "environment 'odd' has no training problems that no other one holds out"),
        ({"template": "{expression}x"}, "environment 'odd': no token for the character 'x'"),
        ({"no_such": 1}, "environment 'odd': "),
    ],
)
def test_error_names_the_environment_that_cannot_be_built(arguments: Any, said: str) -> None:
    odd = {"name": "arithmetic", "id": "odd", "args": arguments}
    with pytest.raises(ValueError, match=said):
        build(PLUS, odd)


def test_entries_of_megatron_rl_files_are_accepted() -> None:
    """Values of its DAPO and GSM8K files."""
    config = run_config(
        {"agent_type": "DAPOAgent", "agent_args": {"format_reward": 0.0}, "weight": 1.0},
        {"agent_type": "AIMEAgent", "agent_args": {"format_reward": 0.0}, "weight": 0.0, "evaluation_only": True},
        {
            "agent_type": "examples.rl.environments.math.gsm8k_agent.GSM8KAgent",
            "agent_args": {"answer_format": "boxed", "assistant_suffix": "Assistant: ", "chat_mode": True},
            "weight": 1.0,
        },
    )
    assert config.environments is not None
    assert [(one.name, one.args, one.trained_on) for one in config.environments] == [
        ("dapo-math-17k", {"format_reward": 0.0, "answer_format": "tags"}, True),
        ("aime-2024", {"format_reward": 0.0, "answer_format": "tags"}, False),
        ("gsm8k", {"answer_format": "boxed", "chat": "always"}, True),
    ]
    assert RunConfig.model_validate(config.model_dump()) == config


def test_requirements_of_all_environments_are_known_without_building_them() -> None:
    data = {"train": {"path": "owner/sums"}, "evaluate": {"a": {"path": "owner/held-out"}}}
    task = run_config(PLUS, {"name": "math", "args": data}, {"name": "reasoning-gym/chain_sum"}).task
    assert task.name == MULTI_TASK
    assert required_datasets(task) == ["owner/held-out", "owner/sums"]
    assert [entry.name for entry in entry_points_of(task)] == [MULTI_TASK, "arithmetic", "math", "reasoning-gym"]


def test_variant_is_an_argument_in_the_name() -> None:
    with pytest.raises(ValueError, match="'reasoning-gym/chain_sum' already sets dataset by its name"):
        required_datasets(EnvironmentConfig(name="reasoning-gym/chain_sum", args={"dataset": "countdown"}))
    with pytest.raises(ValueError, match="unknown environment 'arithmetic/sums': 'arithmetic' has no variants"):
        required_datasets(EnvironmentConfig(name="arithmetic/sums"))


def test_record_of_a_step_distinguishes_environments(tmp_path: Any, platform: Any, groups: Any) -> None:
    """End to end with a bank; another attempt takes the same answers from it."""
    config = run_config(PLUS, MINUS, APART, grpo={"prompts_per_step": 8})
    run = build_run(config, platform, groups)
    drive(run, bank_in(tmp_path))
    batch = run.driver.collect(0)
    answers = batch.groups[0].trajectories
    answers[0] = replace(answers[0], components={UNDECIDED: 1.0})
    stats = run.trainer.train(batch, 1)
    tally = Tally()
    stats.put(tally)
    of_all = stats.reduced(tally.reduce(groups.control).total)
    seconds = dict.fromkeys(TIMED, 0.5)
    metrics = metrics_of(StepReport(1, of_all, 1, 0, 8, 1, {}, batch.failures, seconds=seconds))
    for name in metrics:
        check_name(name)
    assert (metrics["environments/plus/groups"], metrics["environments/minus/groups"]) == (6, 2)
    assert metrics["undecided_answers"] == 1
    parts = {
        id: [
            answer.reward for group in batch.groups if group.problem.environment == id for answer in group.trajectories
        ]
        for id in ("plus", "minus")
    }
    for id, rewards in parts.items():
        assert metrics[f"environments/{id}/mean_reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert metrics[f"environments/{id}/failed_rollouts"] == 0
    assert not [name for name in metrics if "apart" in name]
    run.environment.prompt_format = "boxed"
    evaluated = run.evaluate()
    assert {*evaluated} >= {"eval/apart/held_out/greedy_accuracy", "eval/plus/trained/greedy_accuracy"}
    assert evaluated["eval/prompt_format"] == "boxed"


def test_environments_given_as_arguments_train_as_one(platform: Any, groups: Any) -> None:
    task = run_config(PLUS, MINUS).task
    config = tiny_run(environment=task.model_dump(), grpo={"prompts_per_step": 4})
    run = build_run(config, platform, groups)
    batch = run.driver.collect(0)
    assert {group.problem.environment for group in batch.groups} == {"plus", "minus"}
    assert run.trainer.train(batch, 1).environments == {}
    [plus, minus] = task.args["environments"]
    for key, value in (("distill", {"weight": 0.5}), ("grpo", {"kl_beta": 0.5})):
        taught = {"environments": [plus, {**minus, key: value}]}
        with pytest.raises(ValidationError, match=rf"environment.args.environments.1.{key} has no effect there"):
            tiny_run(environment={"name": MULTI_TASK, "args": taught}, distill={"teacher": "/t"})
