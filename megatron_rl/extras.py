"""Optional packages of mrl: what an extra of pyproject.toml brings, what of it is missing here, how to install it.

Reads the metadata of installed distributions and imports none of them: a package may take seconds to import.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

OURS = "mrl"

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")
_EXTRA = re.compile(r"""\bextra\s*==\s*["']([^"']+)["']""")


@cache
def requirements(extra: str) -> tuple[str, ...]:
    """Requirements of an extra as pip reads them, without their condition: `torch>=2.7`; none where mrl itself is not
    installed."""
    ours = _distribution(OURS)
    found: list[str] = []
    for line in (ours.requires if ours else None) or ():
        requirement, _, condition = line.partition(";")
        named = _EXTRA.search(condition)
        if named and named[1] == extra:
            found.append(requirement.strip())
    return tuple(found)


def names(extra: str) -> tuple[str, ...]:
    """Names of the distributions that an extra brings."""
    return tuple(match[1] for one in requirements(extra) if (match := _REQUIREMENT.match(one)))


def is_installed(name: str) -> bool:
    """Whether a distribution is installed where this process imports from."""
    return _distribution(name) is not None


def missing(extras: Iterable[str]) -> list[str]:
    """Names of the distributions of these extras that are not installed, each once."""
    wanted = dict.fromkeys(name for extra in extras for name in names(extra))
    return [name for name in wanted if not is_installed(name)]


def install_command(*extras: str) -> str:
    """The shell command that installs extras of mrl from where mrl itself was installed.

    No package index knows this mrl: somebody else owns that name there.
    """
    source = _source()
    if source is None:
        return "pip install " + shlex.join(dict.fromkeys(one for extra in extras for one in requirements(extra)))
    wanted = f"[{','.join(extras)}]"
    if source.folder is None:
        return f"pip install {shlex.quote(f'{OURS}{wanted} @ {source.url}')}"
    return f"pip install {'-e ' * source.editable}{shlex.quote(source.folder + wanted)}"


class _Source(NamedTuple):
    """Source that mrl was installed from."""

    url: str
    folder: str | None
    """The directory that the URL names: a clone; None: it names an archive or a repository."""
    editable: bool


def _source() -> _Source | None:
    """The source on record in direct_url.json, which pip writes (PEP 610); None: from an index, or not by pip."""
    ours = _distribution(OURS)
    text = ours.read_text("direct_url.json") if ours else None
    try:
        record = json.loads(text) if text else {}
        url, folder, repository = str(record["url"]), record.get("dir_info"), record.get("vcs_info")
        if folder is not None:
            return _Source(url, unquote(urlsplit(url).path), bool(folder.get("editable")))
        if repository is not None:
            return _Source(f"{repository['vcs']}+{url}@{repository['commit_id']}", None, False)
        return _Source(url, None, False)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
