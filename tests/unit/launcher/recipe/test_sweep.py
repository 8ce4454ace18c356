"""Sweeps: every combination of the given values, each with a name that is valid for a directory."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import BadInput
from launcher.recipe.sweep import chains, split, variants


def test_without_several_values_there_is_one_run_without_a_name():
    (only,) = variants(["training.seed=3", "grpo.group_size=8"])
    assert (only.overrides, only.name) == (("training.seed=3", "grpo.group_size=8"), "")
    assert len(variants([])) == 1


def test_every_combination_the_last_key_fastest():
    found = variants(["grpo.group_size=8,16", "job.nodes=2", "optimizer.learning_rate=1e-6,5e-7"])
    assert [one.name for one in found] == [
        "group_size=8_learning_rate=1e-6",
        "group_size=8_learning_rate=5e-7",
        "group_size=16_learning_rate=1e-6",
        "group_size=16_learning_rate=5e-7",
    ]
    assert found[2].overrides == ("grpo.group_size=16", "job.nodes=2", "optimizer.learning_rate=1e-6")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["grpo.group_size=8, 4,8"], "override 'grpo.group_size=8, 4,8': 8 occurs twice"),
        (["training.seed=1,2", "training.seed=3"], "override 'training.seed=1,2': training.seed is given again"),
    ],
)
def test_two_runs_that_would_be_the_same_are_refused(overrides, said):
    with pytest.raises(BadInput, match=re.escape(said)):
        variants(overrides)


def test_keys_with_equal_last_parts_are_named_in_full():
    (first, _) = variants(["training.seed=1,2", "model.supervised.seed=3"])
    assert first.name == "seed=1"
    first = variants(["training.seed=1,2", "model.supervised.seed=3,4"])[0]
    assert first.name == "training.seed=1_model.supervised.seed=3"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2", ["1", "2"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{a: 1, b: 2}", ["{a: 1, b: 2}"]),
        ('"a,b"', ['"a,b"']),
        ("'a,b',c", ["'a,b'", "c"]),
        ("a,", ["a,"]),
        ("[1,2", ["[1,2"]),
        ("", [""]),
    ],
)
def test_commas_outside_quotes_and_brackets_separate_values(text, values):
    assert split(text) == values


@given(st.lists(st.text(max_size=5).filter(bool), min_size=2, max_size=4, unique_by=str.strip))
def test_names_are_distinct_and_fit_for_shell_slurm_and_pyxis(values):
    quoted = [repr(value) for value in values]
    found = variants([f"environment.args.text={','.join(quoted)}"])
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    if len(found) > 1:
        assert all(re.fullmatch(r"[A-Za-z0-9._=+-]+", name) for name in names)


@given(jobs=st.integers(1, 30), running=st.integers(1, 8))
def test_never_more_jobs_run_at_once_than_allowed(jobs, running):
    waits: list[list[str]] = []
    for _ in range(jobs):
        waits.append(chains([str(job) for job in range(len(waits))], running))
    ended: set[str] = set()
    while len(ended) < jobs:
        ready = {str(job) for job in range(jobs) if set(waits[job]) <= ended} - ended
        assert 0 < len(ready) <= running
        ended.add(max(ready, key=int))  # whichever ends first
