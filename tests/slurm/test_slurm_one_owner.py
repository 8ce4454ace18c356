"""A run has one job at a time and one script at a time, however many are started at once."""

from __future__ import annotations

import json
import subprocess

import pytest
from lab import wait_until
from login import SECONDS, Login

STUB = ("demo", "--cluster", "stub", "job.nodes=1", "job.gpus_per_node=2")


def test_one_of_four_simultaneous_jobs_owns_the_run(login: Login) -> None:
    login.share.mkdir()
    root = login.share / "run"
    script = login.prepare(*STUB, "--run-dir", root)
    jobs = [login.sbatch(script, "--hold", stub={"steps": 10_000}) for _ in range(4)]
    login.lab.run("scontrol", "release", ",".join(jobs))
    runs = {job: login.adopt(root, job) for job in jobs}
    over = {"FAILED", "COMPLETED", "CANCELLED"}
    wait_until("three have ended", lambda: sum(run.state() in over for run in runs.values()) == 3, SECONDS)
    (owner,) = [job for job, run in runs.items() if run.state() == "RUNNING"]
    assert [run.state() for job, run in runs.items() if job != owner] == ["FAILED"] * 3
    log = runs[owner].dir.batch_log.read_text()
    assert log.count(f"belongs to job {owner}") == 3, log
    runs[owner].wait_for_step(2)
    assert [line["job_id"] for line in runs[owner].ledger()] == [owner], "nobody else began an attempt"
    assert json.loads(runs[owner].dir.job.read_text())["job_id"] == owner


@pytest.mark.slow
def test_second_submission_in_an_allocation_is_refused_while_the_first_runs(login: Login) -> None:
    root = login.share / "run"
    inside = " ".join(login.command("mrl-submit", *STUB, "--run-dir", root, "--in-allocation"))
    shell = login.program(
        "shell",
        f"{inside} >first.log 2>&1 &\n"
        f"until [[ -s {root}/metrics.jsonl ]] || ! kill -0 $!; do sleep 0.1; done\n"
        f"{inside} >second.log 2>&1; echo $? >second\n"
        "kill -INT $!; wait $!; echo $? >first",
    )
    subprocess.run(
        ["salloc", "--quiet", "--nodes=1", "--exclusive", "--partition=low", shell],
        cwd=login.home,
        env={**login.env, "MRL_STUB": json.dumps({"steps": 10_000})},
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
        check=True,
    )

    def said(name: str) -> str:
        return (login.home / name).read_text()

    assert (said("first"), said("second")) == ("130\n", "2\n"), said("first.log") + said("second.log")
    assert str(root) in said("second.log")
    run = login.adopt(root)
    assert [line["event"] for line in run.ledger()] == ["start", "end"], said("first.log")
    assert run.ends()[0][0] == "drained", "the first must continue until it is asked to leave"
    assert run.has_each_step_once()


@pytest.mark.slow
def test_job_waits_until_a_cancelled_job_has_left_its_nodes(login: Login) -> None:
    """Its script is gone, and the nodes are still cleaned up."""
    login.share.mkdir()
    root = login.share / "run"
    login.confine(1, 2)
    begun, release = login.home / "begun", login.home / "release"
    limit = int(SECONDS * 10)
    epilog = login.program(
        "epilog", f"touch {begun}; for _ in {{1..{limit}}}; do [[ -e {release} ]] && break; sleep 0.1; done"
    )
    script = login.prepare(*STUB, "--run-dir", root)
    login.lab.wait_until_idle(1, 2)  # the epilog would keep jobs of other tests on these nodes as well
    with login.lab.configured({"KillWait=5": f"KillWait=5\nEpilog={epilog}"}):
        first = login.adopt(root, login.sbatch(script, stub={"steps": 10_000}))
        first.wait_for_step(2)
        login.lab.run("scancel", first.job)
        wait_until("the first's node is being cleaned up", begun.exists, SECONDS)
        second = login.adopt(root, login.sbatch(script, stub={"steps": 10}))
        waits = f"waiting until job {first.job} has left its nodes"
        wait_until("the second waits for it", lambda: waits in second.dir.batch_log.read_text(), SECONDS)
        assert first.state() == "COMPLETING"
        release.touch()
        assert second.wait() == "COMPLETED", second.log()
    assert second.ends()[-1] == ("finished", None)
