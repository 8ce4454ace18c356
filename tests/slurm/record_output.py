"""Records what a Slurm prints about jobs and nodes of a lab, for tests that need no Slurm.

    python tests/slurm/record_output.py DIRECTORY [--accounting]

DIRECTORY gets a file for each command, and one for each job.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from pathlib import Path

from lab import Cluster, wait_until

sys.path.append(str(Path(__file__).resolve().parents[2]))
from launcher.backends.slurm.jobs import SACCT_COMMAND, SQUEUE_COMMAND

LIMIT_S = 300.0
LASTING = "trap '' TERM; for i in $(seq 600); do sleep 1; done"


class Recorder:
    """Submits jobs and keeps what is printed about them."""

    def __init__(self, lab: Cluster, target: Path) -> None:
        self.lab, self.target = lab, target
        self.ids: dict[str, str] = {}

    def submit(self, name: str, script: str, *options: str) -> None:
        words = ("sbatch", "--parsable", f"--job-name={name}", "--output=/dev/null", *options, f"--wrap={script}")
        self.ids[name] = self.lab.run(*words).strip()

    def wait(self, name: str, *words: str) -> None:
        """Wait until the record of a job has all these words."""

        def reached() -> bool:
            text = f"{self.record(name).strip()} "
            return all(f" {word} " in text for word in words)

        wait_until(f"{name} has {' '.join(words)}", reached, LIMIT_S)

    def record(self, name: str) -> str:
        return self.lab.run("scontrol", "show", "job", "-o", self.ids[name])

    def keep(self, name: str, text: str) -> None:
        neutral = text.replace(str(self.lab.directory), "/lab").replace(str(Path.cwd()), "/home/ada")
        neutral = re.sub(r"\b10\.77\.\d+\.", "10.0.0.", neutral)
        self.target.mkdir(parents=True, exist_ok=True)
        (self.target / f"{name}.txt").write_text(neutral)

    def keep_job(self, name: str, suffix: str = "") -> None:
        self.keep(f"job-{name}{suffix}", self.record(name))


def record(lab: Cluster, target: Path) -> None:
    to = Recorder(lab, target)
    to.submit("completed", "true", "--comment=project=x mrl:" + "a" * 32)
    to.submit("failed", "exit 3")
    to.submit("killed", "kill -KILL $$")
    to.submit("cancelled", LASTING, "--nodelist=node01")
    to.submit("timeout", LASTING, "--nodelist=node01", "--time=1")
    to.submit("held", "true", "--hold")
    to.submit("dependent", "true", f"--dependency=afterany:{to.ids['held']}")
    to.submit("node_fail", LASTING, "--nodelist=node04", "--no-requeue")
    to.submit("preempted", f"srun sleep 600 & {LASTING}", "--nodelist=node[02-03]", "--exclusive", "--requeue")
    to.lab.run("salloc", "--no-shell", "--job-name=allocation", "--nodelist=node01")
    to.ids["allocation"] = lab.run("squeue", "--noheader", "--name=allocation", "--format=%A").strip()
    for name in ("cancelled", "node_fail", "preempted", "timeout"):
        to.wait(name, "JobState=RUNNING")
    wait_until("its step runs", lambda: f"{to.ids['preempted']}.0" in lab.run("squeue", "-h", "-s"), LIMIT_S)
    to.keep("steps", lab.run("squeue", "--noheader", "--steps", f"--jobs={to.ids['preempted']}", "--format=%i %j"))
    lab.run("scancel", to.ids["cancelled"])
    lab.kill_node("node04")
    lab.run("scontrol", "update", "NodeName=node05", "State=DRAIN", "Reason=test")
    lab.run("scontrol", "update", "NodeName=node01", "State=DRAIN", "Reason=test")
    to.submit("urgent", "sleep 600", "--partition=high", "--nodelist=node[02-03]", "--exclusive")
    wait_until("it is preempted", lambda: "PreemptTime=2" in to.record("preempted"), LIMIT_S)
    to.keep_job("preempted", "-in-grace")
    with contextlib.suppress(Exception):
        lab.run("scontrol", "requeue", to.ids["preempted"])
    wait_until("it is requeued", lambda: "Restarts=1" in to.record("preempted"), LIMIT_S)
    to.keep_job("preempted", "-completing")
    to.wait("preempted", "JobState=PENDING")
    to.wait("node_fail", "JobState=NODE_FAIL")
    to.wait("cancelled", "JobState=CANCELLED")
    to.wait("timeout", "JobState=TIMEOUT")
    time.sleep(5)  # until the database has it all
    for name in to.ids:
        to.keep_job(name)
    ids = ",".join(to.ids.values())
    to.keep("squeue", lab.run(*SQUEUE_COMMAND, f"--jobs={ids}"))
    if lab.accounting:
        to.keep("sacct", lab.run(*SACCT_COMMAND, f"--jobs={ids}"))
    to.keep("sinfo", lab.run("sinfo", "--all", "--noheader", "--Node", "--format=%N %T"))
    to.keep("config", lab.run("scontrol", "show", "config"))
    to.keep("partitions", lab.run("scontrol", "--oneliner", "show", "partition"))
    to.keep("version", lab.run("sinfo", "--version"))


def main() -> None:
    lab = Cluster(nodes=5, accounting="--accounting" in sys.argv).up()
    try:
        record(lab, Path(sys.argv[1]))
    finally:
        lab.down()


if __name__ == "__main__":
    main()
