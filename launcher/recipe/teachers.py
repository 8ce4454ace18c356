"""Teachers of a recipe: whether they fit its model, as far as their files are on this machine, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.errors import BadInput
from launcher.recipe.problems import KeyPath, Locate
from launcher.recipe.published import find_folder
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import POLICY, DistillConfig, EnvironmentDistill
from megatron_rl.recipe.teacher_files import TeacherFiles, against_teacher, teacher_files


def files_of_teacher(teacher: str, caches: Sequence[Path] = ()) -> TeacherFiles | None:
    """Return the files of a teacher; None for the policy itself, or if this machine does not have them. Raises
    ConfigurationError if they hold no model. `caches`: as for `load_recipe`."""
    folder = None if teacher == POLICY else find_folder(teacher, caches)
    return teacher_files(folder) if folder else None


def with_teachers(config: RunConfig, caches: Sequence[Path], locate: Locate, filled: dict[str, str]) -> RunConfig:
    """Check the teachers of a recipe as far as their files are on this machine, and fill in their sizes. Raises
    BadInput with every problem of the first that has some. `filled`: keys that the loader fills in -> their source."""
    own = config.tokenizer.path if config.tokenizer.type == "huggingface" else None
    tokenizer = find_folder(own, caches) if own else None

    def sized(place: KeyPath, teaching: DistillConfig) -> dict[str, int]:
        """Return the keys to add to a section of the recipe that names this teacher."""
        try:
            teacher = files_of_teacher(teaching.teacher, caches)
            problems = [*against_teacher(config, teaching, teacher, tokenizer)]
        except ValueError as error:
            teacher, problems = None, [str(error)]
        if problems:
            at = locate((*place, "teacher"))[0]
            raise BadInput(f"{at}: {problem}" for problem in problems)
        if teacher is None or teaching.parameters is not None:
            return {}
        filled[".".join((*place, "parameters"))] = str(teacher.folder)
        return {"parameters": teacher.parameters}

    distill, environments = config.distill, config.environments
    if distill is not None:
        distill = distill.model_copy(update=sized(("distill",), distill))
    if environments is not None:
        environments = [*environments]
        for number, one in enumerate(environments):
            teaching = one.distill.over(config.distill) if one.distill else None
            if one.distill is None or teaching is None:
                continue
            found = sized(("environments", str(number), "distill"), teaching)
            if one.distill.teacher is not None and found:
                of_environment = EnvironmentDistill.model_validate({**one.distill.model_dump(), **found})
                environments[number] = one.model_copy(update={"distill": of_environment})
    return config.model_copy(update={"distill": distill, "environments": environments})
