"""Each promise of docs/security.md names the tests that show it, and these exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def promises() -> list[str]:
    """Return the rows of its tables, without headings."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    return [row for row in rows if not row.startswith("| promise |")]


def test_each_promise_names_a_test():
    rows = promises()
    assert len(rows) > 20
    assert [row for row in rows if "`tests/" not in row.rpartition(" | ")[2]] == []


def test_each_test_that_is_named_exists():
    named = re.findall(r"`(tests/[^`]+)`", "\n".join(promises()))
    missing = []
    for name in named:
        file, _, function = name.partition("::")
        source = ROOT / file
        if not source.is_file() or f"def {function}(" not in source.read_text(encoding="utf-8"):
            missing.append(name)
    assert len(named) > 25
    assert missing == []


def test_each_section_says_what_is_not_promised():
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        limits = ("Not promised", "With `--trust`", "No answer writes")
        assert any(one in section for one in limits), section.splitlines()[0]
