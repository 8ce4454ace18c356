"""mrl logs shows the end of one log and what is added to it, across attempts."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from launcher.runs.logs import LogFollower, log_files, missing, start_of_last
from megatron_rl.contract.paths import RunDir


def write(run: RunDir, attempt: int, rank: int, text: str, role: str = "train") -> None:
    run.attempt(attempt).folder.mkdir(parents=True, exist_ok=True)
    run.attempt(attempt).logs.mkdir(parents=True, exist_ok=True)
    with run.attempt(attempt).log(rank, role).open("a") as file:
        file.write(text)


def read(log: LogFollower) -> list[str]:
    return [line.line for line in log.poll()]


def test_the_last_lines_and_then_new_ones(tmp_path):
    run = RunDir(tmp_path)
    write(run, 1, 0, "a\nb\nc\n")
    log = LogFollower(run, None, 0, None, lines=2)
    assert read(log) == ["b", "c"]
    write(run, 1, 0, "d\nhalf")
    assert read(log) == ["d"]
    write(run, 1, 0, " a line\n")
    assert read(log) == ["half a line"]


def test_it_continues_with_the_next_attempt_without_missing_a_line(tmp_path):
    run = RunDir(tmp_path)
    write(run, 1, 0, "a\n")
    log = LogFollower(run, None, 0, None, lines=10)
    assert read(log) == ["a"]
    write(run, 1, 0, "b\n")
    write(run, 2, 0, "c\nd\n")
    assert [(line.attempt, line.line) for line in log.poll()] == [(1, "b"), (2, "c"), (2, "d")]


def test_one_attempt_only_on_request(tmp_path):
    run = RunDir(tmp_path)
    write(run, 1, 0, "a\n")
    write(run, 2, 0, "b\n")
    assert read(LogFollower(run, None, 0, 1, lines=10)) == ["a"]


def test_the_batch_log_is_shown_until_there_are_ranks(tmp_path):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.batch_log.write_text("importing the image\n")
    log = LogFollower(run, None, 0, None, lines=10)
    (line,) = log.poll()
    assert (line.attempt, line.role, line.line) == (0, "batch", "importing the image")
    write(run, 1, 0, "rank 0 is here\n")
    assert read(log) == ["rank 0 is here"]
    assert read(LogFollower(run, "batch", 0, None, lines=10)) == ["importing the image"]
    assert read(LogFollower(run, None, 3, None, lines=10)) == [], "no other rank stands in for the one asked for"


def test_another_role(tmp_path):
    run = RunDir(tmp_path)
    write(run, 1, 0, "a\n")
    write(run, 1, 2, "b\n", role="infer-0")
    assert read(LogFollower(run, "infer-0", 2, None, lines=10)) == ["b"]
    assert [path.name for path in log_files(run, None)] == ["infer-0.2.log", "train.0.log"]


def test_the_list_has_the_stacks_that_a_hang_left(tmp_path):
    run = RunDir(tmp_path)
    assert log_files(run, None) == []
    write(run, 1, 0, "")
    run.attempt(1).stacks(0).write_text("Thread 0x7f: in all_reduce\n")
    run.attempt(1).stacks(1).touch()  # of a rank that nobody asked
    assert [path.name for path in log_files(run, 1)] == ["train.0.log", "train.0.stacks"]
    assert missing(run, "train", 1, 1) == "train has no rank 1; its ranks: 0"


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\n"), max_size=30)), st.integers(0, 8))
def test_the_offset_of_the_last_lines(tmp_path_factory, lines, wanted):
    path: Path = tmp_path_factory.mktemp("log") / "log"
    path.write_text("".join(f"{line}\n" for line in lines))
    text = path.read_bytes()[start_of_last(path, wanted) :].decode()
    assert text == "".join(f"{line}\n" for line in (lines[-wanted:] if wanted else []))
