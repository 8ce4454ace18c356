"""How a run is named on the command line, and the index that finds it."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import make_run, submitted

from launcher.cli.resume import command as resume
from launcher.cli.submit import launch as launch_module
from launcher.errors import BadInput
from launcher.host.record.identity import index_file, note_submission
from launcher.runs import find as find_module
from launcher.runs.find import find, is_run, newest_first, pasteable_command
from launcher.start.request import Request
from megatron_rl.contract.records import append
from megatron_rl.contract.run_records import Submission


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no Slurm
    return tmp_path


def refusal(name: str | None) -> str:
    with pytest.raises(BadInput) as caught:
        find(name)
    return "\n".join(caught.value.problems)


def test_the_index_lies_in_the_state_directory(tmp_path):
    assert index_file({"XDG_STATE_HOME": "/s"}) == Path("/s/mrl/runs.jsonl")
    assert index_file({"HOME": "/h"}) == Path("/h/.local/state/mrl/runs.jsonl")


def test_without_a_name_the_newest_submission_is_meant(tmp_path):
    assert "no run has been submitted" in refusal(None)
    first = submitted(tmp_path / "a")
    assert find(None).root == first.root
    second = submitted(tmp_path / "b")
    assert find(None).root == second.root
    note_submission(first, "local", None)
    assert find(None).root == first.root, "resumed last"
    assert [Path(entry.run_dir).name for entry in newest_first()] == ["a", "b"]


def test_a_name_its_beginning_and_a_path(tmp_path, monkeypatch):
    run = submitted(tmp_path / "demo-1")
    submitted(tmp_path / "other")
    assert find("demo-1").root == run.root
    assert find("dem").root == run.root
    assert find(str(run.root)).root == run.root
    monkeypatch.chdir(tmp_path)
    stranger = make_run(tmp_path / "never-indexed")
    assert find("never-indexed").root.absolute() == stranger.root
    submitted(tmp_path / "demo-1-again")
    assert find("demo-1").root.absolute() == run.root, "a whole name wins over a longer one"


def test_an_ambiguous_name_lists_the_runs(tmp_path):
    for name in ("demo-1", "demo-2", "demo-3"):
        submitted(tmp_path / name)
    text = refusal("demo")
    assert text.startswith("'demo' means 3 runs; give the whole name or the path:")
    assert str(tmp_path / "demo-2") in text


def test_an_unknown_name_offers_near_ones(tmp_path):
    submitted(tmp_path / "demo-20261121")
    assert refusal("domo-20261121") == "no run is called 'domo-20261121'; did you mean demo-20261121?"
    assert "`mrl ls`" in refusal("zebra")
    assert "no run is called" in refusal("a\0b"), "no file can have this name"


def test_a_run_whose_directory_was_removed_is_known_and_its_log_is_named(tmp_path):
    kept, root = submitted(tmp_path / "kept").root, submitted(tmp_path / "demo").root
    shutil.rmtree(root)
    assert find(None).root == kept
    assert refusal("demo") == f"the directory of the run 'demo' is gone: {root}"
    (tmp_path / "demo.log").touch()
    assert refusal(str(root)).endswith(f"is gone: {root}; {root}.log may say how its ranks ended")


def test_every_job_id_of_a_run_names_it(tmp_path):
    run = submitted(tmp_path / "a", job_id="7", cluster="lab")
    note_submission(run, "lab", "9")
    assert find("7").root == find("9").root == run.root
    assert "no run with job 8" in refusal("8")


def test_a_job_of_plain_sbatch_is_found_by_its_log(tmp_path, home):
    run = make_run(tmp_path / "a b")
    fake = home / "bin" / "scontrol"
    fake.write_text(f"#!/bin/sh\necho 'JobId=12 JobName=x JobState=COMPLETED StdOut={run.root}.log Power='\n")
    fake.chmod(0o755)
    os.environ["PATH"] += ":/bin:/usr/bin"
    assert find("12").root == run.root


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_means_no_run(tmp_path, name):
    submitted(tmp_path / "a")
    assert "RUN is empty" in refusal(name)


def test_a_run_that_one_may_not_look_into_may_be_one(tmp_path, monkeypatch):
    run = submitted(tmp_path / "a")

    def denied(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", denied)
    assert find(str(run.root)).root == run.root
    assert [entry.run_dir for entry in newest_first()] == [str(run.root)]


def test_lines_of_the_index_that_are_none_are_passed_over_and_an_index_that_is_none_is_said(tmp_path):
    run = submitted(tmp_path / "a")
    with index_file().open("a") as file:
        file.write('5\n{}\n{"run_dir": "/x", "cluster": "c", "at": 1.0, "job_id": null, "more": 1}\n{"run_d')
    later = submitted(tmp_path / "later")  # ends the torn line first
    assert [entry.run_dir for entry in newest_first()] == [str(later.root), str(run.root)]
    index_file().unlink()
    index_file().mkdir()
    assert "runs.jsonl cannot be used" in refusal("b")


def test_an_index_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc")
    assert "by its path only" in (note_submission(make_run(tmp_path / "a"), "local", None) or "")


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_a_command_that_we_print_means_the_same_run_when_it_is_pasted(name):
    assert pasteable_command("cancel --drain", "demo-1") == "mrl cancel --drain demo-1"
    words = shlex.split(pasteable_command("resume --follow", name, "training.steps=9"))
    assert words[:3] == ["mrl", "resume", "--follow"]
    parsed = resume.make_context("resume", words[2:], resilient_parsing=True).params
    assert (parsed["run"], parsed["overrides"]) == (name, ("training.steps=9",))


def test_a_run_of_a_sweep_is_resumed_by_its_name(tmp_path, monkeypatch):
    asked: list[Request] = []
    monkeypatch.setattr(launch_module, "launch", lambda request: asked.append(request) or 0)
    run, newest = submitted(tmp_path / "demo-1_group_size=8"), submitted(tmp_path / "newest")
    for words, root, overrides in (
        ([run.root.name], run.root, ()),
        ([run.root.name, "training.steps=9"], run.root, ("training.steps=9",)),
        ([str(run.root)], run.root, ()),
        (["training.steps=9"], newest.root, ("training.steps=9",)),
        ([], newest.root, ()),
    ):
        done = CliRunner().invoke(resume, words)
        assert done.exit_code == 0, done.output
        assert (asked[-1].run_dir, asked[-1].overrides) == (root, overrides), words
    done = CliRunner().invoke(resume, ["demo-1_group_size=9"])
    assert (done.exit_code, "did you mean demo-1_group_size=8?" in done.stderr) == (2, True)


def test_a_run_is_found_by_a_name_that_is_a_number(tmp_path):
    run = submitted(tmp_path / "2026")
    assert find("2026").root == run.root
    submitted(tmp_path / "other", job_id="2026", cluster="lab")
    assert refusal("2026").startswith("2026 is the job or the name of 2 runs; give the path:")


def test_of_many_runs_only_those_are_looked_at_that_may_be_meant(tmp_path, monkeypatch):
    """Each look is a question to a network file system."""
    index_file().parent.mkdir(parents=True)
    for number in range(3 * find_module.AHEAD):
        append(index_file(), Submission(str(tmp_path / f"gone-{number}"), "local", 0.0, str(number)))
    wanted, newest = submitted(tmp_path / "wanted", job_id="4711"), submitted(tmp_path / "newest")
    looks = []

    def counted(path: str) -> bool:
        looks.append(path)
        return is_run(path)

    monkeypatch.setattr(find_module, "is_run", counted)
    for name, run, most in (("wan", wanted, 2), ("4711", wanted, 2), (None, newest, find_module.AHEAD)):
        looks.clear()
        assert find(name).root == run.root
        assert len(looks) <= most
