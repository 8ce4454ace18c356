"""Optional packages of mrl: requirements of the extras in pyproject.toml, missing ones, and the command that installs
them.

Reads only the metadata of installed distributions: importing a package may take seconds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megatron_rl.contract.codes import IMAGE_VARIABLE

OURS = "mrl"
OF_RANKS = "train"
"""Extra with the packages that every rank imports."""
PACKAGE = Path(__file__).parents[1]  # directory of the code of the ranks

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")
_EXTRA = re.compile(r"""\bextra\s*==\s*["']([^"']+)["']""")


@cache
def requirements(extra: str) -> tuple[str, ...]:
    """Return the requirements of an extra as pip reads them, without markers, such as `torch>=2.7`; none if mrl is not
    installed."""
    ours = installed(OURS)
    found: list[str] = []
    for line in (ours.requires if ours else None) or ():
        requirement, _, condition = line.partition(";")
        named = _EXTRA.search(condition)
        if named and named[1] == extra:
            found.append(requirement.strip())
    return tuple(found)


def names(extra: str) -> tuple[str, ...]:
    return tuple(match[1] for one in requirements(extra) if (match := _REQUIREMENT.match(one)))


def is_installed(name: str) -> bool:
    return installed(name) is not None


def missing(extras: Iterable[str]) -> list[str]:
    """Return the names of the missing distributions of these extras, each once."""
    wanted = dict.fromkeys(name for extra in extras for name in names(extra))
    return [name for name in wanted if not is_installed(name)]


def needed(*extras: str) -> str:
    """Return what a process needs that lacks the packages of extras: the command that installs them, or an image with
    them, as nothing can be installed in a container."""
    if image := os.environ.get(IMAGE_VARIABLE):
        wanted = ", ".join(dict.fromkeys(name for extra in extras for name in names(extra)))
        return f"an image with {wanted}, which {image} lacks (containers/README.md builds one)"
    return f"`{install_command(*extras)}`"


def install_command(*extras: str) -> str:
    """Return the shell command that installs extras of mrl: from the clone that it was installed from, else one that
    names their requirements. mrl is not on any package index: another project owns that name."""
    ours = installed(OURS)
    try:
        record = json.loads((ours.read_text("direct_url.json") if ours else None) or "{}")  # PEP 610
        wanted = f"[{','.join(extras)}]"
        folder, how = unquote(urlsplit(record["url"]).path), "-e " * bool(record["dir_info"].get("editable"))
    except (KeyError, TypeError, ValueError, AttributeError):
        wanted = shlex.join(dict.fromkeys(one for extra in extras for one in requirements(extra)))
        return f"{_installer()} {wanted}"
    return f"pip install {how}{shlex.quote(folder + wanted)}"


def _installer() -> str:
    """Return the command that adds packages to the environment of mrl. If pipx or uv made it, a shell's pip does not
    reach it."""
    environment = Path(sys.prefix)
    if (environment / "pipx_metadata.json").exists():
        return f"pipx inject {OURS}"
    if (environment / "uv-receipt.toml").exists():
        return f"uv pip install --python {shlex.quote(str(environment))}"
    return "pip install"


def installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def metadata_of(dist: Distribution | None) -> Path | None:
    """Return the dist-info directory of a distribution, which holds its entry points; None: it has none."""
    for file in (dist.files if dist else None) or ():
        if file.name == "METADATA" and file.parent.suffix == ".dist-info":
            return Path(str(file.locate())).parent.resolve()
    return None
