"""Containers get the directory that a link leads to: they do not have the link's target otherwise."""

from __future__ import annotations

from pathlib import Path

from login import Login


def test_the_run_root_may_be_a_link(login: Login) -> None:
    (login.home / "disk7").mkdir()
    login.share.symlink_to(login.home / "disk7")
    run = login.submit("demo", "--cluster", "pods", "job.nodes=1", "job.gpus_per_node=2")
    assert run.wait() == "COMPLETED", run.log()
    assert run.ends() == [("finished", None)]
    (step, *_) = [one for one in login.lab.containers() if str(one["job"]) == run.job]
    mounted = [Path(mount.split(":")[1]) for mount in step["mounts"].split(",")]
    for path in run.seen()["train.0"]["environment"]["PYTHONPATH"].split(":"):
        assert any(Path(path).is_relative_to(target) for target in mounted), f"{path} is not in the container"
