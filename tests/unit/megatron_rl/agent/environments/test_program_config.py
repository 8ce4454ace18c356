"""Arguments of the environment `program`: what is refused when a run is submitted, and the problems that it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from optional import needs

from launcher.errors import BadInput
from launcher.recipe.load import load_recipe
from megatron_rl.agent.environments.program.arguments import ProgramConfig
from megatron_rl.agent.environments.program.program_environment import ProgramEnvironment
from megatron_rl.agent.scripted_trial import CodePoints

pytestmark = needs("datasets")

PROBLEMS = [{"prompt": f"{number}+1", "answer": number + 1, "id": f"p{number}"} for number in range(10)]


def rows(folder: Path, values: list[Any], name: str = "problems.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(folder / name)


def environment(**arguments: Any) -> ProgramEnvironment:
    return ProgramEnvironment(ProgramConfig(**{"command": ["true"], **arguments}), CodePoints())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{problems: p.jsonl}", r"give either command \(a list of words\) or function \(module:name\)"),
        ("{problems: p.jsonl, command: ['true'], function: 'agent:rollout'}", "give either command"),
        ("{command: ['true']}", "problems"),
        ("{problems: p.jsonl, function: agent.py}", "'agent.py' is not of the form module:name"),
        ("{problems: p.jsonl, command: [bin/agent]}", "bin/agent is not in the working directory"),
        ("{problems: p.jsonl, command: [./agent.sh]}", "./agent.sh is not in the working directory"),
        ("{problems: p.jsonl, command: [x], code: [a/x.py, b/x.py]}", "two files are named x.py"),
        ("{problems: p.jsonl, command: [x], variables: {A=B: c}}", "'A=B' is not the name of an environment variable"),
        ("{problems: p.jsonl, command: [x], variables: {OPENAI_API_KEY: c}}", "it names the policy that is trained"),
        ("{problems: p.jsonl, command: [x], timeout_s: 1e6}", "args.timeout_s 1e.06 must be below job.silence_limit_s"),
        ("{problems: p.jsonl, command: [x], code: [missing.sh]}", "missing.sh: no such file"),
        ("{problems: p.jsonl, command: [x], code: [broken.py]}", "broken.py:1: not valid Python"),
        ("{problems: p.jsonl, function: 'agent:rollout', code: [agent.py]}", "agent.py: defines no rollout"),
        ("{problems: p.jsonl, function: 'agent:rollout', container: .}", "container: a function runs in a process of"),
        ("{problems: p.jsonl, command: ['{python}'], container: .}", "python} is the interpreter of the ranks"),
        ("{problems: p.jsonl, command: [x], container: missing.sqsh}", r"container: .*missing.sqsh: No such file"),
        ("{problems: p.jsonl, command: [x], container: broken.py}", r"broken.py: not a squashfs file: make one with"),
        ("{problems: p.jsonl, command: [x], container: .}", "not a root file system: it has neither usr nor bin"),
        ("{problems: p.jsonl, command: [x], container: {image: ., memory_gb: 0}}", "memory_gb"),
    ],
)
def test_a_submission_refuses_arguments_that_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def rollout(:\n")
    Path("agent.py").write_text("async def roll_out(client, problem): ...\n")
    with pytest.raises(BadInput, match=message):
        load_recipe("demo", [f"environment={{name: program, args: {arguments}}}"])


def test_a_run_keeps_the_code_and_names_paths_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("async def rollout(client, problem): ...\n")
    (tmp_path / "recipe.yaml").write_text(
        "extends: demo\nenvironment: {name: program, args: {function: 'agent:rollout', code: [agent.py], "
        "problems: p.jsonl}}\n"
    )
    (tmp_path / "p.jsonl").touch()
    arguments = load_recipe(str(tmp_path / "recipe.yaml")).config.environment.args
    assert arguments["problems"] == {"path": str(tmp_path / "p.jsonl")}
    assert ProgramConfig(**arguments).files() == [str(tmp_path / "agent.py")]


def test_a_program_gets_the_whole_row_and_its_text_column_only_names_it(tmp_path: Path) -> None:
    problem, *_ = environment(problems={"path": rows(tmp_path, PROBLEMS), "question": "id"}).training_problems()
    assert (problem.prompt, dict(problem.golden), problem.is_prompt) == ("p0", PROBLEMS[0], False)


def test_any_row_is_a_problem(tmp_path: Path) -> None:
    tasks = [{"task": "count", "to": 3}, {"task": "count", "to": 4}]
    problems = environment(problems=rows(tmp_path, [*tasks, tasks[0]])).training_problems()
    assert [dict(problem.golden) for problem in problems] == tasks
    assert json.loads(problems[0].prompt) == tasks[0], "its name in logs and records"
    with pytest.raises(ValueError, match="there is no column 'id', only task, to"):
        environment(problems={"path": rows(tmp_path, tasks), "question": "id"})


def test_evaluation_sets_and_held_out_problems_are_not_trained_on(tmp_path: Path) -> None:
    found = environment(
        problems=rows(tmp_path, PROBLEMS), evaluate={"seen": rows(tmp_path, PROBLEMS[:2], "seen.jsonl")}, held_out=0.25
    )
    evaluated = found.evaluation_problems()
    trained = {one.prompt for one in found.training_problems()}
    assert {name: len(problems) for name, problems in evaluated.items()} == {"seen": 2, "held_out": 2}
    assert len(trained) == 6
    assert not trained & {one.prompt for problems in evaluated.values() for one in problems}


def test_demonstrations_are_prompts_of_the_model_with_answers(tmp_path: Path) -> None:
    pairs = [{"prompt": "1=", "answer": "[1]"}, {"prompt": "1=", "answer": "3"}]
    found = environment(problems=rows(tmp_path, PROBLEMS), demonstrations=rows(tmp_path, pairs, "examples.jsonl"))
    assert found.demonstrations() == [("1=", "[1]"), ("1=", "3")]
    assert environment(problems=rows(tmp_path, PROBLEMS)).demonstrations() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": ["no-such-program"]}, "environment.args.command: no-such-program is not in PATH"),
        ({"command": [__file__]}, f"{__file__} is not an executable file on this machine"),
        ({"variables": {"UNSET_TOKEN": None}}, "variables: UNSET_TOKEN is not set in the environment of the run"),
    ],
)
def test_a_rank_refuses_what_its_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("UNSET_TOKEN", raising=False)
    with pytest.raises(ValueError, match=message):
        environment(problems=rows(tmp_path, PROBLEMS), **arguments)
