"""Problems of local data sets: every file layout, each problem once, and one clear error for unreadable data."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optional import needs

from megatron_rl.agent.datasets import DataSet, Question, distinct, read_questions
from megatron_rl.agent.environments.python import PythonRows

pytestmark = needs("datasets")

ROWS = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(3)]
QUESTIONS = [Question(row["problem"], row["answer"]) for row in ROWS]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of `datasets` and of the hub's client, private to a test."""
    home = tmp_path / "huggingface"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", home / "datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    return home


def table(rows: list[dict[str, Any]] = ROWS) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def save_splits(folder: Path, **splits: Any) -> Path:
    from datasets import DatasetDict

    DatasetDict(splits).save_to_disk(folder / "saved")
    return folder / "saved"


def as_jsonl(folder: Path) -> Path:
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder / "data.jsonl"


def as_parquet(folder: Path) -> Path:
    table().to_parquet(folder / "data.parquet")
    return folder / "data.parquet"


def as_folder_of_parquet(folder: Path) -> Path:
    (folder / "data").mkdir()
    table().to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    return folder


def as_saved(folder: Path) -> Path:
    table().save_to_disk(folder / "saved")
    return folder / "saved"


def as_saved_with_splits(folder: Path) -> Path:
    return save_splits(folder, train=table(), test=table(ROWS[:1]))


def in_the_hubs_cache(folder: Path) -> str:
    """Data set in the layout of `mrl prefetch`."""
    snapshot = folder / "huggingface" / "hub" / "datasets--owner--sums" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    as_folder_of_parquet(snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    return "owner/sums"


@pytest.mark.parametrize("place", [as_jsonl, as_parquet, as_folder_of_parquet, as_saved, in_the_hubs_cache])
def test_reading_writes_nothing(tmp_path: Path, own_cache: Path, place: Callable[[Path], Path | str]) -> None:
    """Hundreds of ranks read concurrently: each would lock a cache on the shared file system."""
    source = DataSet(path=str(place(tmp_path)))
    shutil.rmtree(own_cache / "datasets", ignore_errors=True)  # making the data may have used it
    assert list(read_questions(source)) == QUESTIONS
    assert not [path for path in (own_cache / "datasets").rglob("*") if path.is_file()]


def test_named_split_is_read(tmp_path: Path) -> None:
    source = DataSet(path=str(as_saved_with_splits(tmp_path)), split="test")
    assert list(read_questions(source)) == QUESTIONS[:1]


def test_nested_columns_are_read_and_instructions_removed(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Solve it.\nStep by step.\n\n{question.text}\n\nSay {{42}}."}],
            "reward_model": {"ground_truth": question.answer},
        }
        for question in QUESTIONS
    ]
    table(rows).to_parquet(tmp_path / "nested.parquet")
    source = DataSet(
        path=str(tmp_path / "nested.parquet"),
        question="prompt.0.content",
        answer="reward_model.ground_truth",
        remove=["Solve it. Step by step.", "Say {42}."],
    )
    assert list(read_questions(source)) == QUESTIONS


ODD = ["2024-01-02", "1180591620717411303424", "1.50", "2\\%", "007", "true", "NA", "1e400", "None", ""]


def as_lines(folder: Path) -> Path:
    """Strings and one number, in a column that starts with a date."""
    lines = [json.dumps({"problem": f"p{place}", "answer": text}) for place, text in enumerate(ODD)]
    lines[1:3] = ['{"problem": "p1", "answer": 1180591620717411303424}', '{"problem": "p2", "answer": 1.50}']
    lines[5] = '{"problem": "p5", "answer": true}'
    lines[7] = '{"problem": "p7", "answer": 1e400}'
    (folder / "data.jsonl").write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    return folder / "data.jsonl"


def as_a_list(folder: Path) -> Path:
    rows = ",\n".join(as_lines(folder).read_text(encoding="utf-8-sig").split("\n\n"))
    (folder / "data.json").write_text(f"[{rows}]")
    return folder / "data.json"


def as_a_folder_of_compressed_lines(folder: Path) -> Path:
    text = as_lines(folder).read_bytes()
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl.gz").write_bytes(gzip.compress(text))
    return folder / "data"


def as_lines_in_an_odd_folder(folder: Path) -> Path:
    (folder / "from.csv::x").mkdir()
    return as_lines(folder).rename(folder / "from.csv::x" / "data.jsonl")


def as_a_table(folder: Path) -> Path:
    (folder / "data.csv").write_text("problem,answer\n" + "".join(f"p{n},{text}\n" for n, text in enumerate(ODD)))
    return folder / "data.csv"


def as_a_folder_with_a_table(folder: Path) -> Path:
    (folder / "data").mkdir()
    as_a_table(folder).rename(folder / "data" / "train.csv")
    return folder / "data"


@pytest.mark.parametrize(
    "place",
    [
        as_lines,
        as_lines_in_an_odd_folder,
        as_a_list,
        as_a_folder_of_compressed_lines,
        as_a_table,
        as_a_folder_with_a_table,
    ],
)
def test_answers_of_text_files_keep_their_spelling(tmp_path: Path, place: Callable[[Path], Path]) -> None:
    """`datasets` infers a type for each column: dates, rounded integers, quotes around every text."""
    found = [question.answer for question in read_questions(DataSet(path=str(place(tmp_path))))]
    assert found == ODD[:-1]  # an empty text is not an answer


