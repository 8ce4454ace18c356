"""Faults of each operation while checkpoints are cleaned up, published and searched: no good checkpoint is lost,
`latest` names a good one, and the next start finds the newest. No torch: folders and manifests only."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_injection import ONCE, Clock, Fault, FaultyFiles, Operation, Tally, faults

from megatron_rl.checkpoint.publish import clean_up, find_latest, pass_over, publish
from megatron_rl.contract.manifest import FileRecord, Manifest, find_defect
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.save_section import SaveConfig

CONFIG = SaveConfig(keep=1, keep_every=20)
LONG_S = 60.0
PERMANENT, BEFORE, FRESH, LATER = 20, 30, 40, 50


class Checkpoints:
    """Checkpoints of a run: a permanent one, a newer one whose replacement was interrupted, and debris. A start then
    cleans up and publishes the next one."""

    def __init__(self, root: Path, files: FaultyFiles) -> None:
        """An older state has only the permanent one."""
        self.run = RunDir(root)
        clean_up(self.run)
        self.save(PERMANENT)
        files.remember()
        self.save(BEFORE)
        self.run.checkpoint(BEFORE).rename(self.run.checkpoints / f".{self.run.checkpoint(BEFORE).name}.old.tmp")
        self.run.unfinished_checkpoint(FRESH, "dead").mkdir()

    def save(self, step: int, content: bytes = b"shard") -> None:
        """Write a checkpoint. Raises OSError."""
        folder = self.run.unfinished_checkpoint(step, f"a-{step}")
        folder.mkdir()
        with (folder / "__0_0.distcp").open("wb") as file:
            file.write(content)
        files = {"__0_0.distcp": FileRecord(len(content), hashlib.sha256(content).hexdigest())}
        before = {PERMANENT: None, BEFORE: PERMANENT, FRESH: BEFORE, LATER: FRESH}[step]
        publish(self.run, folder, Manifest(step, f"a-{step}", 1, before, 0.5, 2.0, {}, files), CONFIG)

    def good(self) -> set[int]:
        return {step for step in self.run.checkpoint_steps() if find_defect(self.run.checkpoint(step)) is None}

    def start(self) -> bool:
        """Start a run that saves once. Return whether the save was published."""
        try:
            clean_up(self.run)
            self.save(FRESH)
        except OSError:
            return False
        return True


@contextmanager
def checkpoints(root: Path) -> Iterator[tuple[Checkpoints, FaultyFiles]]:
    """Checkpoints of a run on a file system that may fail."""
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch)
        files = FaultyFiles(root, patch)
        with files.aside():
            made = Checkpoints(root, files)
        yield made, files


def tried(root: Path, fault: Fault | None) -> tuple[list[Operation], list[str]]:
    """Run the operations of a start. Return what is wrong afterwards."""
    with checkpoints(root) as (made, files):
        files.starts()
        files.fail(fault)
        published = made.start()
        with files.aside():
            return files.operations, problems_of(made, published)


def problems_of(made: Checkpoints, published: bool) -> list[str]:
    problems = []
    clean_up(made.run)  # the next start
    good, newest = made.good(), find_latest(made.run).step
    kept = {PERMANENT, FRESH} if published else {PERMANENT, BEFORE}
    if not kept <= good:
        problems.append(f"good are {sorted(good)}, {'' if published else 'not '}published")
    if newest not in kept:
        problems.append(f"the newest is {newest}")
    named = made.run.latest_checkpoint.read_text().strip()
    if named not in {made.run.checkpoint(step).name for step in good}:
        problems.append(f"latest leads to {named}")
    if any(path.suffix for path in made.run.checkpoints.iterdir() if not path.name.startswith(".")):
        problems.append(f"debris: {sorted(path.name for path in made.run.checkpoints.iterdir())}")
    if not published:
        made.save(FRESH)
    made.save(LATER)
    if made.good() != {PERMANENT, FRESH, LATER} and made.good() != {PERMANENT, LATER}:
        problems.append(f"good in the end are {sorted(made.good())}")
    return problems


@pytest.mark.parametrize("seconds", [ONCE, pytest.param(LONG_S, marks=pytest.mark.slow)])
def test_no_fault_loses_a_checkpoint(tmp_path: Path, record_property, seconds: float) -> None:
    numbers = itertools.count()
    operations, problems = tried(tmp_path / "whole", None)
    assert problems == []
    assert len(operations) > 30
    tally = Tally()
    for fault in faults(operations, None, seconds):
        _, found = tried(tmp_path / str(next(numbers)), fault)
        problems += [f"{fault} ({operations[fault.at]}): {problem}" for problem in found]
        tally.count(fault, operations[fault.at].kind)
    tally.report("checkpoints, once" if seconds == ONCE else f"checkpoints, for {seconds:.0f} s", record_property)
    assert problems == []
    assert tally.operations >= {"open", "read", "stat", "list", "create", "write", "fsync", "rename", "rmdir", "unlink"}


def passed_over(root: Path, fault: Fault | None) -> list[Operation]:
    """Continue from the permanent checkpoint, in at most two tries."""
    with checkpoints(root) as (made, files):
        with files.aside():
            clean_up(made.run)
        files.starts()
        files.fail(fault)
        try:
            pass_over(made.run, [BEFORE], PERMANENT)
        except OSError:
            with files.aside():
                assert made.good() >= {PERMANENT}
                pass_over(made.run, [step for step in made.run.checkpoint_steps() if step > PERMANENT], PERMANENT)
        with files.aside():
            assert made.good() == {PERMANENT}, fault
            assert made.run.passed_over_steps() == [BEFORE], fault
            assert made.run.latest_checkpoint.read_text() == made.run.checkpoint(PERMANENT).name + "\n", fault
        return files.operations


def test_a_start_that_fails_while_it_passes_over_a_checkpoint_can_repeat_it(tmp_path: Path, record_property) -> None:
    operations = passed_over(tmp_path / "whole", None)
    tally = Tally()
    for number, fault in enumerate(faults(operations)):
        passed_over(tmp_path / str(number), fault)
        tally.count(fault, operations[fault.at].kind)
    tally.report("passing over", record_property)
    assert tally.operations >= {"stat", "rename", "create", "fsync"}


def looked(root: Path, fault: Fault | None) -> tuple[list[Operation], int | None]:
    """Find the newest checkpoint."""
    with checkpoints(root) as (made, files):
        with files.aside():
            clean_up(made.run)
        files.starts()
        files.fail(fault)
        try:
            found = find_latest(made.run)
        except OSError:
            return files.operations, None
        assert found.step == BEFORE or found.passed_over or (fault is not None and fault.kind == "older")
        return files.operations, found.step


def test_a_search_for_the_newest_finds_a_good_one_or_reports_why_not(tmp_path: Path, record_property) -> None:
    operations, step = looked(tmp_path / "whole", None)
    assert step == BEFORE
    tally = Tally()
    for number, fault in enumerate(faults(operations)):
        _, step = looked(tmp_path / str(number), fault)
        assert step in (BEFORE, PERMANENT, None), fault
        tally.count(fault, operations[fault.at].kind)
    tally.report("looking for the newest", record_property)
    assert tally.operations == {"list", "open", "read", "stat"}
