"""The durable bank: what generation has paid for outlives the process.

    bank.scored(ordinals, problem)    by earlier attempts: nothing of these groups is done again
    recording = bank.recording(inference)
    recording.generate(request)       an interrupted answer goes on from the tokens it had
    recording.add(group)              scored
    bank.begin_checkpoint(step, next_ordinal, waiting)    it settles all below this ordinal, and needs what waits ...
    bank.end_checkpoint(step)                             ... and is published: they are forgotten

What is being recorded is written every `resume.flush_s`, after each batch unless that was moments ago, and when the
driver stops. One file per attempt and driver (file.py); every driver reads those of all, since another number of ranks
has other shares. Losing any of it costs repeated work, never a wrong record: what is damaged, torn or of a line of
training that was given up is as if it had not been. What would make the record another one is on disk before a
checkpoint is published.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from functools import partial
from itertools import chain, starmap
from pathlib import Path

from megatron_rl.agent.problem_digest import ProblemDigest
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import RunDir
from megatron_rl.inference.api import ResumableInference
from megatron_rl.rollout.agent_loop import DriverRole
from megatron_rl.rollout.bank.file import BankFile, Entry, Record, bank_file, bank_files, scan
from megatron_rl.rollout.bank.recording import EarlierWork, Recording, ScoredGroup
from megatron_rl.rollout.bank.records import Lineage, attempt_record, fingerprint, group_record
from megatron_rl.rollout.bank.selection import records_within, reusable_records, unsettled_records, whole_share
from megatron_rl.rollout.config import ResumeConfig

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 3.0
SECURE_TIMEOUT_S = 60.0
"""That what a checkpoint needs may take to be on disk, before the checkpoint counts as failed."""
WORTH_WRITING_S = 1.0
"""What took less than this to generate waits for more: to write every step of a tiny model takes a tenth of it."""


class Bank:
    """What one driver knows of earlier attempts, and the file it writes."""

    def __init__(
        self, folder: Path, resume: ResumeConfig, lineage: Lineage, *, next_ordinal: int, driver: int, drivers: int
    ) -> None:
        """Reads what there is.

        Args:
            next_ordinal: all below it are settled.
            driver: number of this driver among `drivers`; the first one tidies up.
        """
        self._folder = folder
        self._resume = resume
        self._lineage = lineage
        self._keeps_parts = resume.partial == "keep"
        self._first = driver == 0
        self._settled_below = next_ordinal
        limit = int(resume.bank_gib * 2**30) // drivers
        self._file = BankFile(bank_file(folder, lineage.attempt, driver), limit, records_within)
        self._first_record = [attempt_record(lineage)]
        self._unwritten: list[ScoredGroup] = []
        self._flushed_at = time.monotonic()
        self._checkpoints: dict[int, int] = {}  # step: ordinal below which all is settled
        self._read()
        if self._first:
            for debris in folder.glob(".*.tmp"):
                debris.unlink(missing_ok=True)

    def scored(
        self, ordinals: Sequence[int], problem: Callable[[int], Problem], *, waiting: bool = False
    ) -> dict[int, TrajectoryGroup]:
        """What earlier attempts have scored of a driver's share. With `resume.partial: regenerate` that is all of it or
        nothing, unless they were `waiting`, see `begin_checkpoint`: then what is not there is no group."""
        if any(not path.exists() for path in {entry.path for entry in self._entries}):
            self._read()  # the first driver has folded them into its own file
        groups = self._earlier.scored(ordinals, problem)
        return groups if self._keeps_parts or waiting else whole_share(ordinals, groups)

    def recording(self, inference: ResumableInference) -> Recording:
        """The inference of a driver's agents."""
        return Recording(
            inference, lambda: self._earlier, self._lineage, self._unwritten.append, with_parts=self._keeps_parts
        )

    def flush_if_due(self, recording: Recording) -> None:
        """Write, behind the caller, what is new. Called after each batch: the loop may stop while it is trained."""
        if time.monotonic() - self._flushed_at > min(self._resume.flush_s, WORTH_WRITING_S):
            self.flush(recording)

    def begin_checkpoint(
        self, step: int, next_ordinal: int, waiting: Iterable[TrajectoryGroup] = ()
    ) -> Callable[[], None]:
        """A checkpoint of `step` is being saved: it settles all ordinals below `next_ordinal`.

        waiting: groups beyond, with which a run goes on from there as they are: its weights would sample others.

        Returns what has to have returned before the checkpoint is published, for any thread. It waits until these are
        on disk, and with them where this attempt went on from, without which a later one could take work of a line that
        was given up for its own. Raises OSError where that cannot be.
        """
        self._checkpoints[step] = next_ordinal
        groups = [group for group in waiting if group.ordinal not in self._earlier.groups]
        on_disk = self._file.secure(partial(self._missing, groups))

        def wait() -> None:
            try:
                on_disk.result(SECURE_TIMEOUT_S)
            except NotYet as error:
                raise OSError(f"{self._file.path} is not written within {SECURE_TIMEOUT_S:g} s") from error

        return wait

    def _missing(self, groups: Sequence[TrajectoryGroup], there: Sequence[Entry]) -> Iterator[Record]:
        """Of the record of this attempt and those of these groups."""
        begun = {entry.head["lineage"]["attempt"] for entry in there if entry.head["kind"] == "attempt"}
        known = {entry.head["ordinal"] for entry in there if entry.head["kind"] == "group"}
        if self._lineage.attempt not in begun:
            yield attempt_record(self._lineage)
        for group in groups:
            if group.ordinal not in known:
                newest = max((max(each.versions) for each in group.trajectories), default=self._lineage.policy_version)
                yield group_record(group, newest, newest, self._lineage)

    def end_checkpoint(self, step: int) -> None:
        """It is published: forget what it settles, behind the caller."""
        below = self._settled_below = max(self._settled_below, self._checkpoints.pop(step))
        self._index([entry for entry in self._entries if entry.head["ordinal"] >= below])
        self._unwritten[:] = [each for each in self._unwritten if each.group.ordinal >= below]
        folded: list[Entry] = []
        superseded: set[Path] = set()
        if self._first:
            ours = self._file.path.name.partition(".")[0]
            superseded = {path for path in bank_files(self._folder) if path.name.partition(".")[0] != ours}
            folded = [entry for entry in [*self._attempts, *self._entries] if entry.path in superseded]
        self._file.compact(lambda entries: unsettled_records(entries, below), folded, superseded)

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        if not self._file.wait(WRITE_TIMEOUT_S):
            logger.warning("%s was not written within %g s", self._file.path, WRITE_TIMEOUT_S)
        self._file.close()

    # What earlier attempts left

    def _read(self) -> None:
        entries: list[Entry] = []
        damaged = 0
        for path in bank_files(self._folder):
            with suppress(OSError):  # folded into another one meanwhile, or unreadable: then it is generated again
                found = scan(path)
                entries += found.entries
                damaged += found.damaged
        selection = reusable_records(entries, self._lineage, self._settled_below, self._resume.newer)
        self._attempts = [entry for entry in entries if entry.head["kind"] == "attempt"]
        self._index(selection.entries)
        if self._first and (entries or damaged):
            self._report(selection.discarded, damaged)

    def _index(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._earlier = EarlierWork.index(entries, with_parts=self._keeps_parts)

    def _report(self, discarded: Counter[str], damaged: int) -> None:
        earlier = self._earlier
        parts = [f"{len(earlier.groups)} scored groups and {len(earlier.parts)} answers of earlier attempts"]
        parts += [f"{count} records put aside, {reason}" for reason, count in sorted(discarded.items())]
        if damaged:
            parts.append(f"{damaged} damaged or torn places skipped")
        logger.info("bank: %s", "; ".join(parts))

    # What this one leaves

    async def flush_regularly(self, recording: Recording) -> None:
        """Write what is new every `resume.flush_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._resume.flush_s)
            self.flush(recording)

    def flush(self, recording: Recording | None = None) -> None:
        """Write, behind the caller, what is new."""
        scored = [(each.group, each.version, each.newest, self._lineage) for each in self._unwritten]
        parts = recording.new_parts() if recording else []
        if scored or parts or self._first_record:
            # Packed by the file's thread: in here it would be a pause of generation, on one rank at a time.
            self._file.append(chain(self._first_record, starmap(group_record, scored), parts))
        self._first_record = []
        self._unwritten.clear()
        self._flushed_at = time.monotonic()


def open_bank(
    run_dir: RunDir,
    attempt: int,
    config: RunConfig,
    role: DriverRole,
    problems: Mapping[str, ProblemDigest],
    *,
    step: int,
    policy_version: int,
    next_ordinal: int,
) -> Bank:
    """The bank of a run that goes on after `step`, whose weights are those of `policy_version`, for this rank, which
    drives.

    problems: trained on, by environment.
    """
    lineage = Lineage(run_dir.root.name, attempt, step, policy_version, fingerprint(config, problems))
    return Bank(
        run_dir.bank,
        config.resume,
        lineage,
        next_ordinal=next_ordinal,
        driver=role.index,
        drivers=role.count,
    )
