"""Secrets are passed by name: the job has their values in its environment, and no file or output contains them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from unittest import mock

import pytest
import yaml
from click import Command
from click.testing import CliRunner, Result

from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit

VALUE = "hunter2 $(x)\n\"'"
SBATCH = """#!/bin/sh
printf '%s\\n' "$@" > "{0}/argv"
printf '%s' "$LAB_TOKEN" > "{0}/token"
echo 4711
"""


class Login:
    """A login node whose sbatch records how it is called."""

    def __init__(self, root: Path) -> None:
        self.home, self.bin, self.outside = root / "home", root / "bin", root / "outside"
        for folder in (self.home, self.bin, self.outside):
            folder.mkdir()
        (self.bin / "sbatch").write_text(SBATCH.format(self.outside))
        (self.bin / "sbatch").chmod(0o755)
        container = {"image": "org/image:1"}
        profile = {"gpus_per_node": 8, "run_root": str(self.home / "root"), "container": container}
        profile["secrets"] = ["LAB_TOKEN", "WANDB_API_KEY"]
        self.clusters = self.home / "clusters.yaml"
        self.clusters.write_text(yaml.safe_dump({"clusters": {"lab": profile}}))

    @property
    def environment(self) -> dict[str, str]:
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MRL", "XDG"))},
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "MRL_CLUSTERS": str(self.clusters),
            "LAB_TOKEN": VALUE,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        env.pop("WANDB_API_KEY", None)
        return env

    def said(self, *words: str, command: Command = mrl_submit) -> Result:
        """Run a command that submits nothing in this process, and return its output."""
        with mock.patch.dict(os.environ, self.environment, clear=True), chdir(self.home):
            return CliRunner().invoke(command, words)

    def submit(self, *words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", "from launcher.cli.mrl_submit import main; main()", *words]
        return subprocess.run(
            program, env=self.environment, cwd=self.home, capture_output=True, text=True, timeout=60, check=False
        )

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.home.rglob("*") if path.is_file()}


@pytest.fixture
def login(tmp_path) -> Login:
    return Login(tmp_path)


@pytest.mark.parametrize("asked", ["--dry-run", "--dry-run --script", "--dry-run --json", "job.nodes=1x"])
def test_no_output_has_a_value(login, asked):
    said = login.said("demo", "--cluster", "lab", *asked.split())
    assert "hunter2" not in said.output
    assert "LAB_TOKEN" in said.output or said.exit_code == 2
    said = login.said("plan", "demo", "--cluster", "lab", "--json", command=main)
    assert json.loads(said.stdout) and "hunter2" not in said.output


def test_a_name_without_a_value_is_reported(login):
    said = login.said("demo", "--cluster", "lab", "--dry-run").stderr
    assert "WANDB_API_KEY is not set" in said
    assert "LAB_TOKEN is not set" not in said


def test_only_the_jobs_environment_has_the_value(login):
    submitted = login.submit("demo", "--cluster", "lab")
    assert submitted.returncode == 0, submitted.stderr
    assert (login.outside / "token").read_text() == VALUE
    assert "hunter2" not in (login.outside / "argv").read_text()
    files = login.files()
    assert [path for path in files if path.endswith("job.sbatch")]
    assert [path for path, text in files.items() if b"hunter2" in text] == []
    assert "hunter2" not in submitted.stdout + submitted.stderr
