"""Rehearses containers/install.sh without its image: pip resolves as it would there without a lock, beside metadata of
the image's distributions, and installs nothing.

    python tests/helpers/image_rehearsal.py [pytorch-25.06] [pytorch-25.11]

asks the package index and writes images/NAME.resolved.json, which tests compare with the constraints, and of which
`make locks` makes the image's lock. The script ends with its first import, since nothing was installed. Needs Python
3.12; takes minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "containers"
IMAGES = Path(__file__).parent / "images"
EXTRAS = ("train", "huggingface", "math", "wandb", "serve")
"""Extras of mrl that install.sh names."""
NAMES = ("pytorch-25.06", "pytorch-25.11")


def asked_for() -> list[Requirement]:
    """Requirements of mrl with those extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [text for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    return [Requirement(text) for text in [*project["dependencies"], *extras]]


def inputs(name: str) -> str:
    """Digest of everything that a resolution depends on, besides the index."""
    files = [CONTAINERS / "constraints.txt", CONTAINERS / "pins.py", IMAGES / f"{name}.json"]
    parts = [*(file.read_text(encoding="utf-8") for file in files), *sorted(map(str, asked_for()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def image(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((IMAGES / f"{name}.json").read_text(encoding="utf-8"))
    return found


def resolved(name: str) -> dict[str, Any]:
    return image(f"{name}.resolved")


def environment(folder: Path, name: str) -> Path:
    """Create a virtual environment with stand-ins for the distributions of an image, and return its `bin`."""
    subprocess.run(["python3.12", "-m", "venv", str(folder / "venv")], check=True)
    found = folder / "venv" / "bin"
    described = image(name)
    subprocess.run([found / "python", "-m", "pip", "install", "--quiet", f"pip=={described['pip']}"], check=True)
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    for distribution, version in described["distributions"].items():
        if distribution == "pip":
            continue
        requires = described["torch_requires"] if distribution == "torch" else []
        metadata = [f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}"]
        info = packages / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = [*metadata, *(f"Requires-Dist: {one}" for one in requires)]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (info / "RECORD").touch()
        (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
    return found


def rehearse(name: str, folder: Path) -> dict[str, Any]:
    """Run the script, and return what pip would install. Raises CalledProcessError if pip finds no resolution."""
    found = environment(folder, name)
    report, constraint, tools = folder / "report.json", folder / "constraint.txt", folder / "tools"
    tools.mkdir()
    # Not by variables: a pip that builds a source distribution would hand them on to the pip of the build.
    pip = f'#!/bin/sh\nexec {found}/python -m pip "$@" --dry-run --quiet --report {report}\n'
    (tools / "pip").write_text(pip, encoding="utf-8")
    (tools / "pip").chmod(0o755)
    pins = [f"{one}=={version}" for one, version in image(name)["distributions"].items()]
    constraint.write_text("\n".join(pins) + "\n", encoding="utf-8")
    # As in the image, except that its release has no lock.
    environ = {one: value for one, value in os.environ.items() if one != "NVIDIA_PYTORCH_VERSION"}
    environ |= {"PATH": f"{tools}:{found}:{os.environ['PATH']}", "PIP_CONSTRAINT": str(constraint)}
    build = [found / "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("mrl-*.whl")
    script = [str(CONTAINERS / "install.sh"), str(wheel)]
    done = subprocess.run(["bash", *script], env=environ, stdout=sys.stderr, check=False)
    if not report.exists():
        raise subprocess.CalledProcessError(done.returncode, script)
    installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    metadata = {one["metadata"]["name"]: one["metadata"] for one in installed if one["metadata"]["name"] != "mrl"}
    return {
        "inputs": inputs(name),
        "installed": {package: one["version"] for package, one in sorted(metadata.items())},
        "requires": {
            package: [text for text in one.get("requires_dist", []) if "extra ==" not in text]
            for package, one in sorted(metadata.items())
        },
    }


def main(names: list[str]) -> None:
    if not shutil.which("python3.12"):
        raise SystemExit("the images have Python 3.12, and there is no python3.12 here")
    for name in names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            found = rehearse(name, Path(folder))
        (IMAGES / f"{name}.resolved.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
