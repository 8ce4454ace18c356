"""Published forms of rows become the tokens that their authors meant, from every file format (forms.yaml)."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_templates import shown, tokenizer_of
from optional import needs

from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.supervised.example_rows import RowEncoder, rows_of
from megatron_rl.learn.supervised.row_forms import form_of
from megatron_rl.learn.supervised.row_sets import open_sets
from megatron_rl.model.tokenizer import HuggingFaceTokenizer
from megatron_rl.recipe.data import DataConfig
from megatron_rl.recipe.errors import ConfigurationError

pytestmark = needs("datasets")

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}<end>\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}<call>{{ call.function | tojson }}{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTROLS = ("<tools>", "<system>", "<user>", "<assistant>", "<tool>", "<call>", "<end>")
FORMS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "forms.yaml").read_text(encoding="utf-8"))
UNDERSTOOD = [form for form in FORMS if "tokens" in form]
IDS = [form["form"] for form in UNDERSTOOD]


@cache
def tokenizer() -> HuggingFaceTokenizer:
    return tokenizer_of(TEMPLATE, CONTROLS, ("<think>", "</think>"), eos="<end>")


def as_lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "rows.jsonl"


def as_a_table(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows whose lists and objects are JSON text."""
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*rows[0]])
        table.writeheader()
        for row in rows:
            table.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()})
    return folder / "rows.csv"


def as_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def as_saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(folder / "saved")
    return folder / "saved"


def read(file: Path, data: dict[str, Any] | None = None) -> tuple[list[Problem], RowEncoder]:
    config = DataConfig(path=str(file), **data or {})
    encoder = RowEncoder(config, tokenizer(), 1000)
    rows = rows_of(config, None)
    encoder.check(rows)
    return rows, encoder


def marked(encoder: RowEncoder, row: Problem) -> str:
    """Text of a row's tokens, learned ones within [[ ]]."""
    found = encoder.example(row)
    text = ""
    for learned, pairs in groupby(zip(found.loss_mask, found.tokens, strict=True), lambda pair: pair[0]):
        part = shown(tokenizer(), [token for _, token in pairs])
        text += f"[[{part}]]" if learned else part
    return text


@pytest.mark.parametrize("form", UNDERSTOOD, ids=IDS)
def test_a_published_form_becomes_the_tokens_that_its_author_meant(tmp_path: Path, form: dict[str, Any]) -> None:
    (row,), encoder = read(as_lines(tmp_path, [form["row"]]), form.get("data"))
    assert marked(encoder, row) == form["tokens"]


@pytest.mark.parametrize("form", [form for form in FORMS if "error" in form], ids=lambda form: form["form"])
def test_a_form_that_is_not_understood_is_refused_by_data_set_row_and_field(
    tmp_path: Path, form: dict[str, Any]
) -> None:
    file = as_lines(tmp_path, [form["row"]])
    with pytest.raises(ConfigurationError) as error:
        read(file, form.get("data"))
    said = str(error.value)
    assert form["error"] in said and str(file) in said
    assert f"{file}:1" in said or "columns" in form["error"]


