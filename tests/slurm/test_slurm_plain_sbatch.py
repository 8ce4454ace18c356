"""`mrl-submit --dry-run --script > job.sbatch && sbatch job.sbatch` does all that submitting does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from login import Login, Run

DEMO = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")


def write_script(login: Login, *words: str | Path) -> Path:
    done = login.call("mrl-submit", *words, "--dry-run", "--script")
    script = login.home / "job.sbatch"
    script.write_text(done.stdout)
    return script


@pytest.mark.parametrize("name", [pytest.param("run", marks=pytest.mark.slow), 'it\'s a "run" of $HOME, 100% `new`'])
def test_script_alone_creates_and_finishes_the_run(login: Login, name: str) -> None:
    root = login.share / name
    login.share.mkdir()
    script = write_script(login, *DEMO, "--run-dir", root)
    assert not root.exists()
    run = login.adopt(root, login.sbatch(script))
    run.wait("COMPLETED")
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
    assert run.ends() == [("finished", None)]
    for made in (run.dir.recipe, run.dir.resolved, run.dir.plan, run.dir.script, run.dir.code_record):
        assert made.exists(), made
    assert run.dir.script.read_text() == script.read_text()
    assert len(run.seen()) == 2


@pytest.mark.slow  # in containers: test_slurm_submit.py
def test_submitted_run_has_the_same_files_as_one_of_its_script(login: Login) -> None:
    login.share.mkdir()
    script = write_script(login, *DEMO, "--run-dir", login.share / "plain")
    plain = login.adopt(login.share / "plain", login.sbatch(script))
    submitted = login.submit(*DEMO, "--run-dir", login.share / "submitted")
    for run in (plain, submitted):
        run.wait("COMPLETED")
    for name in ("recipe.yaml", "resolved.yaml"):
        assert (plain.dir.root / name).read_text() == (submitted.dir.root / name).read_text(), name
    texts = [run.dir.plan.read_text().replace(str(run.dir.root), "RUN") for run in (plain, submitted)]
    assert json.loads(texts[0]) == json.loads(texts[1])
    assert files(plain) == files(submitted)


def files(run: Run) -> set[str]:
    found = (path for path in run.dir.root.rglob("*") if path.is_file() and path != run.dir.lock)  # of mrl-submit alone
    return {str(path.relative_to(run.dir.root)) for path in found}


@pytest.mark.slow  # in containers: test_slurm_submit.py
def test_second_job_of_a_finished_run_ends_at_once(login: Login) -> None:
    login.share.mkdir()
    script = write_script(login, *DEMO, "--run-dir", login.share / "run")
    for _ in range(2):
        run = login.adopt(login.share / "run", login.sbatch(script))
        run.wait("COMPLETED")
    assert run.ends() == [("finished", None)]
    assert "finished already" in run.dir.batch_log.read_text()


def test_second_job_leaves_a_run_with_a_live_job_alone(login: Login) -> None:
    login.share.mkdir()
    script = write_script(login, *DEMO, "--run-dir", login.share / "run")
    first = login.adopt(login.share / "run", login.sbatch(script, stub={"steps": 1000}))
    first.wait_for_step(1)
    second = login.adopt(login.share / "run", login.sbatch(script))
    assert second.wait() == "FAILED"
    assert f"belongs to job {first.job}" in first.dir.batch_log.read_text()
    assert first.state() == "RUNNING"
    assert first.dir.last_attempt() == 1


@pytest.mark.slow  # in containers: test_slurm_submit.py
def test_mrl_finds_a_run_submitted_with_sbatch(login: Login) -> None:
    login.share.mkdir()
    root = login.share / "submitted-by-sbatch"
    run = login.adopt(root, login.sbatch(write_script(login, *DEMO, "--run-dir", root)))
    run.wait("COMPLETED")
    home = login.lab.env["XDG_STATE_HOME"]  # that of the shell that called sbatch
    assert "finished" in login.call("mrl", "status", root.name, XDG_STATE_HOME=home).stdout
    assert str(run.dir.root) in login.call("mrl", "ls", "--json", XDG_STATE_HOME=home).stdout
