"""mrl recipes: every shipped recipe, as text and as JSON."""

from __future__ import annotations

import json

from click.testing import CliRunner

from launcher.cli.main import main
from launcher.cli.show.lists import purpose
from launcher.recipe.shipped import shipped_recipes


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["recipes", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_shipped_recipe_has_a_line_and_a_purpose() -> None:
    lines = run().splitlines()
    assert [line.split()[0] for line in lines[::2]] == shipped_recipes()
    assert all(line.startswith("    ") and len(line) > 20 for line in lines[1::2])
    assert max(map(len, lines[::2])) <= 100
    (partitioned,) = [line for line in lines if line.startswith("qwen2.5-32b-dapo-partitioned")]
    assert partitioned.split()[1:] == ["Qwen2.5-32B", "8", "x", "8", "partitioned"]


def test_json_has_the_same_content() -> None:
    rows = {row["name"]: row for row in json.loads(run("--json"))["recipes"]}
    assert sorted(rows) == shipped_recipes()
    demo = {"model": "2 layers of 64", "nodes": 1, "gpus_per_node": 2, "device": "cpu", "mode": "colocated"}
    assert demo.items() < rows["demo"].items()
    assert rows["qwen3-4b-dapo"]["model"] == "Qwen/Qwen3-4B"


def test_the_purpose_is_the_first_sentence_of_the_first_comment() -> None:
    assert purpose("# Qwen2.5 learns\n# to add. More.\n\n# Other.\nname: a\n") == "Qwen2.5 learns to add"
    assert purpose("name: a\n") == ""
