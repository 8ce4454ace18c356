"""Fetch one repository of the Hugging Face hub into HF_HOME, as a separate process of `mrl prefetch`:

    python -m launcher.fetch.hub model Qwen/Qwen2.5-32B

The library is slow to import and an optional extra, so the launcher does not import this module.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from launcher.fetch.needs import record_of
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_USAGE
from megatron_rl.contract.records import write
from megatron_rl.contract.run_records import CachedRepository
from megatron_rl.recipe.extras import install_command

TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
NEVER = ["*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "onnx/*", "original/*", "*.tflite"]
TORCH_PICKLES = ["*.bin", "*.pt", "*.pth"]
"""The same weights again, if the repository has safetensors."""


def patterns(kind: str, files: Iterable[str]) -> tuple[list[str] | None, list[str] | None]:
    """Return (patterns to fetch, patterns to leave out) of a repository; None: all, or none. Pure."""
    if kind == "dataset":
        return None, None
    if kind == "tokenizer":
        return TOKENIZER_FILES, None
    safe = any(file.endswith(".safetensors") for file in files)
    return None, NEVER + (TORCH_PICKLES if safe else [])


def fetch(kind: str, name: str, home: Path) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    repo_type = "dataset" if kind == "dataset" else "model"
    # This asks the hub; snapshot_download alone would accept an incomplete local copy.
    only, never = patterns(kind, HfApi().list_repo_files(name, repo_type=repo_type))
    path = Path(snapshot_download(name, repo_type=repo_type, allow_patterns=only, ignore_patterns=never))
    record = record_of(home, kind, name)
    record.parent.mkdir(parents=True, exist_ok=True)
    write(record, CachedRepository(path.name, str(path.relative_to(home)), time.time()))
    return path


def explain(kind: str, name: str, error: Exception) -> str:
    """Explain an exception in one line, by its name, which is more stable than its module. Pure."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if "GatedRepoError" in names:
        return f"{kind} {name}: accept its terms at https://huggingface.co/{name}, then export HF_TOKEN"
    if "RepositoryNotFoundError" in names:
        return f"{kind} {name}: the hub has no repository of this name, or it is private: export HF_TOKEN"
    if "HFValidationError" in names:
        return f"{kind} {name}: not a name on the hub, such as Qwen/Qwen2.5-32B"
    if isinstance(error, OSError) and error.filename:
        return f"{kind} {name}: {error.filename}: {error.strerror}"
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    return f"{kind} {name}: {reason}; is there internet here? (HF_ENDPOINT, proxies)"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launcher.fetch.hub", description="Fetch a repository of the hub.")
    parser.add_argument("kind", choices=["model", "tokenizer", "dataset"])
    parser.add_argument("name")
    options = parser.parse_args(arguments)
    try:
        path = fetch(options.kind, options.name, Path(os.environ["HF_HOME"]))
    except ImportError as error:
        click.echo(f"error: fetching from the hub needs `{install_command('prefetch')}`: {error}", err=True)
        return EXIT_USAGE
    except Exception as error:  # noqa: BLE001 - the library raises many kinds
        click.echo(f"error: {explain(options.kind, options.name, error)}", err=True)
        return EXIT_CRASHED
    click.echo(path)
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main())
