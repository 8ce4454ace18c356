"""mrl-submit, and sbatch of the script that it shows: a recipe becomes a job, which leaves a finished run behind; what
mrl says of that run, and makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from json_files import read_json, write_json
from lab import Cluster
from login import Login, Run

from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir

DEMO = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")
SECRET = "hunter2-5f1d"
SHELL = {
    "SBATCH_PARTITION": "high",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_OPEN_MODE": "truncate",
    "SBATCH_EXPORT": "NONE",
}
"""Variables of the user's shell that contradict the script."""
OBEYED_BY_SRUN = {"SBATCH_EXPORT": "NONE", "SLURM_TIMELIMIT": "0:01", "SLURM_PROLOG": "/bin/false"}
"""Variables that would leave a step without its environment, end it at once, or do similar harm."""
ODD = {"ODD1": "$(touch /tmp/mrl-injected)", "ODD2": "two\nlines", "ODD3": 'it\'s "quoted" `id` \\ 100%'}


@pytest.fixture(scope="module")
def user(owner: Login) -> Login:
    owner.share.mkdir()
    prolog = ["LIBRARIES=/opt/lib:$NOBODY_SETS_THIS", 'echo "libraries: $LIBRARIES"']
    owner.profiles["stub"] |= {"secrets": ["MY_TOKEN"], "environment": ODD, "prolog": prolog}
    return owner


@pytest.fixture(scope="module")
def script(user: Login) -> Path:
    """Script of a run directory whose name is made to break it."""
    return user.prepare(*DEMO, "--run-dir", user.share / 'it\'s my "run" of $HOME, 100% `new`')


def test_steps_ignore_variables_of_the_submitting_shell(user: Login) -> None:
    root = user.share / "hostile-shell"
    user.profiles["stub"]["health_check"] = True
    script = user.prepare(*DEMO, "--run-dir", root)
    user.profiles["stub"]["health_check"] = False
    job = user.lab.run("sbatch", "--parsable", script, **OBEYED_BY_SRUN).strip()
    user.jobs.append(job)
    run = user.adopt(root, job)
    assert run.wait() == "COMPLETED", run.log()
    assert run.ends() == [("finished", None)], run.log()


@pytest.fixture(scope="module")
def runs(user: Login, script: Path) -> tuple[Run, Run]:
    """One by mrl-submit, one by sbatch of the script; at the same time."""
    job = user.sbatch(script)
    words = ("--run-dir", user.share / "submitted", "--json")
    said = user.call("mrl-submit", *DEMO, *words, MY_TOKEN=SECRET, **SHELL)
    assert SECRET not in said.stdout + said.stderr
    submitted = user.adopt(user.share / "submitted", json.loads(said.stdout)["job_id"])
    plain = user.adopt(user.share / 'it\'s my "run" of $HOME, 100% `new`', job)
    user.jobs.append(submitted.job)
    for run in (submitted, plain):
        assert run.wait() == "COMPLETED", run.log()
    return submitted, plain


@pytest.fixture
def submitted(runs: tuple[Run, Run]) -> Run:
    return runs[0]


@pytest.fixture
def plain(runs: tuple[Run, Run]) -> Run:
    return runs[1]


def test_submitted_run_finishes(submitted: Run, lab: Cluster) -> None:
    assert [line["step"] for line in submitted.metrics()] == [1, 2, 3, 4, 5]
    assert submitted.ends() == [("finished", None)]
    assert read_json(submitted.dir.done)["step"] == 5
    owner = read_json(submitted.dir.job)
    assert owner["job_id"] == submitted.job
    assert f"ClusterName={owner['slurm_cluster']}\n" in lab.conf.read_text()
    assert "finished after step 5" in submitted.dir.batch_log.read_text()
    compiled = [*submitted.dir.root.glob("code-*/**/*.pyc")]
    assert not compiled, "one that a full disk has cut would end each attempt"


def test_every_rank_runs_the_snapshot_on_its_own_node(submitted: Run) -> None:
    seen = submitted.seen()
    assert set(seen) == {"train.0", "train.1"}
    assert len({rank["host"] for rank in seen.values()}) == 2
    for rank in seen.values():
        assert rank["module"].startswith("megatron_rl.")
        assert Path(rank["code"]).resolve().is_relative_to(submitted.dir.code.resolve())
        environment = rank["environment"]
        assert environment["MRL_RUN_DIR"] == str(submitted.dir.root)
        assert (environment["MRL_ATTEMPT"], environment["MRL_STEP"]) == ("1", "train")
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert environment["OMP_NUM_THREADS"] == "1"


