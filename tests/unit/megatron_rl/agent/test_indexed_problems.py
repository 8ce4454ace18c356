"""A large file of JSON lines gives the same problems as in memory, read when they are asked for."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from words import Words

from megatron_rl.agent import datasets, indexed_problems, row_index
from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.data_rows import first_rows
from megatron_rl.agent.environments.program.program_environment import ProgramEnvironment
from megatron_rl.agent.hf_dataset import HFDatasetAgent
from megatron_rl.agent.indexed_problems import DataChanged, IndexedProblems, digest_of
from megatron_rl.agent.problem_digest import ProblemDigest
from megatron_rl.agent.row_index import once
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.learn.supervised import example_rows
from megatron_rl.learn.supervised.example_rows import read_data
from megatron_rl.recipe.data import DataConfig
from megatron_rl.run.problems import without_long_prompts


class Echo(HFDatasetAgent):
    def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        return 0.0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(indexed_problems, "LARGE", 0)
    return tmp_path / "cache" / "rows"


def build(path: Path, **arguments: Any) -> Echo:
    return Echo(Echo.Config.model_validate({"train": {"path": str(path)}, **arguments}), Words())


def in_memory(path: Path, **arguments: Any) -> Echo:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_problems, "LARGE", 2**60)
        return build(path, **arguments)


def rows(folder: Path, *texts: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"problem": text, "answer": text.upper()}) + "\n" for text in texts))
    return path


def without_reading_all(patch: pytest.MonkeyPatch) -> None:
    for module in (datasets, example_rows):
        patch.setattr(module, "read_rows", lambda *_: pytest.fail("all rows are read again"))


# The same problems

TEXTS = st.text(st.sampled_from(list("ab é\u2028😀\t")), min_size=0, max_size=6)
LINES = st.one_of(
    st.builds(
        lambda values, ascii: json.dumps(values, ensure_ascii=ascii),
        st.fixed_dictionaries({"problem": TEXTS, "answer": st.none() | TEXTS | st.just(1.50)}),
        st.booleans(),
    ),
    st.sampled_from(["", "  ", '{"problem": "long ' + "x" * 9000 + '", "answer": 1.50}']),
)
FIRST = '{"problem": "first", "answer": "1"}'


@examples(25)
@given(
    st.lists(LINES, max_size=12),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([None, 9]),
)
def test_an_index_gives_the_problems_that_are_kept_in_memory(
    lines: list[str], end: str, bom: bool, held_out: float, longest: int | None
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_CACHE", folder)
        path = Path(folder) / "rows.jsonl"
        path.write_text("\ufeff" * bom + end.join([FIRST, *lines]), encoding="utf-8", newline="")
        arguments = {"held_out": held_out, "max_prompt_tokens": longest}
        try:
            expected = in_memory(path, **arguments)
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                build(path, **arguments)
            return
        written = build(path, **arguments)
        without_reading_all(patch)
        for agent in (written, build(path, **arguments)):
            assert isinstance(agent.training_problems(), IndexedProblems)
            assert [*agent.training_problems()] == expected.training_problems()
            assert {name: [*its] for name, its in agent.evaluation_problems().items()} == expected.evaluation_problems()
            assert digest_of(agent.training_problems()) == ProblemDigest.of(expected.training_problems())
            assert agent.training_problems()[-1:] == expected.training_problems()[-1:]


def test_what_was_logged_when_the_rows_were_chosen_is_logged_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows(tmp_path, "a", "b")
    path.write_text(path.read_text() + '{"problem": "a", "answer": "other"}\n{"problem": "c"}\n')
    build(path)
    said = [*caplog.messages]
    assert len(said) == 2 and "1 of 4 rows are skipped" in said[0] and "with other values (answer): 1" in said[1]
    caplog.clear()
    without_reading_all(monkeypatch)
    build(path)
    assert caplog.messages == said


def test_problems_whose_prompt_is_too_long_are_left_out_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rows(tmp_path, "a", "b" * 30, "c" * 5, "d" * 31)

    def fitting(agent: Echo, tokens: int, encode: Any = list) -> Sequence[Problem]:
        return without_long_prompts(TrainingSet("", 1.0, agent.training_problems()), tokens, encode).problems

    expected = fitting(in_memory(path), 30)
    agent = build(path)
    assert fitting(agent, 99) is agent.training_problems()
    assert [*fitting(agent, 30)] == expected and len(expected) == 3
    again = fitting(build(path), 30, lambda text: pytest.fail("tokenised again"))
    assert isinstance(again, IndexedProblems) and [*again] == expected
    assert again.digest == ProblemDigest.of(expected)
    assert again.of("sums")[2] == Problem("c" * 5, {"answer": "C" * 5}, "sums")


def test_a_program_gets_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "a", "n": 1.50}\n{"prompt": "b", "more": [1, null]}\n{"prompt": "a"}\n{"prompt": "c"}\n'
    )
    arguments = {"command": ["true"], "problems": str(path), "held_out": 0.4}
    config = ProgramEnvironment.Config.model_validate(arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_problems, "LARGE", 2**60)
        expected = ProgramEnvironment(config, Words())
    ProgramEnvironment(config, Words())
    without_reading_all(monkeypatch)
    agent = ProgramEnvironment(config, Words())
    assert [*agent.training_problems()] == expected.training_problems()
    assert [*agent.evaluation_problems()["held_out"]] == expected.evaluation_problems()["held_out"]
    assert isinstance(agent.training_problems(), IndexedProblems)


def test_rows_of_supervised_training_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    odd = {"messages": [{"role": "nobody", "content": "x"}]}
    good = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "b"}]} for n in range(40)
    ]
    late = {**good[0], "system": "Be brief.", "source": "web"}
    path.write_text("\n".join(map(json.dumps, [*good, odd, late, {"messages": None}])))
    data = DataConfig(path=str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_problems, "LARGE", 2**60)
        expected = read_data(data)
    read_data(data)
    monkeypatch.setattr(example_rows, "_choose", lambda *_: pytest.fail("all rows are read again"))
    found = read_data(data)
    assert isinstance(found.rows, IndexedProblems) and [*found.rows] == expected.rows
    assert (found.form, found.dropped, found.lacking) == (expected.form, expected.dropped, 1)
    assert found.rows[-1].golden["messages"][0] == {"role": "system", "content": "Be brief."}
    assert found.unread == expected.unread == ["source"]


def test_other_forms_stay_in_memory(tmp_path: Path) -> None:
    lines = rows(tmp_path, "a", "b").read_text()
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "rows.csv").write_text("problem,answer\na,A\nb,B\n")
    (tmp_path / "list.json").write_text(f"\n [{','.join(lines.splitlines())}]")
    for name in ("rows.jsonl.gz", "rows.csv", "list.json"):
        assert isinstance(build(tmp_path / name).training_problems(), list), name
    with first_rows(1):
        assert [one.prompt for one in build(tmp_path / "rows.jsonl").training_problems()] == ["a"]


# Files that change


def test_a_changed_file_is_read_again_at_the_next_start(tmp_path: Path) -> None:
    path = rows(tmp_path, "a", "b")
    build(path)
    rows(tmp_path, "c", "d")
    os.utime(path, ns=(1, 1))
    assert [one.prompt for one in build(path).training_problems()] == ["c", "d"]


@pytest.mark.parametrize("texts", ["axc", "", "a", ("a", "bb")])
def test_a_file_that_changes_during_a_run_is_an_error_with_the_line(tmp_path: Path, texts: Sequence[str]) -> None:
    problems = build(rows(tmp_path, "a", "b")).training_problems()
    rows(tmp_path, *texts)
    with pytest.raises(DataChanged, match=r"rows.jsonl:2: the row has changed since the run read it: "):
        _ = problems[1]


def test_another_right_answer_to_the_same_prompt_is_a_change_too(tmp_path: Path) -> None:
    path = rows(tmp_path, "a", "b")
    problems = build(path).training_problems()
    path.write_text(path.read_text().replace("B", "X"))
    with pytest.raises(DataChanged, match=r"rows.jsonl:2: .* another prompt or answer"):
        _ = problems[1]


def test_a_bad_row_is_the_same_error_and_leaves_no_index(tmp_path: Path, cache: Path) -> None:
    path = rows(tmp_path, *"ab")
    path.write_text(path.read_text() + "7\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"data set .*rows.jsonl:3: expected an object"):
            build(path)
    assert not [*cache.glob("*.rows")]


# The cache


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"not an index"])
def test_a_damaged_index_is_written_again(
    tmp_path: Path, cache: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = rows(tmp_path, *"abc")
    build(path)
    (index,) = cache.glob("*.rows")
    whole = index.read_bytes()
    for content in (damage, whole[:-1], whole + b"x"):
        index.write_bytes(content)
        caplog.clear()
        assert [one.prompt for one in build(path).training_problems()] == [*"abc"]
        assert "cannot be read" in caplog.messages[0]
        assert index.read_bytes() == whole


def test_an_index_of_prompts_that_are_written_otherwise_now_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = rows(tmp_path, *"abc")
    build(path)
    monkeypatch.setattr(Echo, "_prompt", lambda self, question, template: f"new {question.text}")
    assert build(path).training_problems()[0].prompt == "new a"
    assert "cannot be used" in caplog.messages[0]


def test_problems_stay_in_memory_where_no_index_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = rows(tmp_path, *"abc")

    def full(path: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert isinstance(build(path).training_problems(), list)
    assert "kept in memory, because its index" in caplog.messages[-1] and "No space left" in caplog.messages[-1]
    with monkeypatch.context() as patch:
        patch.setattr(indexed_problems, "no_room", lambda *_: "0 MiB are free")
        assert isinstance(build(path).training_problems(), list)
    assert "kept in the memory of every rank" in caplog.messages[-1]
    (tmp_path / "file").touch()
    monkeypatch.setenv("MRL_CACHE", str(tmp_path / "file"))
    assert isinstance(build(path).training_problems(), list)


def test_one_builds_and_the_others_wait_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, built, caught = tmp_path / "x", [], []
    caplog.set_level(logging.INFO)

    def load() -> str | None:
        return path.read_text() if path.exists() else None

    def build_slowly() -> str:
        built.append(1)
        while not any("waiting at most 60 s" in said for said in caplog.messages):
            time.sleep(0.01)
        path.write_text("whole")
        return "whole"

    threads = [threading.Thread(target=lambda: caught.append(once(path, 60, load, build_slowly))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert caught == ["whole"] * 4 and built == [1]


def test_who_waits_too_long_builds_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with row_index._turn(tmp_path / "x"):
        assert once(tmp_path / "x", 0, lambda: None, lambda: "mine") == "mine"
    assert "was not written by another process within 0 s" in caplog.text
