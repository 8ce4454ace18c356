"""Notes and refusals of planned runs that concern every cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.cluster.choice import LOCAL, Clusters
from launcher.job.directories import RUNS, refuse_unusable
from launcher.plan.engine_choice import note_of
from launcher.recipe.advice import warnings
from launcher.runs.writers import warning_of_readers, warning_of_replacers
from launcher.start.request import PlannedRun, Request
from megatron_rl.contract.paths import RunDir


class Remarks(NamedTuple):
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def remarks_of(planned: Sequence[PlannedRun]) -> Remarks:
    implied = [_implied(one) for one in planned if one.recipe.implied]
    engines = filter(None, (note_of(one.recipe) for one in planned))
    advised = [text for one in planned for text in warnings(one.recipe.config)]
    return Remarks(tuple(dict.fromkeys([*implied, *engines])), tuple(dict.fromkeys(advised)))


def check_directories(planned: Sequence[PlannedRun], request: Request, clusters: Clusters, cluster: str) -> list[str]:
    """Raise BadInput for a given directory that cannot be a run's, or belongs to another user. Returns warnings."""
    profile = None if cluster == LOCAL else clusters.profile(cluster)
    found = []
    for one in planned:
        if one.given is not None:
            # Imports Slurm's client, which a new local run does not need.
            from launcher.runs.owner import refuse_others

            refuse_unusable(one.given)
            refuse_others(RunDir(one.given), request.trust)
            if profile is None or profile.readable_by == "me":
                found.append(warning_of_readers(one.given))
        if not request.trust:
            found.append(warning_of_replacers(one.given or Path(profile.run_root if profile else RUNS) / one.name))
    return [*dict.fromkeys(text for text in found if text)]


def _implied(planned: PlannedRun) -> str:
    recipe = planned.recipe
    texts = " ".join(override.text for override in recipe.implied)
    return f"inference.engine={recipe.config.inference.engine} also sets {texts}"
