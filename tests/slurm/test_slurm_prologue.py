"""The run directory is created before the first rank, and signals may come that early."""

from __future__ import annotations

from lab import wait_until
from login import SECONDS, Login
from together import Together

from megatron_rl.contract.paths import RunDir

DEMO = ("demo", "--cluster", "stub", "job.nodes=1", "job.gpus_per_node=2")

together = Together()


class Held:
    """A script that says what the resolved recipe is only once it may: until then the run directory is half made."""

    def __init__(self, login: Login) -> None:
        login.share.mkdir()
        self.root, self.script = login.share / "run", login.home / "job.sbatch"
        self._reached, self._go = login.home / "reached", login.home / "go"
        text = login.call("mrl-submit", *DEMO, "--run-dir", self.root, "--dry-run", "--script").stdout
        head = "\nresolved_yaml() {\n"
        assert text.count(head) == 1
        held = f"touch {self._reached}; until [[ -e {self._go} ]]; do sleep 0.1; done"
        self.script.write_text(text.replace(head, f"{head}    {held}\n"))

    def wait_until_half_made(self) -> None:
        wait_until("half of the run directory is there", self._reached.exists, SECONDS)
        assert self.root.exists()
        assert not RunDir(self.root).resolved.exists()

    def let_go(self) -> None:
        self._go.touch()


@together
def test_incomplete_run_directory_is_completed_by_the_next_start(login: Login) -> None:
    held = Held(login)
    first = login.adopt(held.root, login.sbatch(held.script))
    held.wait_until_half_made()
    login.lab.run("scancel", "--signal=KILL", "--full", first.job)
    first.wait("FAILED", "CANCELLED", "COMPLETED", "NODE_FAIL")
    assert not first.dir.resolved.exists()
    held.let_go()
    second = login.adopt(held.root, login.sbatch(held.script))
    assert second.wait() == "COMPLETED", second.log()
    assert second.ends() == [("finished", None)]


@together
def test_signal_before_the_first_attempt_drains_that_attempt(login: Login) -> None:
    held = Held(login)
    run = login.adopt(held.root, login.sbatch(held.script, stub={"steps": 100}))
    held.wait_until_half_made()
    login.lab.run("scancel", "--signal=USR1", "--batch", run.job)
    held.let_go()
    wait_until("the first attempt has ended", run.ends, SECONDS)
    assert run.ends() == [("drained", "signal")]
    assert not run.seen(), "no rank was started"
    wait_until("the second attempt trains", run.metrics, SECONDS)
    assert {line["attempt"] for line in run.metrics()} == {2}


@together
def test_cancellation_before_the_first_attempt_is_final(login: Login) -> None:
    held = Held(login)
    run = login.adopt(held.root, login.sbatch(held.script, stub={"steps": 100}))
    held.wait_until_half_made()
    login.lab.run("scancel", run.job)
    run.wait("CANCELLED", "COMPLETED", "FAILED")
    assert run.field("Restarts") == "0"
    assert run.ends() in ([], [("stopped", "cancelled")])
    assert not run.seen()
