"""The file of answers: appended, read again, and refused if it belongs to something else."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from fault_injection import Clock

from megatron_rl.contract.evaluation_records import SAMPLED, ProblemAnswers, ScoredAnswer
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.run.evaluate.answer_file import kept_answers

SETTINGS = {"k": 2, "sampling": {"temperature": 0.6, "top_p": 1.0}, "seed": 0}


def line(problem: int) -> ProblemAnswers:
    answer = ScoredAnswer(0.1 + 0.2, 3, "stop", "a\nb \ud800 ü", None)
    return ProblemAnswers("held_out", SAMPLED, problem, [answer], {"lost": 1})


def test_answers_are_read_back_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.jsonl"
    with kept_answers(file, SETTINGS) as answers:
        answers.add([line(0), line(1)])
    with kept_answers(file, SETTINGS) as answers:
        assert answers.known == {("held_out", SAMPLED, problem): line(problem) for problem in (0, 1)}
        answers.add([line(2)])
    with kept_answers(file, SETTINGS) as answers:
        assert len(answers.known) == 3


@pytest.mark.parametrize("cut", [1, 40, 10_000])
def test_torn_end_is_tolerated_anywhere(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "a.jsonl"
    with kept_answers(file, SETTINGS) as answers:
        answers.add([line(0)])
    whole = file.read_bytes()
    file.write_bytes(whole[: max(10, len(whole) - cut)])
    with kept_answers(file, SETTINGS) as answers:
        before = dict(answers.known)
        answers.add([line(7)])
    with kept_answers(file, SETTINGS) as answers:
        assert answers.known == {**before, ("held_out", SAMPLED, 7): line(7)}


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with kept_answers(file, SETTINGS):
        pass
    before = file.read_bytes()
    other = {"k": 2, "sampling": {"temperature": 1.0, "top_p": 1.0}, "seed": 1}
    said = r"sampling\.temperature was 0\.6 and is 1\.0; seed was 0 and is 1\."
    with pytest.raises(ConfigurationError, match=said), kept_answers(file, other):
        pass
    assert file.read_bytes() == before


def test_other_file_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text("my\nnotes\n")
    with pytest.raises(ConfigurationError, match="is not a file of an evaluation"), kept_answers(file, SETTINGS):
        pass
    assert file.read_text() == "my\nnotes\n"


def test_two_evaluations_never_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with kept_answers(file, SETTINGS), pytest.raises(ConfigurationError, match="in use"), kept_answers(file, SETTINGS):
        pass


def test_full_disk_is_reported_with_the_file_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "a.jsonl"
    with kept_answers(file, SETTINGS) as answers:
        answers.add([line(0)])
        before = file.read_bytes()
        with monkeypatch.context() as patched, pytest.raises(OSError, match=str(file)):
            Clock(patched)
            patched.setattr("megatron_rl.contract.files.os.fsync", full)
            answers.add([line(1)])
        assert file.read_bytes() == before
        answers.add([line(1)])
