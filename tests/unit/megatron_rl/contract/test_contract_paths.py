"""File names: our files are found, sorted, and foreign files beside them are ignored."""

from __future__ import annotations

from megatron_rl.contract import codes
from megatron_rl.contract.paths import RunDir


def test_published_checkpoints_are_listed_newest_first(tmp_path):
    run = RunDir(tmp_path)
    strangers = ("step-000050.x1.tmp", "step-000060.old", "step-5", "step-00006\u0966", "latest", "step-")
    for name in (run.checkpoint(40).name, run.checkpoint(1_000_040).name, run.checkpoint(9).name, *strangers):
        (run.checkpoints / name).mkdir(parents=True)
    assert run.checkpoint_steps() == [1_000_040, 40, 9]


def test_last_attempt_is_the_highest_number(tmp_path):
    run = RunDir(tmp_path)
    for number in (9, 1000, 10):
        run.attempt(number).folder.mkdir(parents=True)
    (tmp_path / "attempts" / "later").mkdir()
    assert run.last_attempt() == 1000


def test_error_files_are_listed_by_rank_without_foreign_files(tmp_path):
    attempt = RunDir(tmp_path).attempt(3)
    attempt.folder.mkdir(parents=True)
    for name in ("error.10.json", "error.9.json", "error.x.json", ".error.1.json.ab.tmp", "error.json"):
        (attempt.folder / name).touch()
    assert attempt.errors() == [attempt.error(9), attempt.error(10)]


def test_ranks_finish_before_the_host_side_kills_them():
    assert codes.MARGIN_S > codes.LAST_MOMENT_S
    assert codes.STACKS_S > codes.STACKS_LIMIT_S
    assert codes.KILLED_TOO_S < codes.LAST_MOMENT_S


def test_replicas_are_listed_by_number_with_their_own_files_and_the_attempts_drain(tmp_path):
    attempt = RunDir(tmp_path).attempt(3)
    for name in ("10", "9", "x"):
        (attempt.folder / "replicas" / name).mkdir(parents=True)
    nine, ten = attempt.replicas()
    assert (nine.number, ten.number) == (9, 10)
    assert nine.drain == attempt.drain
    assert nine.log(1) == attempt.log(1, role="infer-9")
    assert nine.outcome != attempt.outcome
