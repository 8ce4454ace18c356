"""mrl doctor: its output as text and as JSON, and its exit code."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from doctor_helpers import disk, slurm

from launcher.cli import doctor

CLUSTERS = """
lab: {partition: low, gpus_per_node: 8, container: null, run_root: /shared/mrl}
other: {partition: lo, gpus_per_node: 8, container: null, run_root: /shared/mrl}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Calls the command on the recorded 22.05, with profiles `lab` and `other`."""
    (tmp_path / "clusters.yaml").write_text(CLUSTERS)
    monkeypatch.setenv("MRL_CLUSTERS", str(tmp_path / "clusters.yaml"))
    monkeypatch.delenv("MRL_CLUSTER", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor.slurm_facts, "collect", lambda: slurm("22.05-partition"))
    monkeypatch.setattr(doctor.disk, "inspect", lambda path: disk())
    return lambda *arguments: CliRunner().invoke(doctor.command, arguments)


def test_lines_can_be_grepped(run):
    result = run("demo", "--cluster", "lab")
    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert "ok       partition: low" in lines
    assert lines[-1].startswith("demo on lab: ")
    assert "\x1b" not in result.output
    fixes = [line for line in lines if line.startswith("         fix: ")]
    assert len(fixes) == sum(line.startswith(("warning ", "error ")) for line in lines)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ("--cluster", "other"),
            ("error    partition: there is none called lo; there are: high, low", "fix: did you mean low?"),
        ),
        (
            ("job.gpus_per_node=16", "job.device=cuda", "--cluster", "lab"),
            ("error    recipe: override 'job.gpus_per_node=16'", "preemption: "),
        ),
        (("job.device=cuda", "job.gpus_per_node=16"), ("error    gpus: demo needs 16 GPUs, and this machine has",)),
    ],
)
def test_errors_stand_among_the_other_findings_and_exit_with_1(run, arguments, parts):
    result = run("demo", *arguments)
    assert result.exit_code == 1
    assert all(part in result.output for part in parts), result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dmo",), "did you mean demo?"),
        (("demo", "--cluster", "lba"), "did you mean lab?"),
        (("demo", "grpo.group_sise=8"), "did you mean"),
    ],
)
def test_bad_usage_exits_with_2(run, arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_json(run):
    result = run("demo", "--cluster", "lab", "--json")
    answer = json.loads(result.output)
    assert (answer["recipe"], answer["cluster"]) == ("demo", "lab")
    assert sum(answer["counts"].values()) == len(answer["findings"])
    assert {"level", "topic", "text", "fix"} == set(answer["findings"][0])
    assert run("--cluster", "lab").output.splitlines()[-1].startswith("any run on lab: ")


def test_a_recipe_for_this_machine_needs_no_slurm(run, monkeypatch):
    monkeypatch.setattr(doctor.slurm_facts, "collect", lambda: pytest.fail("asked Slurm"))
    result = run("demo")
    assert result.exit_code == 0
    assert "ok       local: runs on this machine without Slurm" in result.output
    assert "demo on local: " in result.output
