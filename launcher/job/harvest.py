"""Whether Slurm has the partition that harvested replicas are to be submitted to.

Their jobs are submitted by the run itself, when it is on its nodes: then a wrong name is a line in its log, and no
replica ever comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.backends.slurm.refusal import no_partition
from launcher.host.slurm import ask
from launcher.host.slurm.call import SlurmRefused
from launcher.job.script import PlannedJob
from launcher.recipe.load import refusal


def refuse_unknown_partitions(jobs: Sequence[PlannedJob]) -> None:
    """Raises BadInput. Where Slurm cannot be asked it says nothing: the submission itself does."""
    harvesting = [(job.recipe, job.recipe.config.harvest) for job in jobs if job.recipe.config.harvest]
    if not harvesting:
        return
    try:
        known = ask.partitions()
    except SlurmRefused:
        return
    for recipe, harvest in harvesting:
        for name in harvest.partition.split(","):  # Slurm takes several: the job starts in the first that has room
            if name not in known:
                text, hint = no_partition(name, known)
                raise refusal(recipe, [f"harvest.partition: {text}{f'; {hint}' if hint else ''}"])
