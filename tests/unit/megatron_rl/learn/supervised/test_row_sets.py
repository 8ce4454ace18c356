"""The sets of rows of a recipe: those trained on and those held out, none of which is the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optional import needs
from supervised_helpers import sums, supervised_recipe, write_rows

from megatron_rl.agent import indexed_problems
from megatron_rl.agent.indexed_problems import IndexedProblems
from megatron_rl.learn.supervised.row_sets import RowSets, open_sets
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.data import DataConfig

pytestmark = needs("datasets")

COLUMNS = {"prompt": "question", "answer": "answer"}


def texts(rows: Any) -> list[str]:
    return [row.golden["prompt"] for row in rows]


def opened(**data: Any) -> RowSets:
    return open_sets(DataConfig.model_validate(data), None)


def test_a_share_is_held_out_by_the_text_of_a_row_whatever_the_order(tmp_path: Path) -> None:
    rows = sums(200) + sums(40)  # some rows twice
    found = opened(path=str(write_rows(tmp_path / "a.jsonl", rows)), **COLUMNS, held_out={"share": 0.2})
    again = opened(path=str(write_rows(tmp_path / "b.jsonl", rows[::-1])), **COLUMNS, held_out={"share": 0.2})
    trained, held = texts(found.trained[0].problems), texts(found.held_out[""])
    assert len(trained) + len(held) == 240 and 24 < len(held) < 72
    assert not {*trained} & {*held}
    assert sorted(held) == sorted(texts(again.held_out[""]))


def test_rows_equal_to_held_out_ones_of_any_set_are_not_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = sums(30)
    one = write_rows(tmp_path / "one.jsonl", rows[:20])
    other, held = write_rows(tmp_path / "other.jsonl", rows[20:]), write_rows(tmp_path / "held.jsonl", rows[18:22])
    found = opened(
        sets=[{"path": str(one), **COLUMNS}, {"path": str(other), **COLUMNS, "held_out": {"path": str(held)}}]
    )
    assert [(each.environment, len(each.problems), each.weight) for each in found.trained] == [
        ("one", 18, 1.0),
        ("other", 8, 1.0),
    ]
    assert {row.environment for row in found.held_out["other"]} == {"other"}
    assert found.unread == {id: {"it is equal to a held-out row": 2} for id in ("one", "other")}
    assert "one.jsonl: 2 of 20 rows are equal to held-out rows of another source" in caplog.text
    with pytest.raises(ValueError, match=r"other\.jsonl: 10 of 10 rows are equal to held-out rows"):
        opened(
            sets=[
                {"path": str(one), **COLUMNS},
                {"path": str(other), **COLUMNS, "held_out": {"path": f"{copy(other)}"}},
            ]
        )


def copy(file: Path) -> Path:
    return Path(file.with_suffix(".copy.jsonl").write_bytes(file.read_bytes()) and file.with_suffix(".copy.jsonl"))


def test_a_row_of_two_sets_is_not_trained_on_if_one_holds_it_out(tmp_path: Path) -> None:
    one, other = (str(write_rows(tmp_path / f"{name}.jsonl", sums(150))) for name in ("one", "other"))
    sets = [{"path": path, **COLUMNS, "held_out": {"share": share}} for path, share in ((one, 0.1), (other, 0.3))]
    for its in (sets, sets[::-1]):
        found = opened(sets=its)
        trained = {text for each in found.trained for text in texts(each.problems)}
        assert [each.environment for each in found.trained] == [Path(one["path"]).stem for one in its]
        assert not trained & {text for rows in found.held_out.values() for text in texts(rows)}
        assert trained == {*texts(found.trained[0].problems)} == {*texts(found.trained[1].problems)}


def test_a_large_set_is_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_rows(tmp_path / "rows.jsonl", sums(60))
    data = {"sets": [{"path": str(file), **COLUMNS, "epochs": 1.5, "held_out": {"share": 0.3}}]}
    expected = opened(**data)
    monkeypatch.setattr(indexed_problems, "LARGE", 1)
    found = opened(**data)
    (its,), (of_memory,) = found.trained, expected.trained
    assert isinstance(its.problems, IndexedProblems) and isinstance(found.held_out["rows"], IndexedProblems)
    assert [*its.problems] == of_memory.problems and [*found.held_out["rows"]] == expected.held_out["rows"]
    assert found.total == expected.total == its.weight == round(1.5 * len(its.problems))


CASES = [
    ({"data": {"sets": []}}, "the list is empty"),
    ({"data": {"sets": [{"path": "/a.jsonl", "weight": 0.0}]}}, "greater than 0"),
    ({"data": {"sets": [{"path": "/a.jsonl", "weight": 1.0, "epochs": 1.0}]}}, "weight and epochs are both given"),
    ({"data": {"sets": [{"path": "/a.jsonl", "weight": 1.0}, {"path": "/b", "epochs": 1.0}]}}, "set 'a' has none"),
    ({"data": {"sets": [{"path": "/a.jsonl"}, {"path": "/x/a.json"}]}}, "set 'a' is listed more than once"),
    ({"data": {"sets": [{"id": "a"}]}}, "Field required"),
    ({"data": {"path": "/a", "sets": [{"path": "/b"}]}}, "sets and path are both given"),
    ({"data": {"path": "/a", "held_out": {}}}, "nothing says which rows are held out"),
    ({"data": {"path": "/a", "held_out": {"share": 0.1, "split": "test"}}}, "share and split are both given"),
    ({"data": {"path": "/a", "held_out": {"path": "/a"}}}, "data.held_out is split train of /a, which is trained on"),
    (
        {"data": {"sets": [{"path": "/a"}, {"path": "/b", "held_out": {"path": "/a"}}]}},
        "held_out of set 'b' in data.sets is split train of /a, which is trained on, as set 'a'",
    ),
    ({"training": {"early_stop": {"patience": 2}}}, "no rows are held out whose loss could end the run"),
    (
        {"data": {"path": "/a", "held_out": {"share": 0.1}}, "training": {"early_stop": {"patience": 2}}},
        "evaluation.every is 0",
    ),
    (
        {"data": None, "training": {"objective": "grpo", "early_stop": {"patience": 2}}},
        "training.early_stop is set, and training.objective is grpo",
    ),
]


def test_contradictions_are_refused() -> None:
    for sections, reason in CASES:
        recipe = supervised_recipe(
            **{"environment": {"name": "arithmetic"}, "sampling": {"max_new_tokens": 3}} | sections
        )
        if recipe.get("data"):
            recipe["data"] = {"examples_per_step": 6, **sections.get("data", {"path": "/a"})}
        with pytest.raises(ValueError) as error:
            RunConfig.model_validate(recipe)
        assert reason in str(error.value), sections


def test_a_held_out_split_is_that_of_the_same_data() -> None:
    (found,) = DataConfig.model_validate(
        {"sets": [{"path": "org/some.data", "subset": "en", "messages": "talk", "held_out": {"split": "test"}}]}
    ).members.values()
    held = found.held_out_rows()
    assert held is not None
    assert (held.source, held.messages) == (("org/some.data", "en", "test"), "talk")
