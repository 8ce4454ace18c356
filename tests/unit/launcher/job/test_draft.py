"""Obstacles to a job are reported before it is submitted."""

from __future__ import annotations

import os

from launcher.cluster.profile import Profile
from launcher.job.draft import draft
from launcher.recipe.load import load_recipe


def test_a_place_where_slurm_cannot_write_the_log_is_an_obstacle(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    profile = Profile(gpus_per_node=8, run_root=str(tmp_path))

    def obstacles() -> tuple[str, ...]:
        return draft(load_recipe("demo", ["cluster=lab"]), "lab", profile, run_dir).obstacles

    assert obstacles() == ()
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    (told,) = obstacles()
    assert told.startswith(f"you may not write to {tmp_path}, where Slurm writes the job's log")
    (tmp_path / "run.log").touch()
    assert obstacles() == ()


def test_a_folder_that_the_submission_makes_is_not_said_to_be_missing(tmp_path):
    profile = Profile(gpus_per_node=8, run_root=str(tmp_path))
    notes = draft(load_recipe("demo", ["cluster=lab"]), "lab", profile, tmp_path / "sweep" / "run").notes
    assert not [note for note in notes if str(tmp_path) in note]
