"""A command that we print means the same run when it is pasted into a shell, whatever the run is called."""

from __future__ import annotations

import shlex

from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.resume import command as resume
from launcher.runs.commands import mrl


def test_a_plain_name_stays_plain():
    assert mrl("cancel --drain", "demo-1") == "mrl cancel --drain demo-1"
    assert mrl("resume", "demo-1", "training.steps=N") == "mrl resume demo-1 training.steps=N"


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_any_name_is_one_word_and_no_option(name):
    words = shlex.split(mrl("resume --follow", name, "training.steps=9"))
    assert words[:3] == ["mrl", "resume", "--follow"]
    parsed = resume.make_context("resume", words[2:], resilient_parsing=True).params
    assert (parsed["run"], parsed["overrides"]) == (name, ("training.steps=9",))
