"""Leaks of a job on a node of the lab are found: a process, its port, shared memory, a file and a mount."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Cluster, missing, wait_until
from leaks import baseline, found

pytestmark = pytest.mark.slow

LEFT = """
import os, socket, subprocess, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
subprocess.run(["mount", "-t", "tmpfs", "none", "/mnt"], check=True)
listener = socket.create_server(("0.0.0.0", 0))
open("/dev/shm/left", "w").close()
open({mark!r}, "w").close()
time.sleep(1000)
"""


@pytest.fixture
def lab() -> Iterator[Cluster]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    cluster = Cluster(nodes=1)
    try:
        yield cluster.up()
    finally:
        cluster.down()


def test_everything_that_a_job_leaves_is_found(lab: Cluster, tmp_path: Path) -> None:
    before = baseline(lab, tmp_path)
    assert found(lab, before, tmp_path) == []
    script = tmp_path / "left.py"
    script.write_text(LEFT.format(mark=str(tmp_path / "mark")))
    lab.run("srun", "sh", "-c", f"python3 {script} >/dev/null 2>&1 </dev/null")
    wait_until("the process has left everything", (tmp_path / "mark").exists, 60)
    lab.run("sbatch", "--hold", "--output=/dev/null", "--wrap=true")
    kinds = {line.split()[0] for line in found(lab, before, tmp_path)}
    assert kinds == {"job", "process", "shared", "mount", "temporary", *(["port"] if lab.isolation == "net" else [])}
