"""Where on this machine something of the Hugging Face hub is. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.extras import install_command
from megatron_rl.model.config import exported_folder, is_hub_name, package_of


def local_folder(path: str, key: str, holds: str) -> Path:
    """The directory that a recipe's path names: itself, or, in the cache of the Hugging Face libraries, the newest copy
    or what was exported from a package.

    Args:
        key: of the recipe, for the message.
        holds: a file that such a directory holds, for the message.

    Raises ValueError where there is neither, or huggingface_hub is not installed.
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
        raise ValueError(f"{key} {path} needs `{install_command('huggingface')}`: {error}") from error
    if package:
        folder = exported_folder(package, Path(constants.HF_HOME))
        if not folder.is_dir():
            raise ValueError(f"{key} {path}: {folder} is not there; `mrl prefetch RECIPE` exports it from the package")
        return folder
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key} {path}: no such directory, and nothing of that name in the Hugging Face cache; "
            "`mrl prefetch RECIPE` fetches it where there is internet"
        ) from error
