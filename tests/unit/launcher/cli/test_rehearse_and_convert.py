"""mrl rehearse and mrl convert, whose work a child does: their output, and how they end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from unittest import mock

import pytest
from click import BadParameter
from click.testing import CliRunner, Result

from launcher.backends import rehearsal
from launcher.backends.rehearsal import RehearsalFailure, RehearsedRank
from launcher.cli import rehearse
from launcher.cli.convert import Size, command
from launcher.plan.placement import RankKind
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.teacher_files import TeacherFiles

GIB = 2**30
RECIPE = "qwen2.5-32b-dapo"
pytestmark = pytest.mark.usefixtures("no_clusters_of_the_user")


def mrl_rehearse(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(rehearse.command, list(arguments))


def done(monkeypatch: pytest.MonkeyPatch, gib: float, failure: RehearsalFailure | None = None) -> None:
    """Make the rehearsal return ranks with this peak."""

    def ranks(
        config: RunConfig, vocab: int, kinds: Sequence[RankKind], teacher: TeacherFiles | None
    ) -> list[RehearsedRank]:
        held = {"weights": 7 * GIB, "activations": int((gib - 7) * GIB)}
        return [RehearsedRank(kind, 4_000_000_000, {"train": held}, failure) for kind in kinds]

    monkeypatch.setattr(rehearse, "rehearse", ranks)


def test_it_fits_together_with_the_cuda_context_or_exits_with_1(monkeypatch):
    done(monkeypatch, 76.9)
    assert mrl_rehearse(RECIPE, "--cluster", "h100").exit_code == 0
    done(monkeypatch, 77.1)
    result = mrl_rehearse(RECIPE, "--cluster", "h100", "--json")
    assert (result.exit_code, json.loads(result.output)["fits"]) == (1, False)


def test_the_table_shows_the_holders_of_the_peak_and_the_error_of_the_plan(monkeypatch):
    done(monkeypatch, 70.0)
    result = mrl_rehearse(RECIPE, "--cluster", "h100")
    assert "a colocated rank, stage 0: 4,000,000,000 parameters" in result.output
    assert "train 70 GiB activations 63 GiB, weights 7 GiB" in " ".join(result.output.split())
    assert "of 80 GiB" in result.output
    assert "planned" in result.output


def test_an_engine_that_cannot_be_rehearsed_is_refused_with_a_remedy(monkeypatch):
    done(monkeypatch, 70.0)
    result = mrl_rehearse(RECIPE, "--cluster", "h100", "inference.engine=megatron")
    assert result.exit_code == 2
    assert "inference.engine megatron cannot be rehearsed" in result.output
    assert "inference.engine=native" in result.output


def test_beside_replicas_of_vllm_the_training_ranks_are_rehearsed(monkeypatch):
    done(monkeypatch, 70.0)
    result = mrl_rehearse(f"{RECIPE}-partitioned", "--cluster", "h100")
    assert result.exit_code == 0
    assert "note: vllm divides the memory of its processes itself" in result.output
    ranks = json.loads(mrl_rehearse(f"{RECIPE}-partitioned", "--json").stdout)["ranks"]
    assert [rank["role"] for rank in ranks] == ["training"]


def test_every_stage_and_role_is_listed(monkeypatch):
    done(monkeypatch, 70.0)
    two_stages = ("placement.training.tp=4", "placement.training.pp=2", "placement.inference.tp=4")
    asked = (f"{RECIPE}-partitioned", "inference.engine=native", *two_stages)
    ranks = json.loads(mrl_rehearse(*asked, "--json").output)["ranks"]
    assert [(rank["role"], rank["stage"]) for rank in ranks] == [("training", 0), ("training", 1), ("inference", None)]


def test_a_failure_is_named_with_its_phase_and_place(monkeypatch):
    failure = RehearsalFailure("train", "RuntimeError: mat1 and mat2", "megatron_rl/model/layers.py:7 in forward")
    done(monkeypatch, 70.0, failure)
    result = mrl_rehearse(RECIPE)
    assert result.exit_code == 1
    assert "fails in train: RuntimeError: mat1 and mat2" in result.output
    assert "at megatron_rl/model/layers.py:7 in forward" in result.output
    (rank,) = json.loads(mrl_rehearse(RECIPE, "--json").output)["ranks"]
    assert rank["failure"] == {"phase": "train", "error": failure.error, "where": failure.where}


def test_an_impossible_layout_is_refused_before_anything_is_built(monkeypatch):
    monkeypatch.delattr(rehearse, "rehearse")
    result = mrl_rehearse(RECIPE, "placement.training.tp=3")
    assert (result.exit_code, "does not divide" in result.output) == (2, True)


def ended(code: int, said: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.CompletedProcess([], code, b"", said.encode())


@pytest.mark.parametrize(
    ("child", "error"),
    [
        (ended(1, "Traceback\nMemoryError\n"), "MemoryError"),
        (ended(-9, ""), "exit code -9"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
        (subprocess.TimeoutExpired("", 1), "did not end within"),
    ],
)
def test_a_rank_that_ends_without_an_answer_fails_at_its_start(monkeypatch, child, error):
    monkeypatch.setattr(rehearsal, "run_limited", mock.Mock(side_effect=[child] * 9))
    result = mrl_rehearse(RECIPE)
    assert result.exit_code == 1
    assert "fails in start: " in result.output and error in result.output


@pytest.mark.parametrize("text", ["infGB", "nanGB", "1e400TB", "-1GB", "0GB", "GB", "5", ""])
def test_sizes_need_a_number_and_a_unit(text: str) -> None:
    with pytest.raises(BadParameter, match="is not a size such as 5GB"):
        Size().convert(text, None, None)
    assert Size().convert("0.1 kb", None, None) == 100


def test_an_unreadable_source_is_one_error() -> None:
    done = CliRunner().invoke(command, ["megatron-to-hf", "--", "-x", "y"])
    assert (done.exit_code, done.stderr.startswith("error: ")) == (2, True), done.output