@pytest.mark.parametrize("write", [as_a_table, as_parquet, as_saved])
def test_every_file_format_gives_the_same_tokens(
    tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    for number, form in enumerate(UNDERSTOOD):
        if write is as_a_table and "." in form.get("data", {}).get("answer", ""):
            continue  # no path leads into JSON text
        if write is not as_a_table and "only" in form:
            continue
        (folder := tmp_path / str(number)).mkdir()
        (row,), encoder = read(write(folder, [form["row"]]), form.get("data"))
        assert marked(encoder, row) == form["tokens"], form["form"]


def called(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A row with its own tool, and a call of it."""
    kinds = {name: {"type": "string"} for name in arguments}
    parameters = {"type": "object", "properties": kinds}
    return {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": tool, "arguments": arguments}}]},
            {"role": "tool", "content": "!"},
            {"role": "assistant", "content": "Done."},
        ],
        "tools": [{"type": "function", "function": {"name": tool, "parameters": parameters}}],
    }


def test_rows_of_different_tools_are_the_same_in_every_file_format(tmp_path: Path) -> None:
    """Arrow adds to each tool and call the keys of all others, with null."""
    given = [called("weather", {"city": "Oslo"}), called("add", {"x": "1", "y": "2"}), called("now", {})]
    wanted, encoder = read(as_lines(tmp_path, given))
    assert '[[<call>{"name": "add", "arguments": {"x": "1", "y": "2"}}<end>]]' in marked(encoder, wanted[1])
    for write in (as_a_table, as_parquet, as_saved):
        found, _ = read(write(tmp_path, given))
        assert [row.prompt for row in found] == [row.prompt for row in wanted], write.__name__
        assert [marked(encoder, row) for row in found] == [marked(encoder, row) for row in wanted]


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ALPACA = {"instruction": "1+1", "output": "2"}
COMPANIONS = [
    (ALPACA, {"input": "And 2+2?"}),
    (ALPACA, {"history": [["a", "b"]]}),
    ({"prompt": "1+1", "completion": "2"}, {"system": "Be brief."}),
    ({"question": "1+1", "response": "2"}, {"system_prompt": "Be brief."}),
    ({"prompt": "1+1", "completion": "2"}, {"tools": TOOLS}),
    ({"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}, {"functions": TOOLS}),
]


@pytest.mark.parametrize(("row", "companion"), COMPANIONS, ids=lambda pair: " ".join(pair))
def test_a_column_that_later_rows_begin_means_the_same_in_every_order_and_format(
    tmp_path: Path, row: dict[str, Any], companion: dict[str, Any]
) -> None:
    plain, full = [row] * 16, [{**row, **companion}] * 2
    (one, *_, other), encoder = read(as_lines(tmp_path, [*plain, *full]))
    (alone,), _ = read(as_lines(tmp_path, full[:1]))
    assert marked(encoder, other) == marked(encoder, alone) != marked(encoder, one)
    swapped, _ = read(as_lines(tmp_path, [*full, *plain]))
    assert [found.prompt for found in swapped] == [other.prompt] * 2 + [one.prompt] * 16
    null = dict.fromkeys(companion)
    in_columns, _ = read(as_parquet(tmp_path, [{**each, **null, **each} for each in (*plain, *full)]))
    assert [found.prompt for found in in_columns] == [one.prompt] * 16 + [other.prompt] * 2


@pytest.mark.parametrize(
    ("row", "late"),
    [
        ({"prompt": "1+1", "completion": "2"}, {"messages": [{"role": "user", "content": "?"}]}),
        ({"prompt": "1+1", "completion": "2"}, {"response": "3"}),
        ({"query": "1+1", "response": "2"}, {"answers": '[{"name": "add", "arguments": {}}]', "tools": TOOLS}),
    ],
)
def test_later_rows_that_would_have_made_another_form_are_dropped_by_row_and_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: dict[str, Any], late: dict[str, Any]
) -> None:
    file = as_lines(tmp_path, [*[row] * 16, {**row, **late}])
    assert len(read(file)[0]) == 16
    column, asked, answer = next(iter(late)), *row
    said = f"1 x {column}: says something in this row and is not in the first rows, which are read from {asked}"
    assert f"{said} + {answer}" in caplog.text and f"(first: {file}:17)" in caplog.text
    named, _ = read(file, {"prompt": asked, "answer": answer})
    assert len(named) == 17, "the recipe says which columns count"


@pytest.mark.parametrize("form", [form for form in UNDERSTOOD if "data" not in form], ids=lambda form: form["form"])
def test_a_known_pair_that_the_recipe_names_is_read_as_one_that_is_recognised(
    tmp_path: Path, form: dict[str, Any]
) -> None:
    file = as_lines(tmp_path, [form["row"]])
    recognised = form_of(DataConfig(), form["row"])
    if recognised.messages:
        named, encoder = read(file, {"messages": recognised.messages})
    else:
        named, encoder = read(file, {"prompt": recognised.prompt, "answer": recognised.answer})
    assert [marked(encoder, row) for row in named] == [form["tokens"]]


def test_calls_whose_tools_begin_after_the_first_rows_are_not_learned_as_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"query": "1+1", "answers": '[{"name": "add", "arguments": {}}]'}
    file = as_lines(tmp_path, [*[row] * 16, {**row, "tools": TOOLS}])
    assert len(read(file, {"prompt": "query", "answer": "answers"})[0]) == 16
    assert "1 x tools: says something in this row" in caplog.text


def test_columns_that_nothing_reads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = as_lines(tmp_path, [*[{**ALPACA, "id": 7}] * 16, {**ALPACA, "input": "x", "context": "y", "note": "z"}])
    with caplog.at_level("INFO"):
        found = open_sets(DataConfig(path=str(file)), None)
    assert found.ignored == {"": ["id", "note"]}
    said = "prompts in instruction and input and context, answers in output; nothing reads id, note"
    assert caplog.text.count(said) == 1
