"""YAML as people mean it: where our reading differs from PyYAML's, and that it does nowhere else."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.recipe.located_yaml import dump, read


@pytest.mark.parametrize("text", ["4:00:00", "1-00:00:00", "30:00", "1:30.5", "/a:/b", "="])
def test_times_and_signs_are_text(text):
    assert read(text).value == text


@pytest.mark.parametrize(("text", "number"), [("1e-3", 1e-3), ("1E5", 1e5), ("-.5", -0.5), ("2.5e-4", 2.5e-4)])
def test_numbers_need_no_dot(text, number):
    assert read(text).value == number


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "+3", "0x1F", "0b11", "017", "1_000", "1.5", "1.", ".inf", "-.inf", "08", "1.2.3", "1-2", "true", "~"],
)
def test_everything_else_is_as_ever(text):
    assert repr(read(text).value) == repr(yaml.safe_load(text))


def test_nan_is_a_number():
    assert math.isnan(read(".nan").value)


@example("1e5")
@given(st.integers() | st.floats(allow_nan=False) | st.text() | st.booleans() | st.none())
def test_what_is_written_reads_back(value):
    """With our reader, and with the ranks': plain PyYAML."""
    text = dump({"key": value})
    assert read(text).value == yaml.safe_load(text) == {"key": value}
