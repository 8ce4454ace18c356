"""Rows mean the same in every file format, whatever Arrow's columns add to them."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from optional import needs

from megatron_rl.agent import text_rows
from megatron_rl.agent.data_rows import DataSource, read_rows
from megatron_rl.agent.datasets import DataSet, Question, read_questions

pytestmark = needs("datasets")

ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "meta": {"kind": "x"}, "calls": [{"name": "f", "arguments": {"city": "Oslo"}}], "level": 1},
    {
        "prompt": "b",
        "meta": {"sum": 1},
        "calls": [{"name": "g", "arguments": {"a": 1, "b": [{"c": True}]}}],
        "level": 2,
    },
    {"prompt": "c", "meta": {"sum": 2}, "calls": [], "level": 3},
]
"""Rows whose objects have other keys in each row."""


def as_lines(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def as_a_list(folder: Path) -> Path:
    (folder / "rows.json").write_text(json.dumps(ROWS, indent=1))
    return folder / "rows.json"


def as_parquet(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def as_feather(folder: Path) -> Path:
    import pyarrow
    from pyarrow import feather

    feather.write_feather(pyarrow.Table.from_pylist(ROWS), folder / "rows.arrow")
    return folder / "rows.arrow"


def as_saved(folder: Path) -> Path:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return folder / "saved"


def as_arrow(folder: Path) -> Path:
    return next(as_saved(folder).glob("*.arrow"))


def as_saved_json(folder: Path) -> Path:
    """Objects stored as JSON text, as `datasets` can."""
    from datasets import Dataset, Features, Json, List, Value

    kinds = {"prompt": Value("string"), "meta": Json(), "calls": List(Json()), "level": Value("int64")}
    Dataset.from_list(ROWS, features=Features(kinds)).save_to_disk(folder / "saved")
    return folder / "saved"


def as_a_folder_of_parquet(folder: Path) -> Path:
    (folder / "data").mkdir()
    as_parquet(folder).rename(folder / "data" / "train-00000-of-00001.parquet")
    return folder / "data"


FORMATS = [as_lines, as_a_list, as_parquet, as_feather, as_saved, as_arrow, as_saved_json, as_a_folder_of_parquet]


@pytest.mark.parametrize("place", FORMATS)
def test_objects_have_the_keys_of_their_own_row_in_every_format(tmp_path: Path, place: Callable[[Path], Path]) -> None:
    rows = [*read_rows(DataSource(path=str(place(tmp_path))))]
    assert [row.values for row in rows] == ROWS
    assert all(f"{number}" in row.where.rpartition(":")[2] for number, row in enumerate(rows, 1))


@pytest.mark.parametrize("place", [as_lines, as_parquet])
def test_a_column_that_a_row_lacks_is_null_in_every_format(tmp_path: Path, place: Callable[..., Path]) -> None:
    file = place(tmp_path, [*ROWS, {"prompt": "d"}])
    last = [*read_questions(DataSource(path=str(file), question="prompt"))][-1]
    assert last.row == {"prompt": "d", "meta": None, "calls": None, "level": None}


def test_null_keys_that_are_left_out_are_noted_once_by_column(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert len([*read_rows(DataSource(path=str(as_parquet(tmp_path))))]) == 3
    (said,) = caplog.messages
    assert "null keys within the objects of calls, meta are left out" in said
    caplog.clear()
    with caplog.at_level(logging.INFO):
        (tmp_path / "rows.jsonl").write_text('{"meta": {"x": null}}\n')
        assert [row.values for row in read_rows(DataSource(path=str(tmp_path / "rows.jsonl")))] == [
            {"meta": {"x": None}}
        ]
    assert not caplog.messages, "its author wrote it"


def test_values_of_arrow_are_those_of_json(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    pair = pa.struct({"x": pa.int8(), "y": pa.string()})
    hour = datetime(2024, 1, 2, 3, tzinfo=UTC)
    columns: dict[str, tuple[Any, Any]] = {
        "time": (pa.array([hour], pa.timestamp("us", "UTC")), "2024-01-02T03:00:00+00:00"),
        "moment": (pa.array([1], pa.timestamp("ns")), "1970-01-01T00:00:00.000000001"),
        "day": (pa.array([date(2024, 1, 2)]), "2024-01-02"),
        "wait": (pa.array([timedelta(seconds=1.5)]), 1.5),
        "exact": (pa.array([Decimal("1.50")]), 1.5),
        "bytes": (pa.array(["é".encode()], pa.large_binary()), "é"),
        "image": (pa.array([b"\xff"]), "/w=="),
        "half": (pa.array([0.5], pa.float16()), 0.5),
        "whole": (pa.array([2.0]), 2.0),
        "category": (pa.array(["red"]).dictionary_encode(), "red"),
        "days": (pa.array([[date(2024, 1, 2), None]]), ["2024-01-02", None]),
        "nested": (pa.array([[[{"x": 1, "y": None}], []]], pa.large_list(pa.list_(pair))), [[{"x": 1}], []]),
        "map": (pa.array([[("k", {"x": 1, "y": None})]], pa.map_(pa.string(), pair)), {"k": {"x": 1}}),
        "fixed": (pa.array([[1, 2]], pa.list_(pa.int32(), 2)), [1, 2]),
        "view": (pa.array(["s"], pa.string_view()), "s"),
        "nothing": (pa.nulls(1), None),
        "truth": (pa.array([True]), True),
    }
    parquet.write_table(pa.table({name: column for name, (column, _) in columns.items()}), tmp_path / "rows.parquet")
    (row,) = read_rows(DataSource(path=str(tmp_path / "rows.parquet")))
    assert row.values == {name: value for name, (_, value) in columns.items()}
    assert json.loads(json.dumps(row.values)) == row.values
    asked = DataSet(path=str(tmp_path / "rows.parquet"), question="category", answer="exact")
    assert [*read_questions(asked)] == [Question("red", "1.50")], "as it is spelled"


def test_compressed_text_needs_no_package(tmp_path: Path) -> None:
    text = as_lines(tmp_path).read_bytes()
    for suffix, packed in ((".gz", gzip.compress(text)), (".bz2", bz2.compress(text)), (".xz", lzma.compress(text))):
        (tmp_path / f"rows.jsonl{suffix}").write_bytes(packed)
        assert [row.values for row in read_rows(DataSource(path=str(tmp_path / f"rows.jsonl{suffix}")))] == ROWS


def test_a_small_file_that_unpacks_to_a_row_without_end_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "LONGEST_ROW", 4096)
    monkeypatch.setattr(text_rows, "LONGEST_LIST", 8192)
    long = "a" * 2**24
    for name, text, said in (
        ("rows.jsonl.gz", f'{{"prompt": "b"}}\n{{"prompt": "{long}"}}', "rows.jsonl.gz:2: a row of more than 4,096"),
        ("rows.csv.gz", f"prompt\n{long}\n", "rows.csv.gz:2: a row of more than 4,096"),
        ("rows.tsv.gz", 'prompt\n"' + "a\n" * 2**20, "field larger than field limit"),
        ("rows.json.gz", "[\n" + '{"prompt": "b"},\n' * 2**16 + "{}]", "write a row on each line"),
    ):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        with pytest.raises(ValueError, match=said):
            list(read_rows(DataSource(path=str(tmp_path / name))))


def test_a_script_that_comes_with_a_data_set_is_not_run(tmp_path: Path) -> None:
    (folder := tmp_path / "rows").mkdir()
    as_lines(folder)
    (folder / "rows.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w')\n")
    with pytest.raises(ValueError, match=r"rows\.py is a script, which is never run"):
        list(read_rows(DataSource(path=str(folder))))
    assert not (tmp_path / "made").exists()
