"""Commands of mrl on runs of this machine take the same arguments as for Slurm jobs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import pytest
from run_helpers import fake_ranks
from waiting import until

from launcher.host.process.lock import owner_of
from launcher.runs.owner import job_id_of
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, read_lines
from megatron_rl.contract.run_records import Submission

Call = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Run mrl or mrl-submit with fake ranks; processes left running are ended afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MRL_CLUSTERS", "")
    monkeypatch.delenv("MRL_CLUSTER", raising=False)

    def call(name: str, *words: str, code: int = 0, script: str = "long") -> subprocess.CompletedProcess:
        done = commands.run([name, *words], before=fake_ranks(script))
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    yield call
    for lock in tmp_path.rglob(".lock"):
        if owner_of(lock) is not None:
            call("mrl", "cancel", str(lock.parent))
        until(lambda lock=lock: owner_of(lock) is None, "the supervisor's end")


def started(call: Call) -> RunDir:
    said = json.loads(call("mrl-submit", "demo", "--run-dir", "r", "--detach", "--json").stdout)
    run = RunDir(said["run_dir"])
    assert (said["cluster"], said["job_id"], said["attempt"]) == ("local", None, 1)
    until(lambda: len(read_lines(MetricsLine, run.metrics).records) > 2, "steps")
    return run


def test_drained_run_is_reported_as_stopped_and_can_be_resumed(call):
    run = started(call)
    status = json.loads(call("mrl", "status", "--json").stdout)
    assert (status["run"], status["state"], status["cluster"], status["job"]) == ("r", "running", "local", None)
    assert job_id_of(run) is None
    call("mrl", "cancel", "--drain", "r")
    until(lambda: owner_of(run.lock) is None, "the end")
    status = json.loads(call("mrl", "status", "--json").stdout)
    assert (status["state"], status["reason"]) == ("stopped", f"saved after step {status['step']} (cancelled)")
    assert "already ended: stopped" in call("mrl", "cancel", "r").stdout
    said = json.loads(call("mrl", "resume", "--detach", "--json").stdout)
    assert (said["run_dir"], said["attempt"]) == (str(run.root), 2)


def test_cancel_without_drain_kills_the_run(call):
    run = started(call)
    assert call("mrl", "cancel", "--yes").stdout == "r: killed\n"
    until(lambda: owner_of(run.lock) is None, "the end")
    assert json.loads(call("mrl", "status", "--json").stdout)["state"] in ("failed", "stopped")


def test_options_for_slurm_are_refused_with_a_remedy(call):
    started(call)
    assert "mrl resume r" in call("mrl", "requeue", "r", code=1).stderr
    assert "processes on this machine" in call("mrl", "attach", code=1).stderr
    said = call("mrl-submit", "demo", "--follow", "--after", "7", code=2).stderr
    assert (
        said == "error: --follow, --after: only for Slurm clusters, but this run is local (choose one with --cluster)\n"
    )
    assert "a sweep of 2 runs needs a Slurm cluster" in call("mrl-submit", "demo", "training.seed=1,2", code=2).stderr


def test_ls_lists_runs_and_logs_prints_the_log_of_a_rank(call):
    call("mrl-submit", "demo", "training.steps=5", "--run-dir", "first", script="train")
    table = call("mrl", "ls").stdout.splitlines()
    assert table[0].split() == ["run", "state", "step", "last", "reward", "cluster", "job", "submitted"]
    assert table[1].split()[:6] == ["first", "finished", "5/5", "1.000", "local", "-"]
    assert call("mrl", "logs", "--rank", "1").stdout == "rank 1 is here\n"
    assert "supervisor.0.log" in call("mrl", "logs", "--list").stdout
    assert call("mrl", "logs", "first", "--attempt", "7", code=2).stderr == "error: first: no attempt 7; there is 1\n"
    said = call("mrl", "logs", "first", "--rank", "9", code=2).stderr
    assert said == "error: first: train has no rank 9; its ranks: 0, 1\n"
    said = call("mrl", "logs", "first", "--role", "nobody", code=2).stderr
    assert said == "error: first: no log of the role nobody; the roles are: supervisor, train\n"


@pytest.mark.slow
def test_resume_accepts_only_the_documented_changes(call):
    call("mrl-submit", "demo", "training.steps=5", "--run-dir", "r", script="train")
    assert "already finished" in call("mrl", "resume", "r").stdout
    assert "grpo.group_size: 16 -> 8" in call("mrl", "resume", "r", "grpo.group_size=8", code=2).stderr
    said = call("mrl", "resume", "training.steps=7", script="train").stdout
    assert "changed: training.steps: 5 -> 7" in said


@pytest.mark.slow
def test_fork_that_cannot_start_leaves_nothing(call):
    call("mrl-submit", "demo", "training.steps=5", "--run-dir", "r", script="train")
    run = RunDir("r")
    run.checkpoint(3).mkdir(parents=True)
    (run.checkpoint(3) / "manifest.json").write_text("{}")
    call("mrl", "fork", "r@3", "--follow", "--run-dir", "f", code=2)
    assert not Path("f").exists()
    said = call("mrl", "fork", "r@3", "training.seed=4", "--run-dir", "f", script="train").stdout
    assert "training.seed: 0 -> 4" in said
    assert [line.step for line in read_lines(MetricsLine, RunDir("f").metrics).records] == [1, 2, 3, 4, 5]


def test_foreign_line_in_the_index_is_ignored(call, tmp_path):
    (tmp_path / "state" / "mrl").mkdir(parents=True)
    append(tmp_path / "state" / "mrl" / "runs.jsonl", Submission(str(tmp_path / "gone"), "local", 0.0))
    assert "no runs yet" in call("mrl", "ls").stdout


def test_shells_complete_commands_options_recipes_and_runs(call, monkeypatch):
    call("mrl-submit", "demo", "training.steps=5", "--run-dir", "first", script="train")
    for words, expected in {
        "mrl ca": ["cancel"],
        "mrl status fi": ["first"],
        "mrl-submit de": ["deepseek-v3.1-dapo", "demo", "demo-distilled", "demo-program", "demo-supervised"],
        "mrl-submit demo --in-al": ["--in-allocation"],
        "mrl fork fi": ["first"],
    }.items():
        program = words.split()[0]
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        monkeypatch.setenv(f"_{program.replace('-', '_').upper()}_COMPLETE", "bash_complete")
        said = call(program).stdout.split()
        assert [item.partition(",")[2] for item in said] == expected


def test_run_that_is_local_by_default_says_why(call, monkeypatch, tmp_path):
    said = call("mrl-submit", "qwen2.5-32b-dapo", "--dry-run", code=2).stderr
    assert re.search(r"note: no cluster profile in \S+, so it runs on this machine; --cluster NAME .*h100", said)
    assert "note" not in call("mrl-submit", "demo", "--dry-run").stderr
    said = call("mrl-submit", "qwen2.5-32b-dapo", "--dry-run", "--cluster", "local", code=2).stderr
    assert "runs on this machine" not in said
    lab = {"gpus_per_node": 8, "container": None, "run_root": str(tmp_path)}
    Path("clusters.yaml").write_text(json.dumps({"lab": lab, "other": lab}))
    monkeypatch.setenv("MRL_CLUSTERS", "clusters.yaml")
    said = call("mrl-submit", "qwen2.5-32b-dapo", "--dry-run", code=2).stderr
    assert "note: clusters.yaml has lab, other but sets no default, so it runs on this machine" in said
    Path("clusters.yaml").write_text(json.dumps({"lab": lab}))
    said = call("mrl-submit", "demo", "--dry-run").stderr
    assert re.match(r"note: runs on this machine because demo.yaml:\d+ says so; --cluster lab runs it there\n", said)
