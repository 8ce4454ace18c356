"""Rewards from a user's file: arguments and results of the function, and errors of unusable files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import rolled_out
from optional import needs
from pydantic import ValidationError
from words import Words

from megatron_rl.agent.environments.python import PythonConfig, PythonEnvironment
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

pytestmark = needs("datasets")

ROWS = [{"prompt": "1+1=", "answer": "2", "level": 1}, {"prompt": "2+2=", "answer": "4", "level": 2}]


def build(
    folder: Path, source: str, rows: list[dict[str, Any]] = ROWS, tokenizer: Words | None = None, **arguments: Any
) -> PythonEnvironment:
    (folder / "reward.py").write_text(source)
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"file": str(folder / "reward.py"), "train": str(folder / "mine.jsonl"), **arguments}
    return PythonEnvironment(PythonConfig.model_validate(arguments), tokenizer or Words())


def answered(environment: PythonEnvironment, *texts: str, problem: int = 0) -> TrajectoryGroup:
    engine = ScriptedInference(Words(), [*texts])
    return rolled_out(environment, engine, len(texts), problem=environment.training_problems()[problem])


def rewards(group: TrajectoryGroup) -> list[float]:
    return [trajectory.reward for trajectory in group.trajectories]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_function_receives_the_response_and_all_columns(tmp_path: Path, kind: str) -> None:
    source = f"{kind} reward(response, answer, **columns):\n    return columns['level'] * (response == answer)\n"
    environment = build(tmp_path, source)
    assert rewards(answered(environment, "4", "5", problem=1)) == [2.0, 0.0]


def test_function_without_keywords_receives_the_columns_it_names(tmp_path: Path) -> None:
    environment = build(tmp_path, "def reward(response, level, finish_reason):\n    return level + len(finish_reason)")
    assert rewards(answered(environment, "2")) == [1.0 + len("stop")]


def test_components_are_recorded_and_summed(tmp_path: Path) -> None:
    environment = build(tmp_path, "def reward(response, **columns):\n    return {response: 1, 'short': 0.25}")
    summed, named = answered(environment, "right", "reward").trajectories
    assert (summed.reward, summed.components) == (1.25, {"right": 1.0, "short": 0.25})
    assert (named.reward, named.components) == (1.0, {"short": 0.25})


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return columns['no such column']", "reward at reward.py:2: KeyError: 'no such column'"),
        ("return helper(columns)", "reward at reward.py:4: ZeroDivisionError: division by zero"),
        ("return None", "reward.py:1: reward returned None: return a number of magnitude 1e+18 at most"),
        ("return {'short': None}", "reward.py:1: reward returned a mapping whose component 'short' is None: return"),
    ],
)
def test_error_of_the_function_ends_the_run_and_names_line_answer_and_prompt(
    tmp_path: Path, kind: str, body: str, why: str
) -> None:
    source = f"{kind} reward(response, **columns):\n    {body}\ndef helper(columns):\n    return 1 / 0\n"
    with pytest.raises(ConfigurationError, match=re.escape(why)) as raised:
        answered(build(tmp_path, source), "2", "3")
    assert "(for the answer '2' to '1+1=')" in str(raised.value)
    assert ("Traceback" in raised.value.trace) == ("at reward.py" in why)


SOMETIMES = """
def reward(response, **columns):
    print("looking at", response)
    if response == "3":
        raise ConnectionError("the server is gone")
    return {"4": 1.0}[response]
