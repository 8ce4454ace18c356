"""A node that fails the health check is left behind by the job; a check that did not happen blames no node."""

from __future__ import annotations

import pytest
from lab import wait_until
from login import SECONDS, Login
from together import Together

DEMO = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")

together = Together()


def nodes_but(first: int, last: int) -> set[str]:
    """Nodes that the profile excludes."""
    return {f"node{number:02d}" for number in range(1, 11) if not first <= number <= last}


def no_health_step(login: Login, condition: str) -> None:
    """Give the job an srun that does not start the health check where the shell's `condition` holds."""
    told = '*" --job-name=health "*'
    login.program(
        "srun",
        f'case " $* " in {told}) if {condition}; then echo "srun: error: no step today" >&2; exit 1; fi ;; esac\n'
        f'exec {login.found("srun")} "$@"',
    )
    login.profiles["stub"] |= {"health_check": True, "prolog": [f'PATH={login.home}/bin:"$PATH"']}


@together
@pytest.mark.slow  # half a minute; the policy has unit tests
def test_job_without_a_spare_node_moves_to_other_nodes_and_avoids_the_bad_one(login: Login) -> None:
    # Nodes 1 to 3 are the job's choice, and the third is taken until it has begun: so it gets the second, which is bad.
    login.confine(1, 3)
    sick = login.program("python", 'case "$(hostname) $*" in node02*host.health*) exit 1 ;; esac\nexec python3 "$@"')
    login.profiles["stub"] |= {"health_check": True, "host_python": str(sick)}
    taken = login.take("node03")
    run = login.submit(*DEMO)
    wait_until("the first attempt", lambda: run.dir.last_attempt() == 1, SECONDS)
    login.lab.run("scancel", taken)
    assert run.wait() == "COMPLETED", run.log()
    assert run.ends() == [("drained", "bad nodes"), ("finished", None)], run.log()
    assert {rank["host"] for rank in run.seen(2).values()} == {"node01", "node03"}
    assert run.avoided() == {"node02"} | nodes_but(1, 3)


@pytest.mark.slow
@together
def test_health_check_that_cannot_start_blames_no_node_and_is_repeated(login: Login) -> None:
    login.confine(6, 7)
    once = login.home / "once"
    no_health_step(login, f"! [[ -e {once} ]] && touch {once}")
    run = login.submit(*DEMO, "job.backoff_s=1")
    wait_until("the first attempt has ended", run.ends, SECONDS)
    assert "is not used" not in run.dir.batch_log.read_text()
    assert run.ledger()[-1]["error"] == "no node has answered the health check: no step today"
    assert not run.seen()
    assert run.wait() == "COMPLETED", run.log()
    assert run.avoided() == nodes_but(6, 7)
    assert run.ends()[-1] == ("finished", None), run.log()


@pytest.mark.slow
@together
def test_health_check_interrupted_by_a_drain_blames_no_node(login: Login) -> None:
    login.confine(8, 9)
    slow = login.program("python", 'case "$*" in *host.health*) sleep 1000 ;; esac\nexec python3 "$@"')
    login.profiles["stub"] |= {"health_check": True, "host_python": str(slow)}
    run = login.submit(*DEMO)
    wait_until("the check has begun", lambda: list(run.dir.root.glob("logs/*/health.*")), SECONDS)
    login.lab.run("scancel", "--signal=USR1", "--batch", run.job)
    wait_until("the first attempt has ended", run.ends, SECONDS)
    assert run.ends() == [("drained", "signal")], run.log()
    assert run.avoided() == nodes_but(8, 9)


@pytest.mark.slow
@together
def test_health_check_that_slurm_never_starts_times_out(login: Login) -> None:
    """srun waits for busy nodes without end; what keeps them busy here goes with the job."""
    login.confine(10, 10)
    begun = "squeue --noheader --steps --jobs=$SLURM_JOB_ID --format=%i | grep -q '[.]0$'"
    taken = f"srun --ntasks=1 --cpus-per-task=16 --output=/dev/null sleep 1000 & until {begun}; do sleep 0.1; done"
    login.program("timeout", f'exec {login.found("timeout")} "$1" 5 "${{@:3}}"')  # not $2, which is minutes
    once = f"[[ -e {login.home}/once ]] || {{ touch {login.home}/once; {taken}; }}"
    login.profiles["stub"] |= {"health_check": True, "prolog": [f'PATH={login.home}/bin:"$PATH"', once]}
    run = login.submit(*DEMO[:3], "job.nodes=1", "job.gpus_per_node=1", "job.backoff_s=1")
    assert run.wait() == "COMPLETED", run.log()
    assert run.ends() == [("crashed", None), ("finished", None)], run.log()
    assert "the health check: took too long" in run.dir.batch_log.read_text()
    assert run.avoided() == nodes_but(10, 10)


@together
def test_node_without_space_for_the_image_is_replaced_by_the_spare_node(login: Login) -> None:
    """Its disk is its own: to wait for room there is to wait for ever."""
    login.confine(1, 2)
    full = login.lab.directory / "full-node01"
    full.touch()
    run = login.submit("demo", "--cluster", "pods", "job.nodes=1", "job.gpus_per_node=2", "job.spare_nodes=1")
    assert run.wait() == "COMPLETED", run.log()
    full.unlink()
    assert run.ends() == [("finished", None)], run.log()
    assert {rank["host"] for rank in run.seen().values()} == {"node02"}
    bad = "node node01 is not used: the image could not be unpacked: Write on output file failed because No space left"
    assert bad in run.dir.batch_log.read_text()
