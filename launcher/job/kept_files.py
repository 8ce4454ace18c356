"""Copies of the user's code files that a run uses in all attempts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.errors import BadInput
from launcher.recipe.changes import Change, differing
from launcher.recipe.load import Recipe
from megatron_rl.contract.files import read_bytes, write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, if_readable, read, write
from megatron_rl.contract.run_records import KeptFile, KeptFiles
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.own_code import CodeReference, modules_beside
from megatron_rl.recipe.registry import used_files


def keep_files(run: RunDir, recipe: Recipe, renew: bool, source: RunDir | None = None) -> list[Change]:
    """Copy the files of the user's code that the run's environments and algorithm use. See `copy_files`. `source`: run
    whose copies take the place of the present files, as far as it has them."""
    sources = {path: source.kept_files / one.name for path, one in kept_files(source).items()} if source else {}
    return copy_files(run, own_files(recipe.config), renew, sources)


def own_files(config: RunConfig) -> list[str]:
    functions = (CodeReference.of(function).file for function in config.grpo.own_functions.values())
    return [*(used_files(config.task) if config.generates else []), *map(str, filter(None, functions))]


def copy_files(
    run: RunDir, files: Sequence[str], renew: bool, sources: Mapping[str, Path] | None = None
) -> list[Change]:
    """Copy files, each with the modules beside it that it imports, so that all attempts run the same. Return the
    replaced copies. Raises BadInput.

    Args:
        renew: whether to replace copies by the present files.
        sources: original path -> file that takes its place.
    """
    before = kept_files(run)
    kept, changed = [], []
    for number, path in enumerate(dict.fromkeys(files), 1):
        old = before.get(path)
        if old is not None and not (renew and Path(path).exists()):
            kept.append(old)
            continue
        source = (sources or {}).get(path, Path(path))
        texts = {source.name: _read(source), **{each.name: _read(each) for each in _beside(source)}}
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
        folder = f"{number}-{hashlib.sha256(''.join(digests.values()).encode()).hexdigest()[:8]}"
        (run.kept_files / folder).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():  # under their own names, for tracebacks and imports
            write_atomic(run.kept_files / folder / name, text)
        digest = digests.pop(source.name)
        new = KeptFile(path, f"{folder}/{source.name}", digest, digests)
        kept.append(new)
        changed += _changes(old, new) if old is not None else []
    if kept and kept != [*before.values()]:
        write(run.kept_files_record, KeptFiles(kept))
    return changed


def kept_files(run: RunDir) -> dict[str, KeptFile]:
    """The run's copies of the user's code by their original paths. Raises BadInput if their record is unreadable."""
    found = read(KeptFiles, run.kept_files_record)
    if isinstance(found, Unreadable):
        raise BadInput(f"{found}, so the run's files of code are unknown")
    record = if_readable(found)
    return {one.path: one for one in record.files} if record else {}


def _changes(old: KeptFile, new: KeptFile) -> list[Change]:
    before, after = ({Path(one.path).name: one.sha256, **one.beside} for one in (old, new))
    return [one._replace(key=f"files.{one.key}") for one in differing(before, after)]


def _beside(file: Path) -> list[Path]:
    try:
        return modules_beside(file) if file.suffix == ".py" else []
    except ValueError:  # not Python that this version reads: its check says so, with the line
        return []


def _read(file: Path) -> str:
    try:
        return read_bytes(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
