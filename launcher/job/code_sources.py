"""Code of a job: mrl as installed here, the packages of the recipe's environment and own functions, and
`code.include`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from socket import gethostname

from launcher.errors import BadInput
from launcher.host.code.git import GitError, work_tree
from launcher.host.code.listing import SECRET, SnapshotError
from launcher.host.code.snapshot import plan_sources
from launcher.recipe.load import Recipe, refusal
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import if_readable, read
from megatron_rl.contract.run_records import CodeSnapshot, CodeSource
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.extras import OURS as OUR_DISTRIBUTION
from megatron_rl.recipe.extras import installed, metadata_of
from megatron_rl.recipe.own_code import CodeReference
from megatron_rl.recipe.registry import entry_points_of

OURS = ("launcher", "megatron_rl")


def code_sources(recipe: Recipe, directory: Path) -> list[CodeSource]:
    """Sources of the run's snapshot, by snapshot.plan_sources. Raises BadInput: an included directory
    does not exist, or git refuses to read it. `directory`: current directory; its repository is included when the
    recipe's file lies in it."""
    include = included(recipe, directory)
    missing = [path for path in include if not path.is_dir()]
    if missing:
        raise refusal(recipe, [f"code.include: {path}: no such directory on {gethostname()}" for path in missing])
    try:
        packages = importable_code(recipe.config, include)
        return plan_sources([str(path) for path in packages], [str(path) for path in include])
    except SnapshotError as error:
        raise refusal(recipe, [f"code.include: {error}"]) from error


def left_out(run: RunDir) -> str | None:
    """Note about files that a snapshot leaves out because their names say credentials."""
    record = if_readable(read(CodeSnapshot, run.code_record))
    notes = [note for source in record.sources for note in source.notes] if record else []
    files = [note.removeprefix("left out: ").partition(" (")[0] for note in notes if note.endswith(f"({SECRET})")]
    if not files:
        return None
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"code: left out, since their names say credentials: {', '.join(files[:3])}{more} ({run.code_record})"


def included(recipe: Recipe, directory: Path) -> list[Path]:
    """Directories whose snapshot the job imports from. Raises BadInput where git refuses to read the current one."""
    if recipe.config.code.include is not None:
        return [Path(path) for path in recipe.config.code.include]
    file = Path(recipe.asked)
    if not file.exists():  # a shipped one
        return []
    try:
        tree = work_tree(str(directory))
    except GitError as error:
        raise BadInput(f"{directory}: {error}; or name the code with code.include (`[]`: none)") from error
    return [Path(tree.top)] if tree and file.resolve().is_relative_to(Path(tree.top).resolve()) else []


def importable_code(config: RunConfig, include: list[Path]) -> list[Path]:
    """Directories of mrl's packages and of those that the recipe names, as this process imports them, and of their
    metadata."""
    packages = {name: _package(name) for name in OURS}
    entries = entry_points_of(config.task) if config.generates else []
    metadata = [metadata_of(installed(OUR_DISTRIBUTION)), *(metadata_of(entry.dist) for entry in entries)]
    own = [CodeReference.of(function) for function in config.grpo.own_functions.values()]
    for module in [*(entry.module for entry in entries), *(one.place for one in own if one.file is None)]:
        top = module.partition(".")[0]
        package = _package(top)
        if package and not any(package.is_relative_to(path) for path in include):
            packages[top] = package
    found = [*packages.values(), *metadata]
    return list(dict.fromkeys(path for path in found if path is not None))


def _package(name: str) -> Path | None:
    spec = find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).resolve() if places else None
