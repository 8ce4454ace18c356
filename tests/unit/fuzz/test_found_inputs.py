"""Inputs that once gave a traceback, a hang or a wrong answer, each with what its reader makes of it now. Searches with
random input add rows here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from slurm_text import squeue_record

from launcher.backends.probe import gpus
from launcher.backends.probe.disk import over_quota
from launcher.backends.slurm import cluster_facts, jobs
from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit
from launcher.errors import BadInput
from launcher.host.attempt.job_context import JobRefused, context_of
from launcher.host.record.log_tails import tail
from launcher.host.slurm import queries
from launcher.host.slurm.call import CommandOutput
from launcher.host.slurm.formats import expand_hosts, seconds_of, time_limit_s
from launcher.recipe.load import load_recipe
from launcher.recipe.located_yaml import YamlProblems, read
from launcher.report.read import results_of
from launcher.runs.logs import missing
from launcher.runs.state import result_file
from launcher.runs.step_record import newest_line
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.evaluation_records import EvaluationResult
from megatron_rl.contract.learning import number
from megatron_rl.contract.manifest import SAVED, Damaged, find_defect, read_saved
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.plan_records import PlanRecord
from megatron_rl.contract.records import decode, write
from megatron_rl.contract.rollout_records import read_rollouts, rollout_parts
from megatron_rl.contract.run_records import Fork
from megatron_rl.contract.text import moment, whole_number
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.evaluation_job import read_evaluation
from megatron_rl.recipe.own_code import imported_names

DIGITS = "9" * 5000  # int() refuses more than 4,300
REFUSALS = (ValueError, JobRefused, Damaged, YamlProblems, BadInput)


class Refused(NamedTuple):
    """The reader raises an error that its callers expect, with these words."""

    words: str


class Given(NamedTuple):
    reader: Callable[..., Any]
    text: str
    found: Any
    """Value that the reader returns, or Refused."""


def answered(reader: Callable[[], Any]) -> Callable[[str], Any]:
    """Reader of what a command of Slurm prints."""

    def read(text: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(queries, "call", lambda command: text)
            return reader()

    return read


def job(variable: str) -> Callable[[str], Any]:
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "MRL_RUN_DIR": "/runs/a"}
    return lambda text: context_of({**given, variable: text})


def recipe(text: str) -> Any:
    Path("my.yaml").write_text(text)
    return load_recipe("my.yaml")


def metric(text: str) -> float | None:
    return number(MetricsLine(1, {"loss": float(text)}), "loss")


TEXTS = {
    "a step without a number": Given(answered(lambda: queries.step_called("7", "train")), "warning: train\n", None),
    "digits that are none": Given(whole_number, "²", None),
    "digits of another script": Given(whole_number, "٣", None),
    "more digits than int() takes": Given(whole_number, DIGITS, None),
    "a setting of Slurm's": Given(cluster_facts.number, DIGITS, 0),
    "a count of a resource": Given(cluster_facts.tres, f"node=2,gres/gpu={DIGITS}", {"node": 2}),
    "GPUs of a node": Given(cluster_facts.gres, f"gpu:{DIGITS}", []),
    "KillWait without an end": Given(answered(queries.kill_wait), f"KillWait = {DIGITS} sec\n", queries.KILL_WAIT_S),
    "ranges that multiply": Given(expand_hosts, "n[1-65536][1-65536]", Refused("names more than 65536 nodes")),
    "ranges that add up": Given(expand_hosts, "a[1-65536],b", Refused("names more than 65536 nodes")),
    "a host of many digits": Given(expand_hosts, f"n[{'0' * 5000}-1]", Refused("is not a list of nodes")),
    "a time of many digits": Given(seconds_of, f"{DIGITS}:00:00", None),
    "a limit of many digits": Given(time_limit_s, DIGITS, Refused("is not a time as Slurm writes it")),
    "memory of a GPU": Given(gpus._smallest, "NVIDIA L4, ²3034, Default", (None, None)),
    "a quota in words": Given(lambda text: over_quota(text, 1), "/lustre 12 none 0 - 5 0 0 -", None),
    "a whole number of no digits": Given(read, 'a: !!int ""', Refused("not valid YAML")),
    "a number of no digits": Given(read, 'a: !!float "_"', Refused("not valid YAML")),
    "a key that is a list called text": Given(read, "? !!str [1]\n: 2", Refused("keys are text, got a collection")),
    "a set": Given(read, "a: !!set {b}", Refused("a: has the YAML tag tag:yaml.org,2002:set; remove it")),
    "bytes": Given(read, "a: [!!binary aGk=]", Refused("a.0: has the YAML tag tag:yaml.org,2002:binary; remove it")),
    "a number beyond floats": Given(read, f"a: 1{'0' * 400}", Refused("has more than 19 digits")),
    "a base that no file can be": Given(recipe, 'extends: "a\\0.yaml"', Refused("no file can have this name")),
    "a base of nobody": Given(recipe, 'extends: "~a\\0/b.yaml"', Refused("my.yaml:1: extends: ")),
    "a list that no file can be": Given(recipe, 'environments: "~a\\0/b.yaml"', Refused("my.yaml:1: environments: ")),
    "a time beyond clocks": Given(lambda text: moment(float(text), "%Y"), "1e99", "an unknown time"),
    "a metric whose square is not finite": Given(metric, "1e200", None),
    "restarts in words": Given(job("SLURM_RESTART_COUNT"), "once", Refused("SLURM_RESTART_COUNT='once' is not a num")),
    "a start in words": Given(
        job("SLURM_JOB_START_TIME"), "nan", Refused("SLURM_JOB_START_TIME='nan' is not a number")
    ),
}


def test_texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, (reader, text, found) in TEXTS.items():
        try:
            answer = reader(text)
        except REFUSALS as error:
            answer = error
        if isinstance(found, Refused):
            assert isinstance(answer, REFUSALS) and found.words in str(answer), (name, answer)
        else:
            assert answer == found, (name, answer)


def saved(folder: Path, text: str) -> Any:
    (folder / SAVED).write_text(text)
    return read_saved(folder)


def test_a_record_of_a_save_that_is_nested_without_end_or_has_other_types(tmp_path):
    whole = {"step": 3, "save_id": "a", "bytes": 5, "blocked_s": 0.5, "total_s": 1.0}
    assert saved(tmp_path, json.dumps(whole)) is not None
    assert saved(tmp_path, "[" * 100_000) is None
    for key in whole:
        assert saved(tmp_path, json.dumps({**whole, key: [key]})) is None


def test_a_manifest_that_is_nested_without_end_or_a_list(tmp_path):
    for text in ("[" * 100_000, "[]", '"sha256"', "9" * 5000):
        (tmp_path / "manifest.json").write_text(text)
        assert "manifest.json is damaged" in (find_defect(tmp_path) or "")


def test_an_attempt_of_an_impossible_number(tmp_path):
    """Not each number before it is looked for."""
    run = RunDir(tmp_path)
    run.attempt(10**30).folder.mkdir(parents=True)
    assert [*read_rollouts(run, 1, 10)] == []
    assert rollout_parts(run, 10) == {}


def test_a_log_whose_rank_is_not_a_number(tmp_path):
    run = RunDir(tmp_path)
    run.attempt(1).logs.mkdir(parents=True)
    for name in ("train.0.log", "train.².log", f"train.{'9' * 200}.log"):
        (run.attempt(1).logs / name).touch()
    assert missing(run, "train", 3, 1) == "train has no rank 3; its ranks: 0"


def test_a_fork_of_a_run_that_no_directory_can_be(tmp_path):
    run = RunDir(tmp_path)
    write(run.fork, Fork("a\0b", 5, {}, 1.0))
    assert ([*read_rollouts(run, 1, 9)], rollout_parts(run, 9)) == ([], {})


def test_the_result_of_an_evaluation_of_a_checkpoint_that_is_not_described(tmp_path):
    run, unread = RunDir(tmp_path), []
    write(run.evaluation, EvaluationResult({"checkpoint": "step 5"}, {}, "a.jsonl"))
    assert (results_of(run, unread), unread) == ([], [])


def test_a_request_whose_result_is_not_a_path(tmp_path):
    run = RunDir(tmp_path)
    for out in ("[1]", "5", "{}", "[" * 100_000):
        run.evaluation_request.write_text(f'{{"out": {out}}}')
        assert result_file(run) in (None, run.evaluation)


def test_a_plan_with_replicas_of_no_gpu(tmp_path):
    plan = {"nodes": 2, "gpus_per_node": 8, "spare_nodes": 0, "roles": []}
    role = {"name": "infer", "first": -1, "behind": 0, "gpus": 0, "tasks_per_node": 4}
    for text in ({**plan, "roles": [role]}, {**plan, "gpus_per_node": 0}):
        found = decode(PlanRecord, json.dumps(text).encode(), "plan.json")
        assert "expected a number of at least 1, got 0" in str(found)


def test_files_that_are_pipes(tmp_path):
    """Opening one waits for its writer, which never comes."""
    run = RunDir(tmp_path)
    for path in (run.metrics, run.evaluation_request):
        os.mkfifo(path)
    assert "is not a regular file" in str(newest_line(run.metrics))
    assert tail(run.metrics, 100) == ""
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        read_evaluation(run)


@pytest.mark.parametrize("program", [main, mrl_submit])
def test_a_name_that_no_file_can_have(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    long = "x" * 5000
    taking_one = [["report", long], ["report", long, long], ["rows", long], ["evaluate", long], ["status", long]]
    taking_one += [["environments", "try", long], ["data", "filter", long, "--out", "kept"], ["fork", long]]
    for words in taking_one if program is main else [[long, "--dry-run"], ["demo", "--run-dir", long, "--dry-run"]]:
        done = CliRunner().invoke(program, words)
        assert isinstance(done.exception, SystemExit) and done.exit_code == 2, (words, done.exception)


def test_own_code_that_is_nested_without_end(tmp_path):
    for text in ("-" * 200_000 + "1", "(" * 5000 + ")" * 5000):
        (tmp_path / "reward.py").write_text(f"x = {text}\n")
        with pytest.raises(ValueError, match=": not valid Python: "):
            imported_names(tmp_path / "reward.py")


def test_a_damaged_id_of_a_job_does_not_hide_the_jobs_of_other_runs(monkeypatch):
    """squeue rejects a query about several jobs for one of them, and then all would seem to be gone."""
    asked: list[str] = []

    def run(command: list[str]) -> CommandOutput:
        asked.extend(command)
        return CommandOutput(0, squeue_record(JobID="7", State="RUNNING"), "")

    monkeypatch.setattr(jobs, "run", run)
    found = jobs.read_jobs(["--me", "7"])
    assert ({one: job.kind for one, job in found.items()}) == {"--me": "unknown", "7": "running"}
    assert "--jobs=7" in asked
