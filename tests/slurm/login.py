"""A user of the lab on its login node: their profiles, their runs, and mrl's commands."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import yaml
from json_files import read_json, read_json_lines
from lab import HERE, Cluster, LabError, wait_until
from prepared_run import prepared
from stand_in import make_image

from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.vllm_releases import TRIED

STUB = HERE / "stub_rank.py"
SECONDS = 120.0
"""Limit of a wait, in seconds. A job of stub ranks ends in a few, but the machine may be busy."""
ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING"}
"""States of a job that waits, runs or is requeued; a preempted job is SIGNALING for a moment."""


class Login:
    """
    Profiles: `stub` (default; ranks are stub_rank.py, nodes are not checked), `pods` (the same in a container, after a
    health check), `real` (ranks train).
    """

    def __init__(self, lab: Cluster, home: Path, share: Path) -> None:
        self.lab = lab
        self.home = home
        self.share = share
        self.jobs: list[str] = []
        home.mkdir(parents=True, exist_ok=True)
        self.image = home / "pytorch.sqsh"
        make_image(self.image, PYTORCH_VERSION="2.8", HF_HOME="/of/the/image")
        profile = {"partition": "low", "gpus_per_node": 8, "container": None, "run_root": str(share)}
        container = {"image": str(self.image), "mounts": [f"{HERE}:{HERE}:ro"]}
        self.profiles: dict[str, dict[str, Any]] = {
            "stub": {**profile, "python": str(STUB), "health_check": False},
            "pods": {**profile, "python": str(STUB), "container": container},
            "real": {**profile, "python": sys.executable},
        }

    def __enter__(self) -> Login:
        return self

    def __exit__(self, *_: object) -> None:
        if self.jobs:
            self.lab.run("scancel", "--quiet", *self.jobs)

    def confine(self, first: int, last: int) -> None:
        """Confine runs submitted from now on to these nodes."""
        mine = {f"node{number:02d}" for number in range(first, last + 1)}
        others = ",".join(name for name in self.lab.names if name not in mine)
        for profile in self.profiles.values():
            profile["sbatch"] = [f"--exclude={others}"]

    def take(self, node: str) -> str:
        """Occupy a node with an urgent job until that is cancelled. Return the job's id."""
        options = ("--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
        job = self.lab.run("sbatch", "--parsable", *options).strip()
        self.jobs.append(job)

        def runs() -> bool:
            return "RUNNING" in self.lab.run("squeue", "--noheader", "--jobs", job, "--format=%T")

        wait_until(f"{node} is taken", runs, SECONDS)
        return job

    @property
    def env(self) -> dict[str, str]:
        clusters = self.home / "clusters.yaml"
        clusters.write_text(yaml.safe_dump({"default": "stub", "clusters": self.profiles}))
        changes = {"MRL_CLUSTERS": str(clusters), "XDG_STATE_HOME": str(self.home / "state"), "COLUMNS": "120"}
        return {**self.lab.env, **changes}

    def command(self, name: str, *words: str | Path) -> list[str]:
        """Command line of mrl or mrl-submit, for a script of a test."""
        program = shutil.which(name, path=str(Path(sys.executable).parent))
        assert program is not None, f"{name} is not installed beside {sys.executable}"
        return [program, *map(str, words)]

    def call(self, name: str, *words: str | Path, code: int = 0, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run mrl or mrl-submit, which must end with exit code `code`. `changes` are environment variables."""
        done = commands.run([name, *words], SECONDS, cwd=self.home, env={**self.env, **changes})
        assert done.returncode == code, f"{done.args}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def start(self, name: str, *words: str | Path, **changes: str) -> commands.Command:
        """Start the same in the background, with its stderr in its stdout."""
        return commands.Command([name, *words], cwd=self.home, env={**self.env, **changes}, stderr=subprocess.STDOUT)

    def program(self, name: str, text: str) -> Path:
        """Write an executable shell script into ~/bin, which is not on PATH."""
        file = self.home / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
        return file

    def python_with_vllm(self) -> Path:
        """Program that says it has vLLM, and is the stub rank."""
        facts = {"release": [3, 11], "version": TRIED[-1], "torch": None, "torchvision": None, "lacking": []}
        answer = f"[[ $2 != -c ]] || exec echo {shlex.quote('mrl.vllm=' + json.dumps(facts))}"
        return self.program("python-with-vllm", f'{answer}\nexec {self.profiles["stub"]["python"]} "$@"')

    def found(self, name: str) -> str:
        """Path of a program of this machine."""
        path = shutil.which(name, path=self.env["PATH"])
        assert path is not None, f"no {name} here"
        return path

    def submit(self, *words: str | Path, stub: dict[str, Any] | None = None) -> Run:
        """Submit a run with mrl-submit; by default the demo's two ranks on two nodes."""
        words = words or ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")
        done = self.call("mrl-submit", *words, "--json", MRL_STUB=json.dumps(stub or {}))
        said = json.loads(done.stdout)
        self.jobs.append(said["job_id"])
        return Run(self.lab, RunDir(said["run_dir"]), said["job_id"])

    def adopt(self, root: Path, job: str | None = None) -> Run:
        """Return a run that `submit` did not submit. job: by default the one in the run directory."""
        run = RunDir(root)
        return Run(self.lab, run, job or read_json(run.job)["job_id"])

    def prepare(self, *words: str | Path) -> Path:
        """Make a run directory as mrl-submit does, and return its script, for `sbatch`."""
        return prepared([str(word) for word in words], self.env, self.home)

    def sbatch(self, script: Path, *options: str, stub: dict[str, Any] | None = None) -> str:
        """Submit an unchanged script with sbatch, as a user does who knows only Slurm. Return the job's id."""
        job = self.lab.run("sbatch", "--parsable", *options, script, MRL_STUB=json.dumps(stub or {})).strip()
        self.jobs.append(job)
        return job


class Run:
    def __init__(self, lab: Cluster, run: RunDir, job: str) -> None:
        self.lab = lab
        self.dir = run
        self.job = job

    def state(self) -> str:
        """Slurm's state of the job: RUNNING, COMPLETED, ...

        From 24.05 on Slurm calls a job PREEMPTED that was ever in a grace time. One that ended well is COMPLETED here.
        """
        state = self.field("JobState")
        return "COMPLETED" if state == "PREEMPTED" and self.field("ExitCode") == "0:0" else state

    def field(self, name: str) -> str:
        text = self.lab.run("scontrol", "show", "job", self.job, "--oneliner")
        return text.split(f" {name}=")[1].split(" ")[0]

    def wait(self, *states: str, limit: float = SECONDS) -> str:
        """Wait until the job has one of these states, by default until it has ended."""
        ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
        wanted = set(states) or ends

        def reached() -> bool:
            state = self.state()
            assert state in wanted or state not in ends, f"job {self.job} ended {state}, not {wanted}\n{self.log()}"
            return state in wanted

        try:
            wait_until(f"job {self.job} of {self.dir.root} is {' or '.join(sorted(wanted))}", reached, limit)
        except LabError as error:
            raise LabError(f"{error}; it is {self.state()}\n{self.log()}") from None
        return self.state()

    def wait_for_step(self, step: int, limit: float = SECONDS) -> None:
        def reached() -> bool:
            assert (state := self.state()) in ALIVE, f"{state}\n{self.log()}"
            return len(self.metrics()) >= step

        try:
            wait_until(f"{self.dir.root} reaches step {step}", reached, limit)
        except LabError as error:
            raise LabError(f"{error}; it is {self.state()}\n{self.log()}") from None

    def metrics(self) -> list[dict[str, Any]]:
        return read_json_lines(self.dir.metrics)

    def has_each_step_once(self) -> bool:
        """Whether the metrics, read once because a run may be writing them, have no gap and no repeat."""
        steps = [line["step"] for line in self.metrics()]
        return steps == [*range(1, len(steps) + 1)]

    def ledger(self) -> list[dict[str, Any]]:
        return read_json_lines(self.dir.attempts_ledger)

    def ends(self) -> list[tuple[str, str | None]]:
        """(outcome, cause) of each attempt that ended."""
        return [(line["outcome"], line.get("cause")) for line in self.ledger() if line["event"] == "end"]

    def seen(self, attempt: int = 1) -> dict[str, dict[str, Any]]:
        """Record of each stub process, by `STEP.RANK`."""
        files = (self.dir.attempt(attempt).folder / "seen").glob("*.json")
        return {file.name.removesuffix(".json"): read_json(file) for file in files}

    def avoided(self) -> set[str]:
        """Nodes that the job excludes."""
        listed = self.field("ExcNodeList")
        return set() if listed == "(null)" else set(self.lab.run("scontrol", "show", "hostnames", listed).split())

    def log(self) -> str:
        """Batch log and output of the ranks, for messages."""
        files = [self.dir.batch_log, *sorted((self.dir.root / "logs").glob("attempt-*/*"))]
        return "".join(f"--- {file}\n{file.read_text()}" for file in files if file.exists())
