"""What happens before the first rank: commands of the profile, the run directory, signals that come that early."""

from __future__ import annotations

import os
from pathlib import Path

from lab import wait_until
from login import SECONDS, Login

DEMO = ("demo", "--cluster", "stub", "job.nodes=1", "job.gpus_per_node=2")


def write_script(login: Login, root: Path) -> Path:
    login.share.mkdir()
    script = login.home / "job.sbatch"
    script.write_text(login.call("mrl-submit", *DEMO, "--run-dir", root, "--dry-run", "--script").stdout)
    return script


def before_the_recipe(login: Login, command: str) -> None:
    """Have the first start run a command when all of the run directory is written but the resolved recipe."""
    once = f"[[ -e {login.home}/once ]] || {{ touch {login.home}/once; {command}; }}"
    login.program("bash", f'case "$*" in *"document resolved_yaml") {once} ;; esac\nexec /bin/bash "$@"')
    login.profiles["stub"]["prolog"] = [f'PATH={login.home}/bin:"$PATH"']


def stuck_script(login: Login, pipe: Path) -> None:
    """Have the first start wait for its resolved recipe, which comes from `pipe`."""
    os.mkfifo(pipe)
    before_the_recipe(login, f"exec cat {pipe}")


def text_of(name: str, script: Path) -> str:
    """A document that the script carries."""
    return script.read_text().split(f"<<'{name}_ends_here'\n")[1].split(f"{name}_ends_here")[0]


def test_the_prolog_may_use_variables_that_are_not_set(login: Login) -> None:
    login.profiles["stub"]["prolog"] = ["LIBRARIES=/opt/lib:$NOBODY_SETS_THIS", 'echo "libraries: $LIBRARIES"']
    run = login.submit(*DEMO)
    assert run.wait() == "COMPLETED", run.log()
    assert "libraries: /opt/lib:" in run.dir.batch_log.read_text()


def test_a_run_directory_that_was_cut_short_is_made_by_the_next_start(login: Login) -> None:
    root = login.share / "run"
    before_the_recipe(login, "kill -KILL $PPID")
    script = write_script(login, root)
    first = login.adopt(root, login.sbatch(script))
    first.wait("FAILED")
    assert not first.dir.resolved.exists()
    second = login.adopt(root, login.sbatch(script))
    assert second.wait() == "COMPLETED", second.log()
    assert second.ends() == [("finished", None)]


def test_a_signal_that_comes_before_the_first_attempt_is_not_forgotten(login: Login) -> None:
    root, pipe = login.share / "run", login.home / "pipe"
    stuck_script(login, pipe)
    script = write_script(login, root)
    run = login.adopt(root, login.sbatch(script, stub={"steps": 100}))
    wait_until("the run directory is being made", lambda: list(root.glob("code/**/job.py")), SECONDS)
    login.lab.run("scancel", "--signal=USR1", "--batch", run.job)
    pipe.write_text(text_of("resolved_yaml", script))
    wait_until("the first attempt has ended", run.ends, SECONDS)
    assert run.ends() == [("drained", "signal")]
    assert not run.seen(), "no rank was started"
    wait_until("the second attempt trains", run.metrics, SECONDS)
    assert {line["attempt"] for line in run.metrics()} == {2}


def test_a_cancellation_that_comes_before_the_first_attempt_is_final(login: Login) -> None:
    root = login.share / "run"
    stuck_script(login, login.home / "pipe")
    script = write_script(login, root)
    run = login.adopt(root, login.sbatch(script, stub={"steps": 100}))
    wait_until("the run directory is being made", lambda: list(root.glob("code/**/job.py")), SECONDS)
    login.lab.run("scancel", run.job)
    run.wait("CANCELLED", "COMPLETED", "FAILED")
    assert run.field("Restarts") == "0"
    assert run.ends() in ([], [("stopped", "cancelled")])
    assert not run.seen()
