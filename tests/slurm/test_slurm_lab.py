"""The lab is a working cluster, and ends with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab import HERE, Cluster, LabError, wait_until
from stand_in import make_image


def test_job_gets_its_nodes_and_gpus(lab: Cluster) -> None:
    show = "echo $(hostname) $CUDA_VISIBLE_DEVICES"
    answer = lab.run("srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "sh", "-c", show)
    names, gpus = zip(*(line.split() for line in answer.splitlines()), strict=True)
    assert len(set(names)) == 2
    assert set(gpus) == {"0,1,2,3,4,5,6,7"}


def test_killed_node_ends_its_tasks_and_can_be_restarted(lab: Cluster, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    script = f"#!/bin/sh\nwhile date > {alive}; do sleep 0.1; done\n"
    (tmp_path / "job").write_text(script)
    job = lab.run("sbatch", "--parsable", "--no-requeue", "-o", "/dev/null", "-w", "node07", tmp_path / "job").strip()
    wait_until("the job writes", alive.exists, 20)
    lab.kill_node("node07")
    alive.unlink(missing_ok=True)
    lab.restart_node("node07")
    lab.run("scancel", job)
    assert not alive.exists()


@pytest.mark.parametrize("isolation", ["net", "uts"])
def test_lab_ends_with_a_killed_owner(lab: Cluster, isolation: str) -> None:
    if isolation == "net" and lab.isolation == "uts":
        pytest.skip("this machine permits no network namespaces")
    program = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        f"from lab import Cluster\ncluster = Cluster(nodes=2, isolation={isolation!r}).up()\n"
        "cluster.run('sbatch', '--wrap=sleep 1000', '-o', '/dev/null')\n"
        "print(cluster.directory, flush=True)\nsys.stdin.read()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    directory = Path(owner.stdout.readline().strip())
    assert processes_of(directory)
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    wait_until("the lab's processes are gone", lambda: not processes_of(directory), 20)
    wait_until("the lab's directory is gone", lambda: not directory.exists(), 20)


def processes_of(directory: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in text:
            found.append(process.name)
    return found


def test_container_step_sees_its_image_and_is_recorded(lab: Cluster, tmp_path: Path) -> None:
    image = tmp_path / "image.sqsh"
    make_image(image, FROM_IMAGE="image", BOTH="image", KEPT="image", PYTORCH_VERSION="2.8")
    options = [f"--container-image={image}", "--container-workdir=/usr", "--container-env=KEPT"]
    show = "echo $PWD $FROM_IMAGE $BOTH $KEPT $LOCAL_RANK"
    answer = lab.run("srun", *options, "--no-container-mount-home", "sh", "-c", show, BOTH="host", KEPT="host")
    assert answer == "/usr image image host 0\n"
    record = lab.containers()[-1]
    assert (record["image"], record["env"], record["mount_home"]) == (str(image), "KEPT", "false")


def test_container_has_no_slurm_commands(lab: Cluster) -> None:
    with pytest.raises(LabError, match="exit code 1"):
        lab.run("srun", "--container-image=nvcr.io#nvidia/pytorch:25.06-py3", "sinfo")
