"""Pure: a run on this machine, without Slurm."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.backends.probe.machine import Machine
from launcher.doctor.finding import Finding, count, error, note, ok
from megatron_rl.config import RunConfig


def machine(machine: Machine, config: RunConfig | None) -> Iterator[Finding]:
    """Processors and packages."""
    yield ok("local", "runs on this machine without Slurm; nobody preempts it, Ctrl-C saves and leaves")
    if machine.missing:
        yield error("packages", f"not installed: {', '.join(machine.missing)}", "pip install 'mrl[train]'")
    else:
        yield ok("packages", "what the ranks need is installed")
    if config is None:
        yield ok("processors", f"{count(machine.cpus, 'CPU')}, {count(machine.gpus, 'GPU')}")
        return
    ranks, job = config.job.world_size, config.job
    if job.device == "cuda" and ranks > machine.gpus:
        yield error(
            "gpus",
            f"{config.name} wants {count(ranks, 'GPU')}, this machine has {machine.gpus}",
            "choose a cluster with --cluster (mrl-submit --help), or a smaller recipe",
        )
    threads = ranks * job.threads_per_rank
    if job.device == "cpu" and threads > machine.cpus:
        yield note(
            "cpus",
            f"{count(ranks, 'rank')} of {count(job.threads_per_rank, 'thread')} share {count(machine.cpus, 'CPU')}: "
            "slower, with the same result",
        )
    elif job.device == "cpu":
        yield ok("cpus", f"{count(threads, 'thread')} for {count(machine.cpus, 'CPU')}")
