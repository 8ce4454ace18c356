"""The whole script of a job, with stand-ins for Slurm's commands: its steps, the number of Python processes, and faults
of the host side, which end no run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prepared_run import prepared
from run_helpers import FAKE_RANK
from waiting import until

from launcher.host.record.ledger import ends_in, read_ledger
from megatron_rl.contract.attempt_records import AttemptEnd
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import read
from megatron_rl.contract.run_records import Done

SCONTROL = """#!/bin/sh
echo "${0##*/} $*" >>"$TOLD"
case "${0##*/} $*" in
    *"show job"*" $JOB") echo "JobId=$JOB JobState=RUNNING Requeue=1 BatchFlag=1 Restarts=0 NodeList=node01" ;;
    *"show job"*) echo "JobId=7 JobState=COMPLETED" ;;
    sinfo*) echo "node01 idle" ;;
esac
"""
SRUN = """#!/bin/sh
echo "srun $*" >>"$TOLD"
for option; do
    case "$option" in
        --output=*) out=${option#--output=} ;;
        -*) ;;
        *) break ;;
    esac
    shift
done
export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 SLURM_PROCID=0 SLURM_NTASKS=1 SLURMD_NODENAME=node01
"$@" >>"$(echo "$out" | sed s/%t/0/)" 2>&1 &
trap 'kill $!' TERM
wait $!
code=$?
[ $code != 137 ] || echo "srun: error: node01: task 0: Killed" >&2
exit $code
"""
PYTHON = """#!/bin/sh
echo "python $*" >>"$TOLD"
exec {python} "$@"
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


class Job:
    """Job 7 of one node, as the batch host sees it."""

    def __init__(self, tmp_path: Path) -> None:
        self.tools, self.told_file = tmp_path / "bin", tmp_path / "told"
        self.tools.mkdir()
        for name in ("scontrol", "sinfo", "scancel", "squeue", "sbatch", "sacct"):
            program(self.tools / name, SCONTROL)
        program(self.tools / "srun", SRUN)
        self.python = program(self.tools / "host-python", PYTHON.format(python=sys.executable))
        self.rank = program(tmp_path / "rank", "#!/bin/sh\n")
        self.run = RunDir(tmp_path / "share" / "run")
        self.home = tmp_path
        self.process: subprocess.Popen[bytes] | None = None

    def write_script(self, ranks: str, **profile: object) -> Path:
        """Prepare the run as mrl-submit does, and return its script. ranks: behaviour of fake_rank.py."""
        program(self.rank, f'#!/bin/sh\nshift 3\nMRL_PARENT_PID=$PPID exec {sys.executable} {FAKE_RANK} {ranks} "$@"\n')
        clusters = self.home / "clusters.yaml"
        values = {"run_root": str(self.home / "share"), "container": None, "python": str(self.rank), **profile}
        lines = "\n".join(f"    {key}: {'null' if value is None else value}" for key, value in values.items())
        clusters.write_text(f"default: lab\nclusters:\n  lab:\n    gpus_per_node: 8\n{lines}\n")
        words = ["demo", "--cluster", "lab", "job.gpus_per_node=1", "job.backoff_s=1", "--run-dir", str(self.run.root)]
        return prepared(words, {**os.environ, "MRL_CLUSTERS": str(clusters)}, self.home)

    def environ(self, restarts: int = 0, **more: str) -> dict[str, str]:
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node01", "SLURM_JOB_NUM_NODES": "1"}
        slurm |= {"SLURMD_NODENAME": "node01", "SLURM_CPUS_ON_NODE": "2", "SLURM_RESTART_COUNT": str(restarts)}
        ours = {"TOLD": str(self.told_file), "MRL_HOST_PYTHON": str(self.python), "XDG_STATE_HOME": str(self.home)}
        ours["JOB"] = more.get("SLURM_JOB_ID", "7")  # the stand-in for scontrol does not see SLURM_JOB_ID
        return {**os.environ, **slurm, **ours, "PATH": f"{self.tools}:{os.environ['PATH']}", **more}

    def start(self, script: Path, output: object = subprocess.PIPE, **environ: str) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            ["bash", script],
            env=self.environ(**environ),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self.process

    def finish(self, limit: float = 40) -> tuple[int, str]:
        """Wait for the end. Returns exit code and output."""
        assert self.process is not None
        said, _ = self.process.communicate(timeout=limit)
        return self.process.returncode, (said or b"").decode()

    def told(self, *names: str) -> list[str]:
        lines = self.told_file.read_text().splitlines() if self.told_file.exists() else []
        return [line for line in lines if line.startswith(names)]

    def ends(self) -> list[AttemptEnd]:
        return ends_in(read_ledger(self.run))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait()


def test_job_cancelled_before_its_process_listens_is_not_requeued(job):
    script = job.write_script("finishes")
    text = SCONTROL.replace("JobState=RUNNING", "JobState=COMPLETING EndTime=2026-01-01T00:00:00")
    program(job.tools / "scontrol", text)
    job.start(script)
    code, said = job.finish()
    assert code == 0, said
    assert [(end.cause, end.then) for end in job.ends()] == [("cancelled", "over")]
    assert not [line for line in job.told("srun") if "--job-name=train" in line]
    assert not job.told("scontrol requeue", "sbatch")


def test_one_process_trains_and_finishes_a_run(job):
    job.start(job.write_script("train", health_check="true"))
    code, said = job.finish()
    assert code == 0, said
    assert read(Done, job.run.done).step == 5
    assert [end.outcome for end in job.ends()] == ["finished"]
    assert [line.split(" ")[1].rpartition("=")[2] for line in job.told("srun")] == ["health", "train"]
    assert len(job.told("python -c")) == 1, "the process of the job"
    assert [line.split(" ")[2] for line in job.told("python -m")] == ["launcher.host.health"]


def test_ranks_end_with_a_killed_host_process(job):
    job.start(job.write_script("long", health_check="false"))
    pid = job.run.attempt(1).folder / "pid.0"
    until(pid.exists)
    job.process.kill()
    until(lambda: not Path(f"/proc/{pid.read_text()}").exists())


def test_run_finishes_although_its_output_cannot_be_written(job):
    with Path("/dev/full").open("w") as full:
        job.start(job.write_script("crash", health_check="false"), output=full)
        assert job.finish()[0] == 1
    assert "scontrol requeue 7" in job.told("scontrol")
    assert job.ends()[-1].then == "requeue"
