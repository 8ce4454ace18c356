"""Files of the Hugging Face hub on this machine. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.recipe.extras import needed
from megatron_rl.recipe.model import exported_folder, is_hub_name, package_of


def local_folder(path: str, key: str, holds: str) -> Path:
    """Return the directory that a recipe's path names: itself, or its newest copy in the cache of the Hugging Face
    libraries, or the export of a package.

    Args:
        key: recipe key, for the message.
        holds: file in such a directory, for the message.

    Raises ValueError if it does not exist, or if huggingface_hub is not installed.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    package = package_of(path)
    if not package and not is_hub_name(path):
        raise ValueError(f"{key} {path}: no such directory; give one that holds {holds}")
    try:
        from huggingface_hub import constants, snapshot_download  # an extra of mrl, and slow to import
    except ImportError as error:
        raise ValueError(f"{key} {path} needs {needed('huggingface')}: {error}") from error
    if package:
        folder = exported_folder(package, Path(constants.HF_HOME))
        if not folder.is_dir():
            raise ValueError(f"{key} {path}: {folder} is missing; `mrl prefetch RECIPE` exports it from the package")
        return folder
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key} {path}: no such directory, and nothing of that name in the Hugging Face cache; "
            "`mrl prefetch RECIPE` fetches it on a machine with internet"
        ) from error
