"""ClusterFacts of recorded clusters, and their variations in tests of the doctor."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from launcher.backends.probe.command import CommandAnswer
from launcher.backends.probe.disk import Disk, DiskMeasurement
from launcher.backends.slurm.cluster_facts import SlurmFacts
from launcher.cluster.profile import Profile
from launcher.doctor.examine import ClusterFacts, examine
from launcher.doctor.finding import DoctorFinding
from launcher.recipe.load import load_recipe
from megatron_rl.recipe.config import RunConfig

RECORDED = Path(__file__).parent / "slurm_output"


def slurm(cluster: str, **texts: str) -> SlurmFacts:
    """Recorded Slurm output of a cluster, with some texts replaced."""

    def fact(name: str) -> CommandAnswer:
        if name in texts:
            return CommandAnswer(texts[name])
        said, failed = (RECORDED / cluster / f"{name}{end}" for end in (".txt", ".failure.txt"))
        if failed.exists():
            return CommandAnswer(failure=failed.read_text().strip())
        return CommandAnswer(said.read_text() if said.exists() else "")

    return SlurmFacts(**{field.name: fact(field.name) for field in fields(SlurmFacts)})


def text(cluster: str, name: str) -> str:
    return (RECORDED / cluster / f"{name}.txt").read_text()


def profile(**values: Any) -> Profile:
    usual = {"gpus_per_node": 8, "run_root": "/shared/mrl", "container": None, "host_python": "python3"}
    return Profile.model_validate(usual | values)


@cache
def recipe(*overrides: str) -> RunConfig:
    """Recipe of the demo, by default on one node with 8 GPUs."""
    usual = ("job.device=cuda", "job.gpus_per_node=8", "grpo.prompts_per_step=512")
    return load_recipe("demo", [*usual, *overrides]).config


def disk(**changes: Any) -> Disk:
    found = DiskMeasurement("/shared/mrl", True, 10**13, "lustre", 1e9, None)
    return Disk(Path("/shared/mrl"), replace(found, **changes), None, CommandAnswer(""))


def facts(cluster: str | SlurmFacts, **changes: Any) -> ClusterFacts:
    """Facts of a login node that has everything."""
    said = slurm(cluster) if isinstance(cluster, str) else cluster
    return replace(ClusterFacts(said, CommandAnswer("3.9.2\n"), disk(), None, None, (), (), None, ()), **changes)


def config(cluster: str, **changes: str) -> str:
    """Output of `scontrol show config` on a cluster, with some values replaced."""
    lines = [line for line in text(cluster, "config").splitlines() if line.partition(" ")[0] not in changes]
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in changes.items())])


def found(cluster: str | SlurmFacts, topic: str, config: RunConfig | None = None, **values: Any) -> list[DoctorFinding]:
    return [one for one in examine(facts(cluster), config, profile(**values)) if one.topic == topic]


def said(findings: list[DoctorFinding]) -> str:
    """Levels and texts of findings, one per line."""
    return "\n".join(f"{one.level}: {one.text}" for one in findings)
