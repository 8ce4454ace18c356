"""Check of a recipe's own functions, such as its policy loss, before anything starts: a process with torch imports each
and calls it with a tiny batch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from launcher.backends.child import Child
from launcher.job.admission import has_work
from launcher.recipe.load import Recipe, refusal
from megatron_rl.contract.codes import EXIT_FINISHED
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.extras import missing
from megatron_rl.recipe.own_code import Reference, kept


def own_code_problems(recipe: Recipe, included: Sequence[Path], run: RunDir | None, change: bool) -> list[str]:
    """Return a sentence for each function of the user's that is unusable, with its place in the recipe. Where torch is
    not installed only the ranks can check.

    Args:
        included: directories of `code.include`, from which the ranks import.
        run: run that is to use the functions, which may have copies of their files; None: a new one.
        change: whether it is to take the present files.

    Raises Failed where the process cannot be started or fails.
    """
    grpo = recipe.config.grpo
    if not grpo.own_functions or missing(["train"]):
        return []
    has_copies = run is not None and has_work(run)
    used = {}
    for key, reference in grpo.own_functions.items():
        file = Reference.of(reference).file
        renewed = file is not None and change and file.exists()
        used[key] = kept(reference, run) if run is not None and has_copies and not renewed else reference
    path = os.pathsep.join([*map(str, included), *filter(None, [os.environ.get("PYTHONPATH")])])
    files = [Reference.of(reference).file for reference in used.values()]
    contents = tuple(file.read_bytes() for file in files if file is not None and file.is_file())
    return [*refusal(recipe, _found(grpo.model_copy(update=used).model_dump_json(), path, contents)).problems]


@cache
def _found(grpo: str, path: str, contents: tuple[bytes, ...]) -> list[str]:
    """Cached for the same contents of the files, as a sweep asks for each of its runs."""
    with Child("megatron_rl.standalone.own_code", {"PYTHONPATH": path}) as child:
        child.send(grpo)
        child.end_input()
        found = [str(one["problem"]) for one in child.said()]
        if (code := child.wait()) != EXIT_FINISHED:
            raise child.failure(code)
    return found
