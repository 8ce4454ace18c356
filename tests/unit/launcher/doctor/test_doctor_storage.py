"""The run root is tested without leaving anything there, and judged by what the run will write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from doctor_helpers import disk, facts, profile, recipe, said

from launcher.backends.probe import disk as backend
from launcher.backends.probe.command import CommandAnswer
from launcher.backends.probe.disk import Disk, inspect, over_quota
from launcher.doctor.examine import examine
from launcher.doctor.finding import DoctorFinding


def about(topic: str, run_root: Disk, size: int | None = None, **values: object) -> list[DoctorFinding]:
    findings = examine(facts("25.05", run_root=run_root, checkpoint_bytes=size), recipe(), profile(**values))
    return [one for one in findings if one.topic == topic]


def test_a_directory_is_measured_and_left_as_it_was(tmp_path):
    seen = inspect(tmp_path).measured
    assert seen is not None
    assert (seen.directory, seen.writable, seen.problem) == (str(tmp_path), True, None)
    assert seen.bytes_per_s is not None and seen.bytes_per_s > 0
    assert seen.free_bytes > 0
    assert not list(tmp_path.iterdir())


def test_a_missing_directory_is_tested_in_its_parent_and_not_made(tmp_path):
    seen = inspect(tmp_path / "some where" / "'quoted'").measured
    assert seen is not None
    assert (seen.directory, seen.writable) == (str(tmp_path), True)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written():
    seen = inspect(Path("/proc/runs")).measured
    assert seen is not None
    assert not seen.writable and seen.problem


def test_a_file_system_that_hangs_times_out(monkeypatch, tmp_path):
    """The child is a Python that sleeps, like one that waits for a dead file server."""
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(backend.sys, "executable", str(tmp_path / "python"))
    hung = inspect(tmp_path, limit_s=0.2)
    assert (hung.measured, hung.failure) == (None, "no answer within 0 s")
    assert said(about("run root", hung)).startswith(f"error: {tmp_path}: no answer")


def test_a_good_run_root():
    assert said(about("run root", disk())) == "ok: /shared/mrl on lustre"
    assert said(about("run root", disk(directory="/shared"))) == "ok: /shared/mrl, will be made on lustre"


def test_an_unwritable_run_root():
    broken = disk(writable=False, bytes_per_s=None, problem="Read-only file system")
    assert said(about("run root", broken)) == "error: /shared/mrl cannot be written: Read-only file system"
    assert not about("space", broken)


@pytest.mark.parametrize(("speed", "level"), [(10e6, "warning"), (500e6, "ok")])
def test_speed(speed, level):
    assert [one.level for one in about("speed", disk(bytes_per_s=speed))] == [level]


def test_the_profiles_bandwidth_takes_precedence_over_the_measured_one():
    assert "373 GiB takes about 3 min (fs_bandwidth)" in said(about("speed", disk(), 4 * 10**11, fs_bandwidth=2.0))
    assert "373 GiB takes about 7 min (1 node at this speed)" in said(about("speed", disk(), 4 * 10**11))


def test_space_for_the_checkpoints_that_are_kept():
    assert "9.09 TiB free; demo keeps up to 1.09 TiB (3 checkpoints" in said(about("space", disk(), 4 * 10**11))
    (full,) = about("space", disk(free_bytes=10**12), 4 * 10**11)
    assert full.level == "error"


QUOTA = "Disk quotas for user ada (uid 1000):\n     Filesystem  blocks   quota   limit   grace   files\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", None),
        ("Disk quotas for user ada (uid 1000): none\n", None),
        (QUOTA + "/dev/sda1 1000000 0 0 0 50 0 0 0\n", None),
        (QUOTA + "/dev/sda1 1000000 9000000 9900000 0 50 0 0 0\n", None),
        (
            QUOTA + "/dev/sda1 1000000 2000000 2500000 0 50 0 0 0\n",
            "/dev/sda1: 1.43 GiB are left of your quota of 2.38 GiB",
        ),
        (QUOTA + "/dev/sda1 9000001* 9000000 9900000 1767225600 50 0 0 0\n", "/dev/sda1: over quota"),
        (QUOTA + "/dev/sda1 1 0 0 0 501* 500 600 1767225600\n", "/dev/sda1: over quota"),
        ("/lustre 1000000 0 2500000 - 50 0 0 -\n", "/lustre: 1.43 GiB are left of your quota of 2.38 GiB"),
        ("/lustre [1000000] 0 0 - 50 0 0 -\n", None),
    ],
)
def test_quota(text, problem):
    """The run needs 2 GB."""
    assert over_quota(text, 2 * 10**9) == problem


def test_quota_findings():
    tight = replace(disk(), quota=CommandAnswer("/lustre 1000000 0 2500000 - 50 0 0 -\n"))
    assert said(about("quota", tight, 10**9)).startswith("error: /lustre: 1.43 GiB are left")
    unknown = replace(disk(), quota=CommandAnswer(failure="this machine has no command quota"))
    assert said(about("quota", unknown)) == "note: unknown: this machine has no command quota"
    assert said(about("quota", disk())) == "ok: none"


def test_a_file_instead_of_the_directory(tmp_path):
    (tmp_path / "runs").write_text("")
    seen = inspect(tmp_path / "runs").measured
    assert seen is not None
    assert (seen.writable, seen.problem) == (False, "is a file")
