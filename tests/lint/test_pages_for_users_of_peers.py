"""The pages for users of verl, TRL and NeMo-RL name keys that exist, and leave out none of the keys of an algorithm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.cli.show.help_pages import Keys
from megatron_rl.recipe.grpo import BASELINES, POLICY_LOSSES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ("from-verl.md", "from-trl.md", "from-nemo-rl.md")
OF_AN_ALGORITHM = ("grpo.", "curriculum.")
ONLY_OURS = {"grpo.branches"}
"""Keys without a counterpart in either project."""


def rows(page: str) -> list[list[str]]:
    """Cells of all rows of the page's tables, without heads."""
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [each for each in cells if each[1] != "ours" and not set(each[0]) <= {"-"}]


def named(page: str) -> dict[str, str]:
    """Keys of ours that the page names anywhere in a row, with a value that it gives, or ''."""
    text = " ".join(cell for row in rows(page) for cell in row[1:])
    spans = re.findall(r"`([a-z][a-z_]*(?:\.[a-z][a-z_0-9]*)+)(?:: ([^`]*))?`", text)
    return dict(spans)


KNOWN = {".".join(path) for path in Keys().known}


@pytest.mark.parametrize("page", PAGES)
def test_every_key_in_our_column_exists(page: str) -> None:
    ours = {
        key
        for row in rows(page)
        for span in re.findall(r"`([^`]*)`", row[1])
        if (key := span.partition(":")[0]) not in KNOWN
    }
    assert ours == set()
    assert len(named(page)) > 40


@pytest.mark.parametrize("page", PAGES)
def test_every_row_has_a_counterpart_or_says_that_there_is_none(page: str) -> None:
    for row in rows(page):
        assert len(row) == 3, row
        assert all("`" in cell or cell == "none" for cell in row[:2]), row


def test_every_key_of_an_algorithm_is_on_one_of_the_pages() -> None:
    sections = {key.rpartition(".")[0] for key in KNOWN}
    algorithm = {key for key in KNOWN if key.startswith(OF_AN_ALGORITHM) and key not in sections}
    assert algorithm - {*named("from-verl.md"), *named("from-trl.md")} == ONLY_OURS


@pytest.mark.parametrize("names", [("grpo.baseline", BASELINES), ("grpo.policy_loss", POLICY_LOSSES)])
def test_every_estimator_and_loss_of_ours_is_on_one_of_the_pages(names: tuple[str, tuple[str, ...]]) -> None:
    key, values = names
    text = "".join((DOCS / page).read_text() for page in PAGES)
    missing = {value for value in values if f"`{key}: {value}`" not in text}
    assert missing == ({"maxrl"} if key == "grpo.baseline" else set())  # neither project has it


@pytest.mark.slow
def test_the_names_of_trl_are_those_of_the_installed_version() -> None:
    pytest.importorskip("trl", reason="trl is an optional part of the benchmarks: pip install -e '.[bench]'")
    import trl
    from trl import rewards

    known = {*trl.GRPOConfig.__dataclass_fields__, *trl.RLOOConfig.__dataclass_fields__}
    known |= {*dir(rewards), *dir(trl), "peft_config"}  # peft_config is an argument of the trainer
    theirs = [re.sub(r"[=\"].*", "", span) for row in rows("from-trl.md") for span in re.findall(r"`([^`]*)`", row[0])]
    assert [name for name in theirs if name and name not in known] == []
