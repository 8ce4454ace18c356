"""Whether Slurm has the partition that harvested replicas are to be submitted to.

Their jobs are submitted by the run itself, when it is on its nodes: then a wrong name is a line in its log, and no
replica ever comes.
"""

from __future__ import annotations

import difflib

from launcher.host.slurm import ask
from launcher.host.slurm.call import SlurmRefused
from launcher.job.script import PlannedJob
from launcher.recipe.load import refusal


def refuse_unknown_partition(job: PlannedJob) -> None:
    """Raises BadInput. Where Slurm cannot be asked it says nothing: the submission itself does."""
    harvest = job.recipe.config.harvest
    if harvest is None:
        return
    try:
        known = ask.partitions()
    except SlurmRefused:
        return
    for name in harvest.partition.split(","):  # Slurm takes several: the job starts in the first that has room
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            there = f"this cluster has none of that name, it has {', '.join(known)}"
            raise refusal(job.recipe, [f"harvest.partition {name}: {there}{hint}"])
