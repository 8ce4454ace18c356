"""The files of a run stay readable whatever cuts their writers short, and however many nodes write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.host.attempt.conclude import conclude_lost
from launcher.host.record import ledger
from megatron_rl import run_dir
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import append_json_line, read_json_lines

LINES = st.lists(st.dictionaries(st.text(), st.integers() | st.text()), max_size=4)


@given(before=LINES, after=LINES, cut=st.integers(min_value=1))
def test_a_torn_line_costs_itself_and_nothing_else(tmp_path_factory, before, after, cut):
    path = tmp_path_factory.mktemp("run") / "lines.jsonl"
    for line in [*before, {"torn": "line"}]:
        append_json_line(path, line)
    torn = len('{"torn": "line"}\n')
    with path.open("ab") as file:
        file.truncate(file.tell() - torn + 1 + cut % (torn - 2))  # from its first byte alone to all but its brace
    assert read_json_lines(path) == before
    for line in after:
        append_json_line(path, line)
    assert read_json_lines(path) == [*before, *after]


def test_a_line_that_only_lacks_its_end_counts_before_and_after_the_next_one(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"n": 1}')
    assert read_json_lines(path) == [{"n": 1}]
    append_json_line(path, {"n": 2})
    assert path.read_text() == '{"n": 1}\n{"n": 2}\n'


@pytest.mark.parametrize("hurt", [b'{"n": 2, "gl{"n": 3}', b"\0" * 40, b'{"n": "\xff'])
def test_what_is_hurt_in_the_middle_is_passed_over(tmp_path, hurt):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n' + hurt + b'\n{"n": 4}\n')
    assert [line["n"] for line in read_json_lines(path)] == [1, 4]


def test_a_ledger_torn_by_a_dead_node_ends_no_run(tmp_path):
    run = RunDir(tmp_path)
    ledger.write_line(run, AttemptStart(1, 10.0))
    with run.attempts_ledger.open("a") as file:
        file.write('{"attempt": 1, "event": "e')
    conclude_lost(run, 20.0, unseen="its supervisor was killed")
    ledger.write_line(run, AttemptStart(2, 30.0))
    lines = ledger.read_ledger(run)
    assert [(line.attempt, type(line)) for line in lines] == [(1, AttemptStart), (1, AttemptEnd), (2, AttemptStart)]


def test_two_nodes_with_the_same_process_id_may_write_one_file_at_once(tmp_path, monkeypatch):
    path = tmp_path / "job.json"

    def meanwhile_elsewhere(descriptor: int) -> None:
        monkeypatch.setattr(run_dir.os, "fsync", os_fsync)
        write_atomic(path, "theirs")
        assert path.read_text() == "theirs"

    os_fsync = os.fsync
    monkeypatch.setattr(run_dir.os, "fsync", meanwhile_elsewhere)
    write_atomic(path, "ours")
    assert path.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "job.json"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_dir.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert (path.read_text(), list(Path(tmp_path).iterdir())) == ("old", [path])
