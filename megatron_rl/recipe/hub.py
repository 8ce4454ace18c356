"""Names of models and data sets on the Hugging Face hub, and their files on this machine. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.recipe.extras import needed

_PACKAGE = "package:"


def is_hub_name(path: str) -> bool:
    """Whether a path of a loaded recipe is a name on the Hugging Face hub: by then, paths on a machine start with /."""
    return not path.startswith(("/", ".", "~", _PACKAGE))


def package_of(path: str) -> str | None:
    """Return NAME of `package:NAME`, a Python package that contains weights; None for any other path."""
    return path.removeprefix(_PACKAGE) if path.startswith(_PACKAGE) else None


def is_prefetched(path: str) -> bool:
    """Whether `mrl prefetch` fetches what a path of a recipe names."""
    return is_hub_name(path) or package_of(path) is not None


def exported_folder(package: str, huggingface: Path) -> Path:
    """Directory of the exported weights and tokenizer of a package (model/packaged.py).

    huggingface: HF_HOME of the run.
    """
    return huggingface / "mrl" / "packages" / package


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
