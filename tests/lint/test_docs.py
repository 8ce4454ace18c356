"""Links of the documentation lead to files and headings, and the commands that it names exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from launcher.cli.main import ALIASES, COMMANDS
from launcher.cli.show.help_pages import Keys
from launcher.cli.show.metric_pages import metrics_page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def without_code(text: str) -> str:
    """Text without indented and fenced blocks and code spans, in which brackets are not links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "code", text)


@cache
def anchors(page: Path) -> set[str]:
    """Anchors as GitHub derives them from headings: lower case, no punctuation, dashes for spaces."""
    text = re.sub(r"^    .*$", "", page.read_text(), flags=re.MULTILINE)
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def problem_of(page: Path, target: str) -> str | None:
    """Problem of a link to another place of the project."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not (file.exists() and file.is_relative_to(ROOT)):
        return "there is no such file"
    return f"{file.name} has no such heading" if anchor and anchor not in anchors(file) else None


def test_every_relative_link_leads_to_a_file_and_a_heading():
    assert [
        f"{page.name}: {target}: {problem}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
        if not re.match(r"[a-z]+:", target) and (problem := problem_of(page, target))
    ] == []


def test_every_named_command_exists():
    for page in PAGES:
        text = page.read_text()
        lines = re.findall(r"^ {4,}(?:\$ )?(?:.*(?:&&|\||\$\() )?mrl ([a-z][a-z-]*)", text, flags=re.MULTILINE)
        spans = re.findall(r"`mrl ([a-z][a-z-]*)[^`]*`", text)
        assert not {*lines, *spans} - {*COMMANDS, *ALIASES}, page


def test_the_readme_links_every_page():
    readme = PAGES[0].read_text()
    assert not [page.name for page in PAGES[1:] if f"({page.relative_to(ROOT)}" not in readme]


def test_no_page_installs_another_project_called_mrl():
    assert not [page for page in PAGES if re.search(r"pip install (-\S+ )*'?mrl\b", page.read_text())]


def test_the_reference_of_keys_is_current():
    assert (ROOT / "docs" / "keys.md").read_text() == Keys().markdown(), "run `mrl help --markdown > docs/keys.md`"


def test_every_key_has_a_meaning():
    keys = Keys()
    assert not [path for path in keys.known if not keys.meaning(path)]


def test_the_reference_of_metrics_is_current():
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_page(), "run `mrl help --metrics > docs/metrics.md`"


def test_the_site_has_every_page():
    site = (ROOT / "mkdocs.yml").read_text()
    assert not [page.name for page in PAGES[2:] if f": {page.name}\n" not in site]
