"""A job that an earlier release has submitted resumes with that release's code, under today's launcher."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest
from json_files import read_json
from login import Login
from record import SUBMIT, install
from recorded_runs import CHANGELOG, RELEASES
from records import RECIPE, WAIT, finish, kill_rank, record, resume

from megatron_rl.contract.paths import RunDir

PROJECT = CHANGELOG.parent


def commit_of(release: str) -> str:
    """Commit of a release, which a clone without history lacks."""
    section = CHANGELOG.read_text(encoding="utf-8").partition(f"\n## {release}\n")[2]
    found = re.search(r"commit ([0-9a-f]{8,40})", section)
    assert found is not None, f"{CHANGELOG} does not name the commit of {release}"
    there = subprocess.run(["git", "-C", str(PROJECT), "cat-file", "-e", f"{found[1]}^{{commit}}"], capture_output=True)
    if there.returncode:
        pytest.skip(f"this clone does not have the commit of {release}, {found[1]}")
    return found[1]


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_a_job_of_an_earlier_release_resumes_with_its_code(
    login: Login, tmp_path: Path, release: str, undisturbed: RunDir
) -> None:
    python = install(commit_of(release), tmp_path)
    login.profiles["real"] |= {"health_check": False, "environment": {"MRL_CACHE": str(login.lab.cache)}}
    root = login.share / "begun"
    command = [str(python), "-P", "-c", SUBMIT, *RECIPE, "--run-dir", str(root), "--detach"]
    subprocess.run(command, cwd=login.home, env=login.env, check=True, timeout=WAIT)
    run = login.adopt(root)
    login.jobs.append(run.job)
    run.wait_for_step(3, WAIT)
    assert kill_rank(run, 0, signum=signal.SIGSTOP)  # or the run would be over before mrl has started
    try:
        login.call("mrl", "cancel", "--drain", root)
    finally:
        kill_rank(run, 0, signum=signal.SIGCONT)
    run.wait(limit=WAIT)
    assert run.ends() == [("stopped", "cancelled")]
    code = read_json(run.dir.code_record)

    resumed = resume(login, run)
    finish(resumed)
    assert [outcome for outcome, _ in resumed.ends()] == ["stopped", "finished"]
    assert read_json(run.dir.code_record) == code
    steps, evaluations = record(run.dir)
    expected = record(undisturbed)
    for ours, theirs in zip((steps, evaluations), expected, strict=True):
        names = {name for line in ours for name in line}
        assert ours == [{name: value for name, value in line.items() if name in names} for line in theirs]

    reopened = resume(login, resumed, "training.steps=11", "--update-code")
    finish(reopened)
    assert reopened.has_each_step_once()
    assert len(reopened.metrics()) == 11
    assert read_json(run.dir.code_record) != code