"""


def test_errors_of_the_network_lose_the_answer_and_others_do_if_the_recipe_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"KeyError: '2'.*environment.args.on_error"):
        answered(build(tmp_path, SOMETIMES), "2", "4")
    environment = build(tmp_path, SOMETIMES, on_error="lose")
    group = answered(environment, "2", "3", "4")
    assert rewards(group) == [1.0]
    assert group.failures == {
        "reward at reward.py:6: KeyError: '2'": 1,
        "reward at reward.py:5: ConnectionError: the server is gone": 1,
    }
    shown = environment.tracebacks()["reward at reward.py:6: KeyError"]
    assert shown.startswith("it printed:\nlooking at 2\nTraceback") and shown.endswith("KeyError: '2'\n")
    assert group.trajectories[0].output == "looking at 4\n"


class ChatWords(Words):
    def conversation(self, messages: Any, tools: Any = None, variables: Any = None) -> str | None:
        offered = "".join(f"<tool>{json.dumps(tool)}" for tool in tools or ())
        return offered + "".join(f"<{one['role']}>{one['content']}" for one in messages)


def prompts(folder: Path, rows: list[dict[str, Any]], *, chat: bool = True, **arguments: Any) -> list[str]:
    """Prompts of rows, in a chat template that writes all that it reads."""
    source, train = "def reward(response, **columns):\n    return 0", {"path": str(folder / "mine.jsonl")}
    arguments["train"] = {**train, **arguments.get("train", {})}
    tokenizer = ChatWords("<user>{}<assistant>") if chat else None
    return [each.prompt for each in build(folder, source, rows, tokenizer, **arguments).training_problems()]


TALK = [
    {"role": "user", "content": "Hi. Be short."},
    {"role": "assistant", "content": "Yes? Be short."},
    {"role": "user", "content": [{"type": "text", "text": "1+1? Be short."}]},
]


def test_template_and_removed_texts_apply_to_the_last_message_of_the_user(tmp_path: Path) -> None:
    before, rows = "<user>Hi. Be short.<assistant>Yes? Be short.", [{"prompt": TALK}]
    assert prompts(tmp_path, rows) == [f"{before}<user>1+1? Be short."]
    assert prompts(tmp_path, rows, prompt="{question} Use [].") == [f"{before}<user>1+1? Be short. Use []."]
    assert prompts(tmp_path, rows, train={"remove": ["Be short."]}) == [f"{before}<user>1+1?"]
    both = prompts(tmp_path, rows, prompt="{question} Use [].", train={"remove": ["Be  short."]})
    assert both == [f"{before}<user>1+1? Use []."]
    called = [*TALK, {"role": "assistant", "content": "."}, {"role": "tool", "content": "2"}]
    assert prompts(tmp_path, [{"prompt": called}], prompt="{question}!")[0].endswith("short.!<assistant>.<tool>2")
    with pytest.raises(ValueError, match=r"mine.jsonl:1: prompt: has no message of the user, which `prompt` and"):
        prompts(tmp_path, [{"prompt": called[-1:]}], prompt="{question}!")


@pytest.mark.parametrize("asked", ["1+1", [{"role": "user", "content": "1+1"}]])
def test_empty_system_message_takes_the_place_of_the_templates_own(tmp_path: Path, asked: Any) -> None:
    rows = [{"prompt": asked, "rules": ""}]
    assert prompts(tmp_path, rows, system="") == ["<system><user>1+1"]
    assert prompts(tmp_path, rows, system="Hi", train={"system": "rules"}) == ["<system><user>1+1"]
    assert prompts(tmp_path, rows) == ["<user>1+1"]
    assert prompts(tmp_path, rows, chat=False, system="") == ["1+1"]


@pytest.mark.parametrize("asked", ["1+1", [{"role": "user", "content": "1+1"}]])
def test_column_that_does_not_exist_is_an_error(tmp_path: Path, asked: Any) -> None:
    rows = [{"prompt": asked, "rules": "Be brief."}]
    for key in ("system", "tools"):
        with pytest.raises(ValueError, match=r"mine.jsonl: there is no column 'rulse', only prompt, rules"):
            prompts(tmp_path, rows, train={key: "rulse"})


ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("asked", ["1+1", [{"role": "user", "content": "1+1"}]])
def test_tools_of_a_row_are_offered_by_the_chat_template(tmp_path: Path, asked: Any) -> None:
    rows = [{"prompt": asked, "tools": [ADD]}, {"prompt": "2+2"}]
    assert prompts(tmp_path, rows) == [f"<tool>{json.dumps(ADD)}<user>1+1", "<user>2+2"]
    other = [{"prompt": asked, "offered": json.dumps([ADD])}]
    assert prompts(tmp_path, other, train={"tools": "offered"}) == [f"<tool>{json.dumps(ADD)}<user>1+1"]
    assert prompts(tmp_path, rows, train={"tools": None}) == ["<user>1+1", "<user>2+2"]
    advice = "if only the reward reads it, set `tools` of the data set to null"
    with pytest.raises(ValueError, match=rf"mine.jsonl:1: column tools: tools: only a chat template .*; {advice}"):
        prompts(tmp_path, rows, chat=False)
    with pytest.raises(ValueError, match=rf"mine.jsonl:1: column tools: .*; {advice}"):
        prompts(tmp_path, [{"prompt": asked, "tools": [7]}])


def test_prompt_may_be_a_conversation_and_have_a_system_message(tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "2"},
    ]
    source, tokenizer = "def reward(response, **columns):\n    return 0", ChatWords("<user>{}<assistant>")
    environment = build(tmp_path, source, [{"prompt": said}], tokenizer, system="Be brief.")
    assert environment.training_problems()[0].prompt == "<system>Be brief.<user>Hi<assistant>Yes?<user>2"
    environment = build(tmp_path, source, [{"prompt": said[:1]}])
    assert environment.training_problems()[0].prompt == "Hi", "the text where there is no template"
    shared = [{"from": "human", "value": "Hi"}]
    environment = build(tmp_path, source, [{"prompt": json.dumps(shared)}], tokenizer)
    assert environment.training_problems()[0].prompt == "<user>Hi", "messages of ShareGPT, as JSON text"
    rows = {"path": str(tmp_path / "mine.jsonl"), "question": "ask", "system": "rules"}
    environment = build(tmp_path, source, [{"ask": "2?", "rules": "Be kind."}], tokenizer, train=rows)
    assert environment.training_problems()[0].prompt == "<system>Be kind.<user>2?"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([{"role": "narrator", "content": "2+2"}], "prompt.0.role: is 'narrator'"),
        ([{"role": "user", "content": 4}], "prompt.0.content: "),
        ([{"role": "system", "content": "Be brief."}], "prompt: is a prompt without a question"),
        (
            [{"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}],
            "its last message is from assistant",
        ),
        (["2+2"], "prompt.0: "),
        (
            [{"role": "user", "content": "2"}, {"role": "assistant", "content": "?"}, {"role": "user", "content": "3"}],
            "prompt.1: is from assistant, which only a chat template can write",
        ),
    ],
)
def test_prompt_that_asks_nothing_is_refused_by_row_and_field(tmp_path: Path, prompt: list[Any], said: str) -> None:
    source = "def reward(response, **columns):\n    return 0"
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        build(tmp_path, source, [ROWS[0], {"prompt": prompt}])
    assert f"{tmp_path / 'mine.jsonl'}:2: prompt" in str(error.value)


def test_late_prompts_that_ask_nothing_are_dropped_and_most_of_them_are_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = "def reward(response, **columns):\n    return 0"
    good = [{"prompt": str(number)} for number in range(16)]
    bad = [{"prompt": [{"role": "system", "content": str(number)}]} for number in range(17)]
    assert len(build(tmp_path, source, [*good, *bad[:2]]).training_problems()) == 16
    file = tmp_path / "mine.jsonl"
    dropped = (
        f"data set {file}: 2 of 18 rows cannot be used and are dropped: 2 x prompt: is a prompt without a question"
    )
    assert any(said.startswith(dropped) and f"(first: {file}:17)" in said for said in caplog.messages)
    with pytest.raises(ValueError, match="17 of 33 rows cannot be used"):
        build(tmp_path, source, [*good, *bad])


def test_character_without_a_token_is_an_error_with_its_row_before_anything_is_built(tmp_path: Path) -> None:
    tokenizer: Any = build_tokenizer(TokenizerConfig(type="characters", alphabet="0123456789+="))
    source = "def reward(response, **columns):\n    return 0"
    with pytest.raises(ValueError, match=r"mine.jsonl:3: no token for the character '\*' of '6\*8=': add it to tokeni"):
        build(tmp_path, source, [*ROWS, {"prompt": "6*8="}], tokenizer)


def test_rows_are_split_and_evaluated_like_any_data_set(tmp_path: Path) -> None:
    rows = [{"prompt": str(number), "answer": "1"} for number in range(10)]
    source = "def reward(response, **columns):\n    return 0"
    environment = build(tmp_path, source, rows, held_out=0.2)
    assert (len(environment.training_problems()), len(environment.evaluation_problems()["held_out"])) == (8, 2)
    assert environment.demonstrations()[0] == (environment.training_problems()[0].prompt, "1")
    environment = build(tmp_path, source, [*rows[:2], {"prompt": "x"}])
    assert [prompt for prompt, _ in environment.demonstrations()] == ["0", "1"], "no answer is not the text None"
    with pytest.raises(NotImplementedError):
        environment.gold_response(environment.training_problems()[-1])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def score(response): return 0", r"reward.py: defines no function reward: def reward\("),
        ("def reward(response, **columns)\n    return 0", r"reward.py:1: not valid Python: expected ':'"),
        ("reward = 7", "reward is not a function"),
        (
            "import no_such_module\ndef reward(response): return 0",
            r"reward.py:1: import no_such_module: ModuleNotFoundError",
        ),
        ("def reward(): return 0", "reward has no parameter for the response"),
        ("def reward(answer, **columns): return 0", "the response, has the name of a column, answer: rename it"),
        (
            "def reward(response, solution): return 0",
            "needs the column solution, but a row has only prompt, answer, level",
        ),
    ],
)
def test_unusable_file_is_one_error_at_start(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(tmp_path, source)


def test_missing_prompt_or_file_is_reported(tmp_path: Path) -> None:
    source = "def reward(response, **columns): return 0"
    with pytest.raises(ValueError, match="there is no column 'prompt', only question"):
        build(tmp_path, source, [{"question": "1"}])
    with pytest.raises(ValueError, match=r"nowhere.py: no such file or directory"):
        build(tmp_path, source, file=str(tmp_path / "nowhere.py"))
    with pytest.raises(ValidationError, match="file"):
        PythonConfig.model_validate({"train": "mine.jsonl"})