def test_row_with_too_short_list_has_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"problem": "a", "answers": ["1", "2"]},
        {"problem": "b", "answers": ["3"]},
        {"problem": "c", "answers": None},
    ]
    file = tmp_path / "data.parquet"
    table(rows).to_parquet(file)
    assert list(read_questions(DataSet(path=str(file), answer="answers.1"))) == [Question("a", "2")]
    (said,) = caplog.messages
    assert "2 of 3 rows are skipped" in said
    with pytest.raises(ValueError, match=r"a list or an object; name the text inside it, for example .*answers\.0"):
        list(read_questions(DataSet(path=str(file), answer="answers")))


def test_a_list_of_messages_is_not_the_text_of_a_question(tmp_path: Path) -> None:
    class Structured(DataSet):
        structured = True

    talk = {"problem": [{"role": "user", "content": "a"}], "answer": ["1"]}
    (tmp_path / "data.jsonl").write_text(json.dumps(talk) + "\n")
    with pytest.raises(ValueError, match=r"data.jsonl:1: the question .*for example question: problem.0.content"):
        list(read_questions(Structured(path=str(tmp_path / "data.jsonl"))))
    found = Structured(path=str(tmp_path / "data.jsonl"), question="problem.0.content")
    assert list(read_questions(found)) == [Question("a", '["1"]')]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"problem": "a", "answer": "1"}\n{"problem": ', r"data.jsonl:2: not valid JSON: "),
        ('{"problem": "a", "answer": "1"}\n7\n', r"data.jsonl:2: expected an object"),
        ('{"problem": "a"}\n', r"there is no column 'answer', only problem"),
        ("\n", r"it has no rows"),
        ("[" * 100_000, r"data.jsonl: not valid JSON: "),
    ],
)
def test_error_locates_the_bad_line_of_json(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said):
        list(read_questions(DataSet(path=str(tmp_path / "data.jsonl"))))


def test_repeated_problems_appear_once_in_the_order_of_the_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DAPO-Math-17k repeats each problem about a hundred times."""
    spaced = [{"problem": row["problem"].replace(" ", "  "), "answer": row["answer"]} for row in ROWS]
    table((ROWS[::-1] + spaced) * 40).to_parquet(tmp_path / "data.parquet")
    assert distinct(read_questions(DataSet(path=str(tmp_path / "data.parquet")))) == QUESTIONS[::-1]
    assert not caplog.records


def test_rows_with_an_earlier_question_and_other_values_are_named_by_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt that is the same in every row would otherwise leave one problem without a word."""
    lines = [json.dumps({"prompt": "Solve it.", "task": f"{n} + {n}", "answer": str(2 * n)}) for n in (1, 1, 2, 3)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    assert len(distinct(read_questions(PythonRows(path=str(tmp_path / "data.jsonl"))))) == 1
    assert caplog.messages == [
        "rows left out because they have the question of an earlier row, with other values (task, answer): 2; "
        "questions that remain: 1"
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"path": "./nowhere"}, r"data set ./nowhere: no such file or directory"),
        ({"path": "owner/never-fetched"}, r"not on this machine; `mrl prefetch RECIPE` fetches it"),
        ({"path": "data/train.parquet/more"}, r"neither a name on the hub nor a path that begins with /, . or ~"),
        ({"question": "text"}, r"there is no column 'text', only problem, answer"),
        ({"split": "test", "path": "SAVED"}, r"there is no split 'test', only train"),
        ({"path": "TEXT"}, r"unknown file type: supported are .parquet, .arrow, .jsonl, .json, .csv, .tsv"),
        ({"path": "BROKEN"}, r"data set .*broken.parquet: "),
    ],
)
def test_unreadable_data_is_one_clear_error(tmp_path: Path, fields: dict[str, str], said: str) -> None:
    (tmp_path / "data.txt").write_text("a")
    (tmp_path / "broken.parquet").write_text("not parquet")
    save_splits(tmp_path, train=table())
    places = {"SAVED": "saved", "TEXT": "data.txt", "BROKEN": "broken.parquet"}
    values = {"path": str(as_parquet(tmp_path)), **fields}
    if values["path"] in places:
        values["path"] = str(tmp_path / places[values["path"]])
    with pytest.raises(ValueError, match=said):
        list(read_questions(DataSet(**values)))  # type: ignore[arg-type]


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        table(ROWS if number == 1 else ROWS[:1]).to_parquet(folder / f"train-{number:05}-of-00003-{number}f.parquet")
    source = DataSet(path=str(folder))
    assert len(list(read_questions(source))) == len(list(read_questions(DataSet(path=str(as_jsonl(tmp_path))))))
    (folder / "train-00000-of-00003-0f.parquet").unlink()
    with pytest.raises(ValueError, match="train-00000-of-00003 is missing: copy the data set again"):
        list(read_questions(source))


def test_answer_at_the_end_of_a_worked_solution_is_found(tmp_path: Path) -> None:
    rows = [
        {"problem": "a", "answer": "#### 1\nno\n#### 42"},
        {"problem": "b", "answer": r"It is \boxed{\frac{1}{2}}."},
        {"problem": "c", "answer": "no idea"},
    ]
    table(rows).to_parquet(tmp_path / "data.parquet")
    source = DataSet(path=str(tmp_path / "data.parquet"))
    marked = source.model_copy(update={"answer_after": "####"})
    assert list(read_questions(marked)) == [Question("a", "42")]
    boxed = source.model_copy(update={"answer_boxed": True})
    assert list(read_questions(boxed)) == [Question("b", r"\frac{1}{2}")]
