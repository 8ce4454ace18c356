"""Refusals by Slurm or the cluster: one clear error, exit code 2, nothing left behind."""

from __future__ import annotations

from pathlib import Path

from login import Login

DEMO = ("demo", "--cluster", "stub")


def refused(login: Login, *words: str | Path, **changes: str) -> str:
    jobs = login.lab.jobs()
    done = login.call("mrl-submit", *words, code=2, **changes)
    assert login.lab.jobs() == jobs
    assert "Traceback" not in done.stderr
    assert not list(login.home.parent.rglob("resolved.yaml"))
    assert not list(login.home.parent.rglob("job.sbatch"))
    return done.stderr


def test_unknown_partition_is_refused(login: Login) -> None:
    login.profiles["stub"]["partition"] = "gold"
    said = refused(login, *DEMO)
    assert "gold" in said
    assert "partition" in said
    assert said.count("error") == 1


def test_constraint_that_no_node_meets_is_refused(login: Login) -> None:
    login.profiles["stub"]["constraint"] = "h200"
    said = refused(login, *DEMO)
    assert "constraint" in said
    assert said.count("error") == 1


def test_unwritable_run_root_is_refused(login: Login) -> None:
    login.profiles["stub"]["run_root"] = "/proc/mrl"
    assert "/proc/mrl" in refused(login, *DEMO)


def test_missing_sbatch_is_reported(login: Login) -> None:
    assert "no sbatch on PATH" in refused(login, *DEMO, PATH="/nonexistent")


def test_missing_controller_is_one_error(login: Login, tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    text = login.lab.conf.read_text().replace("\nSlurmctldPort=", "\nSlurmctldPort=1 #")
    conf.write_text(text.replace("MessageTimeout=20", "MessageTimeout=2"))
    said = refused(login, *DEMO, SLURM_CONF=str(conf))
    assert said.count("error") == 1
