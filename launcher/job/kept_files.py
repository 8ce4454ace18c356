"""Files of the user's code that an environment runs: a run keeps copies, which all its attempts run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from launcher.errors import BadInput
from launcher.recipe.changes import Change
from launcher.recipe.load import Recipe
from megatron_rl.agent.registry import used_files
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, if_readable, read, write
from megatron_rl.contract.run_records import KeptFile, KeptFiles


def keep_files(run: RunDir, recipe: Recipe, renew: bool) -> list[Change]:
    """Copy what the run's environments run. Returns by which copies earlier ones were replaced.

    Args:
        renew: replace a copy by the file of today; else a run that has one keeps it.

    Raises:
        BadInput: a file cannot be read.
    """
    found = read(KeptFiles, run.kept_files_record)
    if isinstance(found, Unreadable):
        raise BadInput(f"{found}; which files of code the run has is not known")
    record = if_readable(found)
    before = {one.path: one for one in record.files} if record else {}
    kept, changed = [], []
    for number, path in enumerate(used_files(recipe.config.task), 1):
        if path in before and not (renew and Path(path).exists()):
            kept.append(before[path])
            continue
        text = _read(Path(path))
        digest = hashlib.sha256(text.encode()).hexdigest()
        name = f"{number}-{digest[:8]}/{Path(path).name}"  # the file's own name, for tracebacks
        (run.kept_files / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(run.kept_files / name, text)
        kept.append(KeptFile(path, name, digest))
        if path in before and before[path].sha256 != digest:
            changed.append(Change(f"files.{Path(path).name}", before[path].sha256, digest))
    if kept and (record is None or kept != record.files):
        write(run.kept_files_record, KeptFiles(kept))
    return changed


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
