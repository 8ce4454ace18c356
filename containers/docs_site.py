"""Hooks of mkdocs (mkdocs.yml): pages outside of docs/ join the site, and links to source files become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
JOINED = {
    "README.md": "index.md",
    "containers/README.md": "containers.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Page of the repository -> its name in the site."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/."""
    for source, name in JOINED.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site."""
    name = page.file.src_uri
    source = next((one for one, its in JOINED.items() if its == name), f"docs/{name}")
    return LINK.sub(lambda found: _link(found, (ROOT / source).parent), markdown)


def _link(found: re.Match[str], folder: Path) -> str:
    image, text, target = found.groups()
    path, mark, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target) or not path:
        return found[0]
    inside = (folder / path).resolve().relative_to(ROOT).as_posix()
    if inside in JOINED:
        return f"[{text}]({JOINED[inside]}{mark}{anchor})"
    if inside.startswith("docs/"):
        return f"{image}[{text}]({inside.removeprefix('docs/')}{mark}{anchor})"
    return text