def test_secret_reaches_the_ranks_and_is_in_no_file(submitted: Run) -> None:
    assert submitted.seen()["train.1"]["environment"]["MY_TOKEN"] == SECRET
    texts = {
        file: file.read_text(errors="replace")
        for file in submitted.dir.root.rglob("*")
        if file.is_file() and file.parent.name != "seen"  # there the stub writes its environment down
    }
    assert not [file for file, text in texts.items() if SECRET in text]


def test_environment_values_reach_the_ranks_literally(runs: tuple[Run, Run]) -> None:
    for run in runs:
        environment = run.seen()["train.0"]["environment"]
        assert {name: environment[name] for name in ODD} == ODD
    assert not Path("/tmp/mrl-injected").exists()


def test_prolog_may_use_unset_variables(submitted: Run) -> None:
    assert "libraries: /opt/lib:" in submitted.dir.batch_log.read_text()


def test_script_overrides_variables_of_the_submitting_shell(submitted: Run) -> None:
    assert (submitted.field("Partition"), submitted.field("Requeue")) == ("low", "1")


def test_second_job_of_a_finished_run_ends_at_once(user: Login, plain: Run, script: Path) -> None:
    again = user.adopt(plain.dir.root, user.sbatch(script))
    assert again.wait() == "COMPLETED"
    assert again.ends() == [("finished", None)]
    assert "finished already" in again.dir.batch_log.read_text()


def test_mrl_finds_a_run_submitted_with_sbatch(user: Login, plain: Run) -> None:
    home = user.lab.env["XDG_STATE_HOME"]  # that of the shell that called sbatch
    assert "finished" in user.call("mrl", "status", plain.dir.root.name, XDG_STATE_HOME=home).stdout
    listed = json.loads(user.call("mrl", "ls", "--json", XDG_STATE_HOME=home).stdout)["runs"]
    assert str(plain.dir.root) in {one["run_dir"] for one in listed}


def test_logs_prints_the_log_of_the_requested_rank(user: Login, submitted: Run) -> None:
    log = submitted.dir.attempt(1).log(1)
    log.write_text("".join(f"line {number}\n" for number in range(10)))

    def said(*words: str, code: int = 0) -> str:
        done = user.call("mrl", "logs", submitted.dir.root, *words, code=code)
        return done.stderr if code else done.stdout

    assert said("--rank", "1", "-n", "2") == "line 8\nline 9\n"
    lines = said("--rank", "1", "-n", "1", "--json").splitlines()
    assert [json.loads(line) for line in lines] == [{"attempt": 1, "role": "train", "rank": 1, "line": "line 9"}]
    assert "finished after step 5" in said("--role", "batch")
    assert said("--rank", "1", "-f").splitlines()[-1] == "line 9", "ends with the run"
    assert "train has no rank 7; its ranks: 0, 1" in said("--rank", "7", code=2)
    assert str(log) in json.loads(said("--list", "--json"))["files"]


@pytest.mark.slow
def test_fork_starts_from_the_checkpoint_of_its_source(user: Login, submitted: Run) -> None:
    make_checkpoint(submitted.dir, 3)
    there = set(user.share.glob("*/resolved.yaml"))
    user.call("mrl", "fork", "submitted@4", code=2)
    user.call("mrl", "fork", "submitted@3", "model.num_layers=4", code=2)
    assert set(user.share.glob("*/resolved.yaml")) == there
    changes = ("grpo.kl_beta=0.1", "training.seed=9", "--json")
    said = json.loads(user.call("mrl", "fork", "submitted@3", *changes, MY_TOKEN=SECRET).stdout)
    user.jobs.append(said["job_id"])
    fork = user.adopt(said["run_dir"], said["job_id"])
    fork.wait("COMPLETED")
    assert fork.dir.checkpoint_steps() == [3]
    ours, theirs = ((run.dir.checkpoint(3) / "weights").stat().st_ino for run in (fork, submitted))
    assert ours == theirs
    record = read_json(fork.dir.fork)
    assert (record["from"], record["step"]) == (str(submitted.dir.root), 3)
    assert record["changes"] == {"grpo.kl_beta": [0.0, 0.1], "training.seed": [0, 9]}
    assert [line["attempt"] for line in fork.metrics()] == [1] * 5
    assert "kl_beta: 0.1" in fork.dir.resolved.read_text()


def make_checkpoint(run: RunDir, step: int) -> None:
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    write_json(folder / "manifest.json", {})
    (folder / "weights").write_bytes(b"0" * 100)
    write_atomic(run.latest_checkpoint, folder.name + "\n")
