"""Input of sbatch, and the files left when it refuses. The answers are made up here; those of a real Slurm are in
tests/slurm."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import commands
import pytest
import yaml
from slurm_text import squeue_record

from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import encode_line, read, write
from megatron_rl.contract.run_records import Owner, RunIdentity

ROOT = Path(__file__).parents[2]

SQUEUE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"  # the job has ended


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Create stand-ins for Slurm's commands; `said` holds the arguments of sbatch."""
    folder = tmp_path / "bin"
    folder.mkdir()
    profile = {"partition": "gold", "gpus_per_node": 8, "container": None, "run_root": str(tmp_path / "root")}
    (tmp_path / "clusters.yaml").write_text(json.dumps({"lab": profile}))
    (tmp_path / "root").mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("MRL_CLUSTERS", str(tmp_path / "clusters.yaml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def make(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    make("squeue", SQUEUE)
    make("scontrol", "echo 'ClusterName = east'")
    make("sbatch", 'echo "$@" >> said; env >> environment; echo $((100 + $(wc -l < said)))')
    return make


def submit(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = commands.run(["mrl-submit", "demo", "--cluster", "lab", *words])
    assert done.returncode == code, done.stdout + done.stderr
    return done


def calls(tmp_path: Path) -> list[str]:
    file = tmp_path / "said"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(("readable_by", "mode"), [("me", 0o700), ("all", 0o755)])
def test_profile_decides_who_may_read_a_run(cluster, tmp_path, readable_by, mode):
    clusters = json.loads((tmp_path / "clusters.yaml").read_text())
    clusters["lab"]["readable_by"] = readable_by
    (tmp_path / "clusters.yaml").write_text(json.dumps(clusters))
    submit("--run-dir", "r")
    assert (tmp_path / "r").stat().st_mode & 0o777 == mode


def test_shown_script_equals_the_submitted_script(cluster, tmp_path):
    shown = submit("--run-dir", "r", "--dry-run", "--script").stdout
    assert calls(tmp_path) == []
    said = json.loads(submit("--run-dir", "r", "--json").stdout)
    run = RunDir(tmp_path / "r")
    assert said["job_id"] == "101"
    identity = read(RunIdentity, run.identity)
    assert calls(tmp_path) == [f"--parsable --comment=mrl:{identity.id} {run.script}"]
    assert (read(Owner, run.job).run_id, read(Owner, run.job).name) == (identity.id, "r")
    inode = f"$inode == {run.root.stat().st_ino} "  # known once the directory is made
    assert run.script.read_text() == shown.replace("$inode == 0 ", inode)
    assert (read(Owner, run.job).job_id, read(Owner, run.job).slurm_cluster) == ("101", "east")
    assert run.code_record.exists()
    assert run.last_attempt() == 0, "the job opens its attempts itself"


def test_dry_run_keeps_stdout_for_the_script(cluster):
    done = submit("--dry-run")
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "would submit to lab: demo on 1 node x 2 CPU processes, colocated" in done.stderr
    whole = json.loads(submit("--dry-run", "--json").stdout)
    assert set(whole) == {"cluster", "run_dir", "plan", "resolved", "origins", "script", "notes", "obstacles"}
    assert whole["resolved"]["cluster"] == "lab"


def test_refused_job_leaves_no_files(cluster, tmp_path):
    cluster("sbatch", "echo 'sbatch: error: invalid partition specified: gold' >&2; exit 1")
    done = submit(code=2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert lines == [
        "error: cluster lab: this cluster has no partition gold; `sinfo -s` lists them "
        "(sbatch: invalid partition specified: gold)"
    ]
    assert list((tmp_path / "root").iterdir()) == []
    assert not (tmp_path / "state").exists()


HARVEST = ("placement.mode=partitioned", "placement.inference.nodes=1", "job.nodes=2", "harvest.max_replicas=1")


def test_unknown_partition_for_harvested_replicas_is_refused(cluster, tmp_path):
    cluster("sinfo", "echo gold; echo backfill")
    for words in (
        ["harvest.partition='gold,backfil'"],
        ["harvest.partition=gold,backfil"],  # a sweep whose first run would be accepted
    ):
        done = submit(*HARVEST, *words, code=2)
        assert "harvest.partition: there is none called backfil; there are: backfill, gold; did you mean backfill?" in (
            done.stderr
        )
    assert calls(tmp_path) == []
    assert list((tmp_path / "root").iterdir()) == []
    submit(*HARVEST, "harvest.partition='gold,backfill'")
    cluster("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    submit(*HARVEST, "harvest.partition=silver")
    assert len(calls(tmp_path)) == 2


def test_refused_change_leaves_the_old_run_unchanged(cluster, tmp_path):
    submit("training.steps=800", "--run-dir", "r")
    run = RunDir(tmp_path / "r")
    before = {path: path.read_text() for path in (run.resolved, run.script, run.plan)}
    cluster("sbatch", "echo 'sbatch: error: Batch job submission failed: no' >&2; exit 1")
    submit("training.steps=900", "--change", "--run-dir", "r", code=2)
    assert {path: path.read_text() for path in before} == before
    assert not run.changes.exists()


def test_refused_update_of_the_code_leaves_the_old_code(cluster, tmp_path):
    submit("--run-dir", "r")
    run = RunDir(tmp_path / "r")
    cluster("sbatch", "echo 'sbatch: error: Batch job submission failed: no' >&2; exit 1")
    done = commands.run(["mrl", "resume", "r", "--update-code"])
    assert done.returncode == 2, done.stderr
    assert str(run.code.readlink()) == "code-001"
    assert not (run.root / "code-002").exists()


def test_run_of_an_older_snapshot_keeps_its_keys(cluster, tmp_path):
    submit("--run-dir", "r")
    run = RunDir(tmp_path / "r")
    values = yaml.safe_load(run.resolved.read_text())
    del values["model"]["norms"], values["save"]["keep_every"]
    values["model"]["norms_around"] = False
    run.resolved.write_text(yaml.safe_dump(values))
    run.metrics.write_text(encode_line(MetricsLine(1, {})) + "\n")

    newer = ("resume", "r", "evaluation.every=300", "save.keep_every=50")
    refused = "save.keep_every: the run continues with the code of its snapshot, which is older than this key"
    done = commands.run(["mrl", *newer])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert refused in done.stderr
    assert (
        f"would be refused: override 'save.keep_every=50': {refused}"
        in commands.run(["mrl", *newer, "--dry-run"]).stderr
    )
    assert yaml.safe_load(run.resolved.read_text()) == values

    assert commands.run(["mrl", "resume", "r", "training.steps=901"]).returncode == 0
    values["training"]["steps"] = 901
    assert yaml.safe_load(run.resolved.read_text()) == values
    code = run.code_record  # of an mrl that was installed elsewhere, and is gone
    code.write_text(code.read_text().replace(f'"{ROOT}/', f'"{tmp_path}/gone/'))
    done = commands.run(["mrl", *newer, "--update-code"])
    assert done.returncode == 0, done.stderr
    assert f'"{ROOT}/megatron_rl"' in run.code_record.read_text()
    now = yaml.safe_load(run.resolved.read_text())
    assert (now["model"]["norms"], now["save"]["keep_every"]) == ("before", 50)


def test_job_that_sbatch_may_have_accepted_keeps_its_directory(cluster, tmp_path):
    cluster("sbatch", "kill -INT $PPID; sleep 20")
    done = submit("--run-dir", "r", code=1)
    assert "interrupted; Slurm may have accepted the job: see `squeue --me`" in done.stderr
    run = RunDir(tmp_path / "r")
    assert run.script.is_file()
    assert run.code_record.is_file()
    cluster("sbatch", "echo 7")
    assert json.loads(submit("--run-dir", "r", "--json").stdout)["job_id"] == "7"


LATE = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.parametrize("answer", ["echo", "echo 12a", f"echo '{LATE}' >&2; exit 1"])
def test_sbatch_without_a_job_id_may_have_created_a_job(cluster, tmp_path, answer):
    cluster("sbatch", answer)
    assert "Slurm may have accepted the job" in submit("--run-dir", "r", code=1).stderr
    assert RunDir(tmp_path / "r").script.is_file()


def test_job_id_of_a_federated_cluster_is_read_without_its_cluster(cluster):
    cluster("sbatch", "echo '4711;east'")
    assert json.loads(submit("--json").stdout)["job_id"] == "4711"


def test_job_does_not_inherit_variables_of_the_job_it_is_submitted_from(cluster, tmp_path, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CONF", "HF_TOKEN"):
        monkeypatch.setenv(name, "7")
    submit()
    seen = (tmp_path / "environment").read_text()
    assert "SLURM_JOB_ID=" not in seen
    assert "SLURM_NTASKS=" not in seen
    for kept in ("SLURM_CONF=7", "HF_TOKEN=7"):
        assert kept in seen


def test_variables_of_the_shell_overrule_no_option_of_the_script(cluster, tmp_path, monkeypatch):
    cluster("sbatch", "env >> environment; echo 101")
    for name in ("PARTITION", "NO_REQUEUE", "TIMELIMIT", "SIGNAL", "OPEN_MODE", "ARRAY_INX", "EXPORT", "ACCOUNT"):
        monkeypatch.setenv(f"SBATCH_{name}", "7")
    submit()
    seen = [line for line in (tmp_path / "environment").read_text().splitlines() if line.startswith("SBATCH_")]
    assert seen == ["SBATCH_ACCOUNT=7"], "the profile leaves the account to the user"


def test_sweep_is_chained_to_limit_jobs_at_once(cluster, tmp_path):
    said = json.loads(submit("training.seed=1,2,3,4", "--max-running", "2", "--json").stdout)["runs"]
    assert [one["job_id"] for one in said] == ["101", "102", "103", "104"]
    waits = [word for call in calls(tmp_path) for word in call.split() if word.startswith("--dependency")]
    assert waits == ["--dependency=afterany:101", "--dependency=afterany:102"]
    assert sorted(Path(one["run_dir"]).name.partition("_")[2] for one in said) == [f"seed={n}" for n in range(1, 5)]


def test_partly_accepted_sweep_names_the_accepted_runs(cluster, tmp_path):
    cluster(
        "sbatch",
        'echo "$@" >> said; [ $(wc -l < said) -lt 2 ] && echo 101 && exit; '
        "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1",
    )
    done = submit("training.seed=1,2,3", "--run-dir", "s", code=2)
    assert "a limit of your account or QOS" in done.stderr
    assert "1 of 3 jobs are submitted (`mrl ls`), but not these:" in done.stderr
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["seed=1"]


def test_finished_run_is_not_submitted_again(cluster, tmp_path):
    submit("--run-dir", "r")
    RunDir(tmp_path / "r").done.touch()
    assert "already finished" in submit("--run-dir", "r").stdout
    assert len(calls(tmp_path)) == 1


def test_run_whose_job_only_claimed_it_can_be_submitted(cluster, tmp_path):
    (tmp_path / "r").mkdir()
    write(tmp_path / "r" / "job.json", Owner("7", "lab", 0.0, slurm_cluster="east"))
    submit("--run-dir", "r")
    assert read(Owner, tmp_path / "r" / "job.json").job_id == "101"


def queued(**facts: str) -> str:
    return f"printf %s '{squeue_record(**facts)}'"


@pytest.mark.parametrize(
    ("squeue", "said"),
    [
        ("echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1", ", and Slurm does not answer"),
        (
            queued(JobID="101", State="RUNNING", NodeList="n1"),
            ", which is running on n1; see it with mrl status r",
        ),
        (queued(JobID="101", State="COMPLETING", NodeList="n1"), ", which is completing on n1; Slurm is ending it"),
    ],
    ids=["silent", "running", "completing"],
)
def test_run_with_a_live_job_is_not_submitted_again(cluster, tmp_path, squeue, said):
    submit("--run-dir", "r")
    record = tmp_path / "r" / "job.json"
    assert read(Owner, record).job_id == "101"
    cluster("squeue", squeue)
    assert "belongs to job 101" + said in submit("--run-dir", "r", code=2).stderr
    assert len(calls(tmp_path)) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--script",), "--script: add --dry-run"),
        (("--dry-run", "--follow"), "--dry-run and --follow exclude each other"),
        (("--follow", "--json"), "--follow and --json exclude each other"),
        (("--in-allocation", "--json"), "--in-allocation and --json exclude each other"),
        (("--follow", "training.seed=1,2"), "a sweep of 2 jobs cannot be followed"),
        (("--max-running", "2"), "--max-running: only for sweeps"),
        (("--after", "77"), "--after 77: Slurm does not know job 77"),
        (("--in-allocation",), "--in-allocation: this shell is not in an allocation"),
    ],
)
def test_contradictory_options_are_refused(cluster, tmp_path, monkeypatch, words, expected):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert expected in submit(*words, code=2).stderr
    assert calls(tmp_path) == []


def test_suggested_allocation_has_the_resources_of_the_script(cluster, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    said = submit("--in-allocation", "job.device=cuda", "job.time_limit=0:30:00", code=2).stderr
    flags = "--partition=gold --nodes=1 --gpus-per-node=2 --time=0:30:00 --mem=0 --exclusive"
    assert f"get one with: salloc {flags}\n" in said


def test_job_to_wait_for_counts_once_under_any_name(cluster, tmp_path):
    submit("--run-dir", "long")
    cluster("squeue", queued(JobID="101", State="RUNNING"))
    said = submit("--after", "long", "--after", "101").stdout
    assert "submitted job 102 to lab after 101: " in said
    assert calls(tmp_path)[1].startswith("--parsable --dependency=afterany:101 ")


def test_missing_run_to_wait_for_is_named_with_its_option(cluster):
    assert submit("--after", "nope", code=2).stderr.startswith("error: --after nope: no run is called 'nope'")


def test_printed_commands_are_quoted_for_a_shell(cluster):
    said = submit("--run-dir", "my 'run' $(touch pwned)").stdout
    (line,) = [line for line in said.splitlines() if "state" in line]
    assert shlex.split(line) == ["state", "mrl", "status", "my 'run' $(touch pwned)"]
    assert "mrl cancel --drain -- -dash" in submit("--run-dir", "./-dash").stdout
