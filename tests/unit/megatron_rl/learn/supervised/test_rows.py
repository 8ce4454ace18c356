"""Rows of data sets become tokens, and exactly the assistant's are learned."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, qwen3, shown, tokenizer_of
from core_helpers import ALPHABET, END
from optional import needs
from supervised_helpers import sums, write_rows

from megatron_rl.agent.api import build_environment
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.supervised.example_rows import RowEncoder, UnusableRow, rows_of
from megatron_rl.learn.supervised.row_forms import form_of, row_of
from megatron_rl.model.chat.probes import TOOL
from megatron_rl.model.tokenizer import HuggingFaceTokenizer, build_tokenizer
from megatron_rl.recipe.data import DataConfig
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

pytestmark = needs("datasets")

CHARACTERS = build_tokenizer(TokenizerConfig(type="characters", alphabet=ALPHABET))
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4, I think"},
]
CALLS = [
    {"role": "user", "content": "Find é"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"word": "é"}}}],
    },
    {"role": "tool", "name": "look_up", "content": "a letter"},
    {"role": "assistant", "content": "It is a letter."},
]


def problem(row: dict[str, Any], data: DataConfig | None = None) -> Problem:
    """The row of a data set with these columns."""
    values = row_of(form_of(data or DataConfig(), row), row)
    assert values is not None
    return Problem("", values)


def encoded(data: DataConfig, row: dict[str, Any], tokenizer: Any, longest: int = 1000) -> tuple[Any, list[str]]:
    """Tokens of a row, and the texts of its learned parts."""
    found = RowEncoder(data, tokenizer, longest).example(problem(row, data))
    parts, part = [], []
    for token, learned in [*zip(found.tokens, found.loss_mask, strict=True), (0, False)]:
        if learned:
            part.append(token)
        elif part:
            parts.append(
                shown(tokenizer, part)
                if isinstance(tokenizer, HuggingFaceTokenizer)
                else tokenizer.decode(part, special=True)
            )
            part = []
    return found, parts


TOKENIZERS: dict[str, Callable[[], HuggingFaceTokenizer]] = {
    "renderer": qwen3,
    "template": partial(qwen3, renderer="template"),
    "no renderer": partial(tokenizer_of, CHATML),
}


@pytest.mark.parametrize("of", TOKENIZERS)
def test_the_messages_of_the_assistant_are_learned_with_their_ends(of: str) -> None:
    tokenizer = TOKENIZERS[of]()
    found, parts = encoded(DataConfig(), {"messages": TALK}, tokenizer)
    assert [part.removeprefix("<think>\n\n</think>\n\n") for part in parts] == ["2<|im_end|>", "4, I think<|im_end|>"]
    assert shown(tokenizer, found.tokens) == tokenizer.conversation(TALK, add_generation_prompt=False)


@pytest.mark.parametrize("of", ["renderer", "template"])
def test_calls_of_tools_are_learned_and_their_results_are_not(of: str) -> None:
    tokenizer = TOKENIZERS[of]()
    found, parts = encoded(DataConfig(), {"messages": CALLS, "tools": [TOOL]}, tokenizer)
    first, last = (part.removeprefix("<think>\n\n</think>\n\n") for part in parts)
    assert first == '<tool_call>\n{"name": "look_up", "arguments": {"word": "é"}}\n</tool_call><|im_end|>'
    assert last == "It is a letter.<|im_end|>"
    assert "a letter\n</tool_response>" in shown(tokenizer, found.tokens)


def test_a_control_token_spelled_out_in_a_message_stays_text() -> None:
    tokenizer = qwen3()
    found, _ = encoded(DataConfig(), {"messages": [{"role": "user", "content": "<|im_end|>"}, TALK[2]]}, tokenizer)
    ends = [token for token in found.tokens if token in tokenizer.end_ids]
    assert len(ends) == 2  # of the two messages


def test_prompts_and_answers_are_messages_where_there_is_a_chat_template() -> None:
    pair = {"question": "1+1", "answer": "2"}
    columns = {"prompt": "question", "answer": "answer"}
    as_chat, _ = encoded(DataConfig(**columns, system="Be brief."), pair, qwen3())
    assert as_chat == encoded(DataConfig(), {"messages": TALK[:3]}, qwen3())[0]
    found, parts = encoded(DataConfig(**columns, chat="never"), pair, qwen3())
    assert (shown(qwen3(), found.tokens[:3]), parts[0][0]) == ("1+1", "2")
    plain, parts = encoded(DataConfig(**columns), {"question": "1+1=", "answer": "2"}, CHARACTERS)
    assert plain.loss_mask == [False] * 4 + [True] * 2
    assert plain.tokens[-1] == END
    with pytest.raises(UnusableRow, match=r"a system message or data.chat_template, but the tokenizer has no chat"):
        encoded(DataConfig(**columns, system="x"), pair, CHARACTERS)


@pytest.mark.parametrize(
    ("of", "data", "why"),
    [
        (qwen3, {"chat": "never"}, "data.chat is never, and only the chat template can write a list of messages"),
        (lambda: CHARACTERS, {}, "the model has no chat template"),
    ],
)
def test_messages_need_the_chat_template(of: Callable[[], Any], data: dict[str, Any], why: str) -> None:
    with pytest.raises(UnusableRow, match=why):
        encoded(DataConfig(**data), {"messages": TALK}, of())


def test_long_rows_are_unusable_and_stop_the_start_if_they_are_the_most() -> None:
    row, short = problem({"messages": TALK}), problem({"messages": TALK[1:3]})
    encoder = RowEncoder(DataConfig(), qwen3(), len(encoded(DataConfig(), {"messages": TALK[1:3]}, qwen3())[0].tokens))
    with pytest.raises(UnusableRow, match=r"longer than training.sequence_length"):
        encoder.example(row)
    encoder.check([short, row] * 50)
    with pytest.raises(
        ConfigurationError, match=r"data: 60 of 64 rows tried cannot be trained on: 60 x it is longer than"
    ):
        encoder.check([short] * 4 + [row] * 1000)


def test_a_row_that_the_template_refuses_is_an_error_among_the_first_rows_and_later_dropped() -> None:
    system = problem({"messages": TALK[:3]})
    plain = problem({"messages": TALK[1:3]})
    tokenizer = tokenizer_of("{{ 1 / 0 if messages[0].role == 'system' }}" + CHATML)
    encoder = RowEncoder(DataConfig(), tokenizer, 1000)
    with pytest.raises(ConfigurationError, match=r"data: row 2 cannot be trained on: .*division by zero"):
        encoder.check([plain, system])
    encoder.check([plain] * 20 + [system])


def test_every_row_is_read_as_it_is_also_repeated_ones(tmp_path: Path) -> None:
    rows = [*sums(5), {"question": " 1+1= ", "answer": " 2\n"}, *sums(5)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    found = rows_of(DataConfig(path=str(file), prompt="question", answer="answer"), None)
    expected = [(row["question"], row["answer"]) for row in rows]
    assert [(row.golden["prompt"], row.golden["answer"]) for row in found] == expected
    assert found[1].golden["where"] == f"{file}:2"
    assert len({row.prompt for row in found}) == len({json.dumps(row) for row in rows})  # the answer is in the digest


def test_rows_that_lack_a_value_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}, {"messages": None}, {"messages": []}])
    assert len(rows_of(DataConfig(path=str(file)), None)) == 1
    assert "2 of 3 rows are skipped, because they lack messages (messages)" in caplog.text


BAD = {"messages": [{"role": "user", "content": 7}, TALK[2]]}


def test_late_rows_that_mean_nothing_are_dropped_and_counted_by_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"messages": TALK}
    other = {"messages": [TALK[1], {"role": "narrator", "content": "2"}]}
    file = write_rows(tmp_path / "rows.jsonl", [*[good] * 16, BAD, other, BAD])
    assert len(rows_of(DataConfig(path=str(file)), None)) == 16
    (said,) = (record.message for record in caplog.records if record.levelno >= logging.WARNING)
    assert said.startswith(f"data set {file}: 3 of 19 rows cannot be used and are dropped: 2 x messages.N.content")
    assert f"(first: {file}:17); 1 x messages.N.role: is 'narrator'" in said
    write_rows(file, [*[good] * 15, BAD])
    with pytest.raises(ConfigurationError, match=rf"data set {file}:16: messages\.0\.content: is a number"):
        rows_of(DataConfig(path=str(file)), None)
    write_rows(file, [*[good] * 16, *[BAD] * 17])
    with pytest.raises(ConfigurationError, match=r"17 of 33 rows cannot be used and are dropped: 17 x messages\.N"):
        rows_of(DataConfig(path=str(file)), None)


@pytest.mark.parametrize(
    ("rows", "columns", "error"),
    [
        ([{"text": "x"}], {"messages": "talk"}, "there is no column 'talk', only text"),
        ([{"messages": "Hello"}], {}, "rows.jsonl:1: messages: is not JSON"),
        ([{"messages": None}], {}, r"no row has messages \(messages\)"),
        ([{"q": "1", "a": ""}], {"prompt": "q", "answer": "a"}, r"no row has both a prompt \(q\) and an answer \(a\)"),
    ],
)
def test_data_of_another_form_is_an_error_that_names_the_column(
    tmp_path: Path, rows: list[dict[str, Any]], columns: dict[str, str], error: str
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigurationError, match=error):
        rows_of(DataConfig(path=str(file), **columns), None)


def test_missing_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file or directory"):
        rows_of(DataConfig(path=str(tmp_path / "missing")), None)
    with pytest.raises(ConfigurationError, match=r"data.path is missing and the environment has no worked examples"):
        rows_of(DataConfig(), None)


def test_an_environment_gives_its_worked_examples_or_its_problems_with_right_responses() -> None:
    arithmetic = build_environment(EnvironmentConfig(name="arithmetic"), CHARACTERS)
    shown_ones = [(row.golden["prompt"], row.golden["answer"]) for row in rows_of(DataConfig(), arithmetic)]
    assert shown_ones == [*arithmetic.demonstrations()]  # type: ignore[attr-defined]
    countdown = build_environment(EnvironmentConfig(name="countdown"), qwen3())
    found = rows_of(DataConfig(), countdown)
    assert [row.golden["prompt"] for row in found] == [problem.prompt for problem in countdown.training_problems()]
    assert found[0].golden["answer"] == countdown.gold_response(countdown.training_problems()[0])
    example = RowEncoder(DataConfig(), qwen3(), 1000).example(found[0])
    parts = [shown(qwen3(), [token for token, learned in zip(*example, strict=True) if learned])]
    assert parts == [found[0].golden["answer"] + "<|im_end|>"]
    assert shown(qwen3(), example.tokens).startswith("<|im_start|>")  # the environment has rendered the prompt
