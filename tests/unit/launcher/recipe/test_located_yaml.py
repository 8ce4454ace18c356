"""YAML reader: its differences from PyYAML's, and nothing else."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.recipe.located_yaml import YamlProblems, dump, read


@pytest.mark.parametrize("text", ["4:00:00", "1-00:00:00", "30:00", "1:30.5", "/a:/b", "="])
def test_times_and_signs_are_text(text):
    assert read(text).value == text


@pytest.mark.parametrize(("text", "number"), [("1e-3", 1e-3), ("1E5", 1e5), ("-.5", -0.5), ("2.5e-4", 2.5e-4)])
def test_numbers_need_no_dot(text, number):
    assert read(text).value == number


ALIKE = "0 -1 +3 0.5 1.5 1. .inf -.inf 1.2.3 1-2 0-1 true False ~ a_1 _ 0ab"
DIFFERENT = "0100 -007 08 00 0x1F 0b11 0o17 1_000 1_000.5 01.5 yes No ON off 2026-11-21 2026-13-41"


@pytest.mark.parametrize("text", ALIKE.split())
def test_everything_else_is_read_as_by_pyyaml(text):
    assert repr(read(text).value) == repr(yaml.safe_load(text))


@pytest.mark.parametrize("text", [*DIFFERENT.split(), "2026-11-21 10:00:00"])
def test_values_that_yaml_readers_disagree_about_are_refused(text):
    for document, where in ((text, ""), (f"a: {{b: [{text}]}}", "a.b.0: ")):
        with pytest.raises(YamlProblems, match="quotes") as caught:
            read(document)
        [(line, what)] = caught.value.problems
        assert line == 1 and what.startswith(f"{where}{text} is ")
    assert read(f'"{text}"').value == text


def test_nan_is_a_number():
    assert math.isnan(read(".nan").value)


@example("1e5")
@example("08")
@example("0o17")
@example("1_0.5")
@given(st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text() | st.booleans() | st.none())
def test_dumped_values_read_back(value):
    """Both readers agree: ours, and plain PyYAML in the ranks."""
    text = dump({"key": value})
    assert read(text).value == yaml.safe_load(text) == {"key": value}
