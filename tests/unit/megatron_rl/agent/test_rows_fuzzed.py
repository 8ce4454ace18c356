"""Rows of data sets, whatever stands in their files, are read or refused with a sentence."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chat_templates import qwen3
from hypothesis import HealthCheck, given, settings
from odd_values import DEEP, as_json, changed, drawn, nested, refusal, spoilt
from optional import needs
from words import Words

from megatron_rl.agent import text_rows
from megatron_rl.agent.data_rows import DataSource, read_rows
from megatron_rl.agent.environments.python import PythonEnvironment, PythonRows
from megatron_rl.agent.hf_dataset import _questions
from megatron_rl.agent.prompts import PromptConfig, messages_in, render_messages, render_prompt
from megatron_rl.agent.text_rows import value_at
from megatron_rl.learn.supervised.example_rows import RowEncoder, UnusableRow, key_of, read_data
from megatron_rl.recipe.data import DataConfig

pytestmark = needs("datasets")

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
TALK = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2", "weight": 1}]
CALLS = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "4"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "hi"}]},
]
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "Be brief."}, *TALK]},
    {"messages": CALLS, "tools": json.dumps([TOOL])},
    {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}],
        "system": "x",
        "tools": [TOOL],
    },
    {"messages": [TALK[0], {"from": "function_call", "value": '{"name": "f"}'}, {"from": "observation", "value": "4"}]},
    {"prompt": TALK[:1], "completion": TALK[1:]},
    {"instruction": "a", "input": "b", "output": "c", "history": [["x", "y"]], "system": "s"},
    {"question": "a", "answer": 1.5},
]


def learned(file: Path) -> None:
    """Do with a file of rows what a supervised run does."""
    data = DataConfig(path=str(file))
    rows = read_data(data).rows
    encoder = RowEncoder(data, qwen3(), 1000)
    encoder.check(rows)
    for row in rows:
        refusal(lambda row=row: encoder.example(row), UnusableRow)  # type: ignore[misc]
        key_of(row)


def asked(file: Path) -> None:
    """Do with a file of rows what an environment does whose prompts stand in a column."""
    for question in _questions(PythonRows(path=str(file))):
        messages = messages_in(value_at(question.row, ["prompt"]), "prompt")
        for tokenizer in (Words(), qwen3()):
            if messages is None:
                render_prompt(tokenizer, question.text, PromptConfig())
            else:
                refusal(lambda: render_messages(tokenizer, messages, PromptConfig(), "prompt"), ValueError)  # noqa: B023
        json.dumps(PythonEnvironment.golden(None, question), default=str)  # type: ignore[arg-type]


def lines(rows: list[Any]) -> bytes:
    return b"\n".join(map(as_json, rows))


def rows(random: Random) -> tuple[str, bytes]:
    some = [changed(random.choice(ROWS), random) for _ in range(random.randint(1, 3))]
    return random.choice(
        [("a.jsonl", lines(some)), ("a.json", as_json(some)), ("a.jsonl.gz", gzip.compress(lines(some)))]
    )


def late(random: Random) -> tuple[str, bytes]:
    """A row behind those that must all be usable."""
    return "a.jsonl", lines([*[ROWS[1]] * 20, changed(ROWS[1], random)])


@cache
def tables() -> dict[str, bytes]:
    import pyarrow
    from pyarrow import ipc, parquet

    table = pyarrow.Table.from_pylist([{"messages": TALK[:1], "n": number, "b": b"ab"} for number in range(5)])
    columns, stream, file = io.BytesIO(), io.BytesIO(), io.BytesIO()
    parquet.write_table(table, columns)
    with ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    with ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    text = lines(ROWS[:2])
    return {
        "a.parquet": columns.getvalue(),
        "a.arrow": stream.getvalue(),
        "file.arrow": file.getvalue(),
        "a.jsonl": text,
        "a.csv": b'question,answer\n"1+1",2\n"a\nb",c\n',
        "a.tsv": b"prompt\tcompletion\n1\t2\nx\ty\n",
        "a.jsonl.gz": gzip.compress(text),
        "a.jsonl.bz2": bz2.compress(text),
        "a.jsonl.xz": lzma.compress(text),
    }


def damaged(random: Random) -> tuple[str, bytes]:
    name, data = random.choice([*tables().items()])
    return name, spoilt(data, random)


def refused(use: Callable[[Path], object], folder: Path, name: str, data: bytes) -> str | None:
    (folder / name).write_bytes(data)
    return refusal(lambda: use(folder / name), ValueError)


anything = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@anything
@given(drawn(rows) | drawn(late))
def test_rows_of_any_shape_are_learned_or_refused(tmp_path: Path, file: tuple[str, bytes]) -> None:
    refused(learned, tmp_path, *file)


@anything
@given(drawn(lambda random: ("a.jsonl", lines([changed({"prompt": random.choice([TALK, "a"]), "x": 1}, random)]))))
def test_prompts_of_any_shape_are_asked_or_refused(tmp_path: Path, file: tuple[str, bytes]) -> None:
    refused(asked, tmp_path, *file)


@anything
@given(drawn(damaged))
def test_damaged_files_are_read_or_refused(tmp_path: Path, file: tuple[str, bytes]) -> None:
    refused(lambda path: [*read_rows(DataSource(path=str(path)))], tmp_path, *file)


# Faults that were found, and the sentence that each now gives.
TEXT = lines(ROWS[:1])
FOUND = [
    ("a.jsonl", as_json({"messages": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}), "0.type: is '[]'"),
    ("a.jsonl", as_json({"messages": nested(120)}), "a.jsonl:1: not valid JSON: it has more than 100 lists"),
    ("a.jsonl", b'{"messages": ' + b"[" * DEEP, "it has more than 100 lists and objects inside one another"),
    (
        "a.jsonl",
        as_json({"messages": TALK, "tools": "[" * 150 + "]" * 150}),
        "tools: is not JSON: it has more than 100",
    ),
    ("a.jsonl", TEXT + b'\n{"messages": "\xff"}', "a.jsonl:2: not UTF-8: invalid start byte; write the file as UTF-8"),
    ("a.jsonl.gz", gzip.compress(TEXT)[:-12], "a.jsonl.gz: cut short or damaged"),
    ("a.jsonl.gz", gzip.compress(TEXT)[:20] + b"\xff" * 40, "a.jsonl.gz: cut short or damaged"),
    ("a.jsonl.bz2", bz2.compress(TEXT)[:-9], "a.jsonl.bz2: cut short or damaged"),
    ("a.jsonl.xz", lzma.compress(TEXT)[:-9], "a.jsonl.xz: cut short or damaged"),
    ("a.jsonl.xz", lzma.compress(TEXT)[:40] + b"\xff" * 40, "a.jsonl.xz: cut short or damaged"),
]


def test_faults_found_in_rows_stay_mended(tmp_path: Path) -> None:
    for name, data, sentence in FOUND:
        assert sentence in (refused(learned, tmp_path, name, data) or ""), (name, data[:80])


def test_arrow_file_whose_offsets_lead_outside_is_refused(tmp_path: Path) -> None:
    """pyarrow would end the process by a segmentation fault."""
    for name in ("a.arrow", "file.arrow"):
        data = tables()[name]
        at = data.index((3).to_bytes(4, "little") + (6).to_bytes(4, "little"))  # offsets of the texts "1+1"
        hostile = data[:at] + (2**31 - 9).to_bytes(4, "little") + data[at + 4 :]
        said = refused(lambda path: [*read_rows(DataSource(path=str(path)))], tmp_path, name, hostile)
        assert said is not None and "ffset" in said, said


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(text_rows, "LONGEST_ROW", 1000)
    said = refused(learned, tmp_path, name, b"question,answer\n" * name.endswith("csv") + b"x" * 1001)
    assert said is not None and "a row of more than 1,000 characters" in said


@pytest.mark.parametrize("state", ["{", "[]", '{"_data_files": 1}', '{"_data_files": [1]}', "[" * 5000])
def test_broken_record_of_a_saved_data_set_is_refused(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    said = refusal(lambda: [*read_rows(DataSource(path=str(tmp_path)))], ValueError)
    assert said is not None and "state.json" in said and "save the data set again" in said
